"""A penalty for completions that were cut off (the paper's TL;DR: -1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tba.protocols import Reward
from tba.types import Completion, Judgement, Prompt, StopReason


@dataclass(frozen=True)
class EosPenalty:
    """Another reward, with `penalty` in its place for a truncated completion: one without EOS.

    The paper's TL;DR runs give -1 (`non_eos_penalty`), its GSM8K runs do not use it. A truncated completion is not
    shown to the inner reward. The part `truncated` is 1 or 0, so that the share of them can be followed.
    """

    reward: Reward
    penalty: float = -1.0

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """One judgement for each, in order; only the finished ones reach the inner reward."""
        finished = [(p, c) for p, c in answered if c.stop_reason is not StopReason.LENGTH]
        judged = iter(self.reward.judge(finished) if finished else ())
        made = []
        for _, completion in answered:
            if completion.stop_reason is StopReason.LENGTH:
                made.append(Judgement(self.penalty, {"truncated": 1.0}))
            else:
                inner = next(judged)
                made.append(Judgement(inner.reward, {**inner.parts, "truncated": 0.0}))
        return made
