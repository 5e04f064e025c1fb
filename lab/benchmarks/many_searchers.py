"""Many light searchers and one journal: how much 64 of them slow the trainer down.

    python lab/benchmarks/many_searchers.py [--searchers 64] [--steps 4000] [--rounds 3] [--runtime processes]

A run of the toy of `tests/toy` by `processes` (or `cluster`: Ray actors, here on one machine), with 1 searcher and with
--searchers, --rounds times. A searcher is light: its engine waits a second and answers from a table, as if the answers
came from another machine. Measured from a second after every searcher has sent something until the last step:
trajectories per second in the journal, milliseconds of a trainer step without the wait for its batch (median), the
share of time in which it waited. Also: seconds from the start of the command until every searcher had sent something,
and from the last step to the end.

This file is also the recipe: tba train lab/benchmarks/many_searchers.py --searchers 64
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from tba.evaluation.accuracy import EvaluationSettings
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Engine, Flow, Partner
from tba.recipe import Recipe
from tba.record.metrics import read_metrics
from tba.record.recorder import RecordSettings
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.rollout.exploration import Fixed
from tba.schedules import Constant
from tba.training.optimizer import OptimizerSettings
from tba.types import Completion, Prompt, Sampling, Version

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from toy.model import TabularModel
from toy.policy import TabularTask

_LOOK = 0.05  # seconds between two questions whether to stop


@dataclass
class LightEngine:
    """A tabular engine whose answers take a while and next to no processor time."""

    inner: Engine
    seconds: float  # of a call

    @property
    def version(self) -> Version:
        return self.inner.version

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        self.inner.load(weights, version)

    def flow(
        self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None
    ) -> LightFlow:
        return LightFlow(self.inner.flow(count, sampling, rng, partner), self.seconds)


@dataclass
class LightFlow:
    """As the tabular engine's, once the time is over, a call at a time."""

    inner: Flow
    seconds: float

    @property
    def prompts_submitted(self) -> int:
        return self.inner.prompts_submitted

    @property
    def prompts_needed(self) -> int:
        return self.inner.prompts_needed

    def submit(self, prompts: Sequence[Prompt]) -> None:
        self.inner.submit(prompts)

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_needed: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        until = time.monotonic() + self.seconds
        while time.monotonic() < until and not (interrupted is not None and interrupted()):
            time.sleep(_LOOK)
        return self.inner.next(interrupted, until_needed)

    def cancel(self, request: int) -> None:
        self.inner.cancel(request)


@dataclass(frozen=True)
class LightModel(TabularModel):
    """The toy with such an engine."""

    seconds: float = 1.0  # of a call

    def engine(self, version: Version, longest_prompt: int = 1) -> Engine:
        return LightEngine(super().engine(version), self.seconds)


task = TabularTask(symbols=8, length=4, prompts=13)
recipe = Recipe(
    name="many_searchers",
    description="many light searchers",
    task=task,
    model=LightModel(task),
    objective=TrajectoryBalance(beta=Constant(0.5)),
    exploration=Fixed(),
    optimizer=OptimizerSettings(lr=0.01),
    replay=ReplaySettings(
        selection=RecencyReward(m=0.5, inverse_temperature=0.0), pacing=Pacing(warm_up=32, max_mean_uses=1e9)
    ),
    evaluation=EvaluationSettings(every=0, problems=1),
    record=RecordSettings(tensorboard=False, samples_per_batch=0),
    steps=4000,
    groups_per_step=13,
    group_size=32,
    samples_per_prompt=32,
    prompts_per_round=1,
    sync_every=10,
)


@dataclass(frozen=True)
class Measured:
    """One run."""

    rate: float  # trajectories/s
    step: float  # milliseconds
    waited: float  # share
    start: float  # seconds
    stop: float  # seconds
    closes: bool


def measured(searchers: int, steps: int, runtime: str, folder: Path) -> Measured:
    """A run in `folder`."""
    command = [sys.executable, "-m", "tba", "train", __file__, "--runs", str(folder), "--run-name", "run"]
    command += ["--searchers", str(searchers), "--steps", str(steps), "--runtime", runtime]
    if runtime == "cluster":  # of which each imports torch before it shows itself, one after the other
        command += ["--cluster.searcher-cpus", "0.01", "--cluster.start-deadline", "900"]
    began = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ended = time.time()
    path = folder / "run"
    rows = read_metrics(path)
    last = began_at(path) + rows[-1]["wall_seconds"]
    first_times: dict[str, float] = {}
    with JournalFollower(path / "journal.sqlite") as journal:
        created = []
        for trajectory in journal.drain():
            first_times.setdefault(str(trajectory.provenance["searcher"]), trajectory.created)
            created.append(trajectory.created)
    assert len(first_times) == searchers, f"{len(first_times)} of {searchers} searchers brought something"
    begin = max(first_times.values()) + 1.0
    late = [row for row in rows if began_at(path) + row["wall_seconds"] > begin]
    assert len(late) > 100, "the steps were over before all searchers were at work: give more --steps"
    summary = Summary.read(path)
    assert summary is not None
    return Measured(
        rate=sum(begin <= at < last for at in created) / (last - begin),
        step=1000 * statistics.median(row["seconds"] - row["wait_seconds"] for row in late),
        waited=sum(row["wait_seconds"] for row in late) / sum(row["seconds"] for row in late),
        start=max(first_times.values()) - began,
        stop=ended - last,
        closes=summary.tokens.closes() and summary.trajectories.closes(),
    )


def began_at(path: Path) -> float:
    """When the run began, by the clock on the wall."""
    return float(json.loads((path / "recipe.json").read_text())["started"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searchers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runtime", choices=("processes", "cluster"), default="processes")
    options = parser.parse_args()
    by_searchers: dict[int, list[Measured]] = {1: [], options.searchers: []}
    print("searchers  trajectories/s  step ms  waited  start s  stop s  account")
    for _ in range(options.rounds):
        for searchers, runs in by_searchers.items():
            with tempfile.TemporaryDirectory() as folder:
                m = measured(searchers, options.steps, options.runtime, Path(folder))
            runs.append(m)
            figures = f"{m.rate:14.0f}  {m.step:7.2f}  {m.waited:6.1%}  {m.start:7.1f}  {m.stop:6.1f}"
            print(f"{searchers:9}  {figures}  {'closes' if m.closes else 'does not close'}", flush=True)
    alone, many = ([m.step for m in runs] for runs in by_searchers.values())
    ratios = sorted(b / a for a, b in zip(alone, many, strict=True))
    low, middle, high = ratios[0], statistics.median(ratios), ratios[-1]
    print(f"step time with {options.searchers} over that with 1: {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
