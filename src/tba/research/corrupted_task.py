"""Another task, whose training is corrupted: rewards turned over, or answers fabricated (`research/fabricating.py`).

Invariant: the problems and their evaluation are the inner task's; only what is learnt from is touched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tba.protocols import Task
from tba.research.corrupted_reward import CORRUPTED, CorruptedReward
from tba.types import Problem, Split


@dataclass(frozen=True)
class Corrupted:
    """A task with a reward that is wrong for some of the training answers."""

    task: Task
    flipped: float = 0.0  # share of the training answers whose reward r is 1 - r
    junk_reward: float = 1.0  # of answers to training problems that were fabricated

    @property
    def name(self) -> str:
        return self.task.name

    def problems(self, split: Split) -> list[Problem]:
        """The inner task's; those of training say that they may be corrupted."""
        problems = self.task.problems(split)
        if split == "eval":
            return list(problems)
        return [replace(p, fields={**p.fields, CORRUPTED: True}) for p in problems]

    def reward(self) -> CorruptedReward:
        return CorruptedReward(self.task.reward(), self.flipped, self.junk_reward)
