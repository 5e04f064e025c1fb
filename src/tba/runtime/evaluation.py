"""Evaluations during a run: asked for beside the weights, done by one searcher, the trainer not stopped.

Invariant: each version that is asked for is evaluated by exactly one searcher (a claim in the journal), on pinned
weights; its time and tokens are counted apart from generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from tba.evaluate.accuracy import EvaluationSettings, evaluate
from tba.protocols import Engine, PublishedWeights, Reward
from tba.record.clock import ShareClock
from tba.record.evaluations import EvaluationWriter
from tba.types import Evaluation, Json, Prompt, Version


class Jobs(Protocol):
    """Claims of evaluation jobs, and the counts of what they cost (the journal keeps both)."""

    def claim(self, job: str, seconds: float) -> bool: ...

    def finish(self, job: str, evaluations: Sequence[Evaluation]) -> None: ...

    def count(self, **increments: int) -> None: ...


class PinnedWeights(Protocol):
    """Weights by version."""

    def newer_than(self, version: Version | None) -> PublishedWeights | None: ...

    def at(self, version: Version) -> PublishedWeights: ...


@dataclass
class Examiner:
    """What a searcher does between rounds when a version is to be evaluated."""

    engine: Engine
    prompts: Sequence[Prompt]
    reward: Reward
    settings: EvaluationSettings
    policy_temperature: float
    jobs: Jobs
    weights: PinnedWeights
    writer: EvaluationWriter
    seed: int
    claim_seconds: float  # after which a version that was not finished may be evaluated by another searcher
    clock: ShareClock
    interrupted: Callable[[], bool] | None = None
    done: set[str] = field(default_factory=set)

    def answer(self, manifest: Mapping[str, Json]) -> None:
        """Evaluate the versions that `manifest` asks for and nobody has claimed."""
        for request in manifest.get("evaluate", ()):
            name = request["version"]
            if name not in self.done and self.jobs.claim(f"evaluate {name}", self.claim_seconds):
                with self.clock.state("eval"):
                    settings = self.settings.during() if request["during"] else self.settings
                    self.evaluate(Version.parse(name), float(request["wall_seconds"]), settings)

    def evaluate(self, version: Version, wall_seconds: float, settings: EvaluationSettings) -> None:
        """One version on the held-out split; `wall_seconds` is when the run had these weights."""
        if self.engine.version != version:
            self.engine.load(self.weights.at(version).read(), version)
        found = evaluate(
            self.engine,
            self.prompts,
            self.reward,
            settings,
            np.random.default_rng([self.seed, 7]),  # the same draws for every version: paired
            now=time.monotonic,
            policy_temperature=self.policy_temperature,
            interrupted=self.interrupted,
        )
        self.jobs.count(evaluation_tokens=found.tokens, evaluation_trajectories=found.trajectories)
        if found.interrupted:
            return
        evaluations = [replace(e, wall_seconds=wall_seconds) for e in found.evaluations]
        self.writer.write(evaluations, found.answers)
        self.jobs.finish(f"evaluate {version}", evaluations)
        self.done.add(str(version))
