"""The recipe `instruct` with a slow judge: 2 s for each answer, 16 at once per searcher. A recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tba.protocols import Reward
from tba.recipes.instruct import recipe as instruct
from tba.tasks.instruct import Instruct
from tba_lab.delayed import Delayed


@dataclass(frozen=True)
class SlowlyJudged(Instruct):
    """Instructions behind a judge that takes its time, as a model or a person would."""

    seconds: float = 2.0
    concurrency: int = 16

    def reward(self) -> Reward:
        return Delayed(super().reward(), self.seconds, self.concurrency)


recipe = replace(
    instruct,
    name="slow_instruct",
    description="instruct with a judge that takes 2 s per answer",
    task=SlowlyJudged(),
)
