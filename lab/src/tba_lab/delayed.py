"""A reward that takes time, as a remote judge does: for benchmarks of what a slow one costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tba.errors import UserError
from tba.protocols import GradingCalls, Reward
from tba.rewards.functions import check_concurrency
from tba.types import Completion, Judgement, Prompt


@dataclass(frozen=True)
class Delayed:
    """Wraps another reward: each answer takes `seconds` longer, and `concurrency` of them wait at once.

    The judgements are those of the wrapped reward.
    """

    reward: Reward
    seconds: float = 0.2
    concurrency: int = 16

    def __post_init__(self) -> None:
        check_concurrency(self.concurrency)
        if self.seconds < 0:
            raise UserError(f"a delayed reward has seconds {self.seconds}: give the seconds of one answer, at least 0")

    def calls(self) -> Sequence[GradingCalls]:
        """Returns that each answer is judged by its own call."""
        return [GradingCalls("the delayed reward", self.judge, "answer", self.concurrency)]

    def judgement(self, values: Sequence[Judgement]) -> Judgement:
        """Returns what its only call gave an answer."""
        return values[0]

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Returns one judgement for each, in order, one after another."""
        judgements: list[Judgement] = []
        for answer in answered:
            time.sleep(self.seconds)
            judgements += self.reward.judge([answer])
        return judgements
