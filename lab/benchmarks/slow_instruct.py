"""The recipe `instruct` behind a slow judge: 2 s for each answer, 16 at once. A recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tba.protocols import Reward
from tba.recipes.instruct import recipe as instruct
from tba.rewards.instructions import ShareFulfilled, is_fulfilled
from tba.tasks.instruct import Instruct
from tba_lab.judge import Judge


def share(answer: str, fields: Mapping[str, Any]) -> float:
    """Returns the share of the instructions that the answer fulfils, as `ShareFulfilled` does."""
    instructions = fields["instructions"]
    return sum(is_fulfilled(instruction, fields["question"], answer) for instruction in instructions) / len(
        instructions
    )


@dataclass(frozen=True)
class JudgedInstruct(Instruct):
    """Instructions behind a judge that takes its time, as a model or a person would; held-out answers never wait."""

    judge: Judge = field(default_factory=lambda: Judge(seconds=2.0, concurrency=16))

    def reward(self) -> Reward:
        return self.judge.reward(share)

    def examination(self) -> Reward:
        return ShareFulfilled()


recipe = replace(
    instruct,
    name="slow_instruct",
    description="instruct with a judge that takes 2 s per answer",
    task=JudgedInstruct(),
)
