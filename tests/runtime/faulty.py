"""The toy with a reward and an objective that fail as often as a file tells them to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tba.batch import Batch
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import PolicyOutput
from tba.settings import find
from tba.types import Completion, Judgement, Problem, Prompt, Split
from toy.policy import TabularTask


def asked(file: str) -> bool:
    """Whether the file holds a number above 0, which is then one less."""
    path = Path(file)
    remaining = int(path.read_text() or 0) if file and path.exists() else 0
    if remaining > 0:
        path.write_text(str(remaining - 1))
    return remaining > 0


@dataclass(frozen=True)
class Reward:
    raises: str
    hangs: str

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        if asked(self.raises):
            raise ConnectionError("the judge is not there")
        if asked(self.hangs):
            threading.Event().wait()
        return TabularTask().reward().judge(answered)


@dataclass(frozen=True)
class Task:
    name: str = "tabular"
    raises: str = ""  # files with the number of times
    hangs: str = ""

    def problems(self, split: Split) -> Sequence[Problem]:
        return TabularTask().problems(split)

    def reward(self) -> Reward:
        return Reward(self.raises, self.hangs)


@dataclass(frozen=True)
class Objective:
    """Trajectory Balance, but not a number as often as it is told."""

    inner: TrajectoryBalance
    nan: str = ""

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs

    @property
    def by_group(self) -> bool:
        return self.inner.by_group

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        loss, metrics = self.inner(output, batch, step)
        return loss * (float("nan") if asked(self.nan) else 1.0), metrics


toy = find(str(Path(__file__).parents[1] / "toy" / "recipe.py"))
assert isinstance(toy.objective, TrajectoryBalance)
recipe = replace(toy, task=Task(), objective=Objective(toy.objective))
