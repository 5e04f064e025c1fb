"""A penalty for completions that were cut off (the paper's TL;DR: -1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tba.protocols import Reward
from tba.types import Completion, Judgement, Prompt, StopReason


@dataclass(frozen=True)
class EosPenalty:
    """Wraps another reward: a truncated completion, one without EOS, gets `penalty` instead.

    The paper's TL;DR runs give -1 (`non_eos_penalty`), its GSM8K runs do not use it. A truncated completion is not
    shown to the wrapped reward. The part `truncated` is 1 or 0, so that their share can be tracked.
    """

    reward: Reward
    penalty: float = -1.0

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Returns one judgement for each, in order; only finished completions reach the wrapped reward."""
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
