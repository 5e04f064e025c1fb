"""Evaluations during a run: requested in the manifest of published weights, done by one searcher, without stopping the
trainer.

Invariant: each requested version is evaluated by exactly one searcher (a claim in the journal), on pinned weights; its
time and tokens are counted separately from generation. The searcher makes rounds between the chunks of an evaluation:
otherwise an only searcher that evaluates for long would stall the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from tba.clock import ShareClock
from tba.errors import UserError
from tba.evaluation.accuracy import EvaluationSettings, assess_accuracy
from tba.protocols import Engine, EvaluationRequest, Journal, KeptWeights, Records, Reward, WeightSource
from tba.record.evaluations import read_evaluations
from tba.types import Json, Prompt, Version

log = logging.getLogger("tba.searcher")
EVALUATION_DEADLINE = 3600.0  # seconds for the last evaluation, and for a searcher that claimed one
_WHY = "evaluate"


@dataclass
class Requests:
    """Keeps the versions that wait for their evaluation: the first, one every so many steps, the last."""

    every: int  # steps; 0: the first and the last only
    steps: int  # of the run
    weights: KeptWeights
    is_done: Callable[[str], bool]  # whether an evaluation has been done, by its name
    averaged: bool = False  # the average of a version's weights is evaluated, under the version's name
    _forgotten: list[Version] = field(default_factory=list)  # whose weights are still pinned
    # seconds into the run at which it had the weights of each version
    _pending: dict[Version, float] = field(default_factory=dict)
    _last_step: int | None = None  # the step of the newest version that was published

    def manifest_entries(self, version: Version, seconds: float) -> list[EvaluationRequest]:
        """Returns the requests for evaluations that the manifest of a version, published now, has."""
        for evaluated_version in [v for v in self._pending if self.is_done(_job(v))]:
            del self._pending[evaluated_version]
            self.weights.unpin(self._source(evaluated_version), _WHY)
        if self._last_step is None or (version.step > self._last_step and self._is_due(version.step, self._last_step)):
            self._pending[version] = seconds
        self._last_step = version.step
        return [
            EvaluationRequest(v, seconds_into_run, 0 < v.step < self.steps, self._source(v))
            for v, seconds_into_run in self._pending.items()
        ]

    def pin(self) -> None:
        """Pin the requested versions, and unpin those that a resumed run has forgotten. It is called after publishing:
        only the publishing process prunes, and until then the newest manifest requests what is forgotten.
        """
        for version in map(self._source, self._pending):
            if _WHY not in self.weights.pins(version):
                self.weights.pin(version, _WHY)
        while self._forgotten:
            self.weights.unpin(self._forgotten.pop(), _WHY)

    @property
    def pending(self) -> list[Version]:
        """Returns the versions that were requested and, as far as is known, have not been evaluated."""
        return list(self._pending)

    def state(self) -> Json:
        """Returns the requests as JSON, which `restore` takes."""
        return {"pending": {str(v): s for v, s in self._pending.items()}, "seen": self._last_step}

    def restore(self, state: Json) -> None:
        """Continue from `state` with the requests whose weights are still there; later requests are forgotten."""
        requests = {Version.parse(name): seconds for name, seconds in state["pending"].items()}
        pending = {version: seconds for version, seconds in requests.items() if not self.is_done(_job(version))}
        kept_versions = self.weights.versions()
        self._pending = {v: seconds for v, seconds in pending.items() if self._source(v) in kept_versions}
        # None: the next version is evaluated in their place
        self._last_step = state["seen"] if len(self._pending) == len(pending) else None
        sources = set(map(self._source, self._pending))
        self._forgotten = [v for v in kept_versions if v not in sources and _WHY in self.weights.pins(v)]

    def _source(self, version: Version) -> Version:
        """Returns the version whose weights are evaluated as this one's."""
        return version.average if self.averaged else version

    def _is_due(self, step: int, previous_step: int) -> bool:
        return step >= self.steps or (self.every > 0 and step // self.every > previous_step // self.every)


@dataclass
class Examiner:
    """Evaluates the requested versions, between a searcher's rounds."""

    engine: Engine
    prompts: Sequence[Prompt]
    reward: Reward
    settings: EvaluationSettings
    policy_temperature: float
    journal: Journal
    weights: WeightSource
    records: Records
    seed: int
    claim_seconds: float  # after which a version that was not finished may be evaluated by another searcher
    clock: ShareClock
    interrupted: Callable[[], bool] | None = None
    evaluated_versions: set[Version] = field(default_factory=set)

    def evaluate_requests(
        self,
        requests: Sequence[EvaluationRequest],
        before: Callable[[], None],
        between: Callable[[], None] | None = None,
    ) -> None:
        """Evaluate the requested versions that nobody has claimed.

        before: what to do before the engine is used; between: between two chunks. On the searcher's clock both count
        as what they do.
        """
        for request in requests:
            version = request.version
            if version not in self.evaluated_versions and self.journal.claim(_job(version), self.claim_seconds):
                before()
                with self.clock.state("eval"):
                    settings = self.settings.during() if request.during else self.settings
                    try:
                        self.evaluate(version, request.wall_seconds, settings, between, request.weights)
                    except _Forgotten as error:
                        log.warning("version %s is not evaluated: %s", version, error)

    def evaluate(
        self,
        version: Version,
        wall_seconds: float,
        settings: EvaluationSettings,
        between: Callable[[], None] | None = None,
        weights: Version | None = None,
    ) -> None:
        """Evaluate one version on the held-out split, by its own `weights` (None) or their average; `wall_seconds` is
        when the run had these.
        """
        weights = weights or version
        self._load(weights)
        result = assess_accuracy(
            self.engine,
            self.prompts,
            self.reward,
            settings,
            # the same draws for every version, so that they can be compared in pairs
            np.random.default_rng([self.seed, 7]),
            now=time.monotonic,
            policy_temperature=self.policy_temperature,
            interrupted=self.interrupted,
            between_batches=None if between is None else partial(self._run_between, between, weights),
        )
        self.journal.count(
            evaluation_tokens=result.tokens,
            evaluation_trajectories=result.trajectories,
            evaluation_milliseconds=round(1000 * result.seconds),
        )
        if result.interrupted:
            return
        evaluations = [replace(e, version=version, wall_seconds=wall_seconds) for e in result.evaluations]
        self.records.write(evaluations, result.answers)
        self.journal.finish(_job(version), evaluations)
        self.evaluated_versions.add(version)

    def _run_between(self, between: Callable[[], None], version: Version) -> None:
        with self.clock.state("generating"):
            between()
        self._load(version)

    def _load(self, version: Version) -> None:
        if self.engine.version == version:
            return
        try:
            weights = self.weights.at(version)
        except UserError as error:
            newest = self.weights.newer_than(None)
            if newest is None or version in {request.weights for request in newest.manifest.evaluate}:
                raise
            raise _Forgotten("the trainer resumed from a checkpoint that does not know of it") from error
        self.engine.load(weights.read(), version)


class _Forgotten(Exception):
    """The weights to be evaluated are gone, and nobody requests them any more."""


def evaluated_to_the_end(directory: Path, steps: int, awaited_versions: Collection[Version]) -> bool:
    """Returns whether a run's last step has been evaluated, and all versions of which the trainer has not seen so."""
    versions = {e.version for e in read_evaluations(directory)}
    return versions.issuperset(awaited_versions) and any(version.step >= steps for version in versions)


def _job(version: Version) -> str:
    """Returns the name under which a version's evaluation is claimed."""
    return f"evaluate {version}"
