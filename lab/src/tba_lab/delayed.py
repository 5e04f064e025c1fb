"""A reward that takes time, as a remote judge does: for benchmarks of what a slow one costs."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tba.errors import UserError
from tba.protocols import Reward
from tba.rewards.functions import check_waiting
from tba.rewards.threads import in_threads
from tba.types import Completion, Judgement, Prompt


@dataclass(frozen=True)
class Delayed:
    """Wraps another reward: each answer takes `seconds` longer, and `concurrency` of them wait at once.

    n answers take at least ceil(n / concurrency) * seconds. The judgements are those of the wrapped reward.
    """

    reward: Reward
    seconds: float = 0.2
    concurrency: int = 16
    deadline_seconds: float = 600.0  # for one batch of answers

    def __post_init__(self) -> None:
        check_waiting(self.concurrency, self.deadline_seconds)
        if self.seconds < 0:
            raise UserError(f"a delayed reward has seconds {self.seconds}: give the seconds of one answer, at least 0")

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Returns one judgement for each, in order. Raises `DeadlineExceeded` when the batch takes too long."""
        calls = [functools.partial(self._judge_one, prompt, completion) for prompt, completion in answered]
        return in_threads(
            calls,
            self.concurrency,
            self.deadline_seconds,
            lambda i: f"the delayed judgement of prompt {answered[i][0].key}",
        )

    def _judge_one(self, prompt: Prompt, completion: Completion) -> Judgement:
        time.sleep(self.seconds)
        return self.reward.judge([(prompt, completion)])[0]
