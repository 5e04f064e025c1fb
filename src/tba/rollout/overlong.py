"""The soft penalty for overlong answers of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13), on what is trained; or
leaving out those that are cut off.

Invariant: an answer of at most four fifths of the longest keeps its reward; one that is cut off loses all of the
penalty. It is taken off once, when searchers judge: evaluations do not see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tba.types import Completion, Judgement, StopReason

FREE_SHARE = 0.8  # of the longest answer: 16,384 of 20,480 tokens in DAPO


@dataclass(frozen=True)
class Overlong:
    """Takes up to `penalty` off the reward of answers near `longest` tokens, observations included."""

    penalty: float | Literal["drop"] = 0.0  # drop: those that are cut off are left out, the others keep their reward
    longest: int = 1

    def drops(self, completion: Completion) -> bool:
        """Returns whether the answer is not trained."""
        return self.penalty == "drop" and completion.stop_reason is StopReason.LENGTH

    def penalise(self, completion: Completion, judgement: Judgement) -> Judgement:
        """Returns an answer's judgement with the penalty taken off, with which the answer is trained."""
        if not self.penalty or self.penalty == "drop":
            return judgement
        share = (len(completion.tokens) / self.longest - FREE_SHARE) / (1 - FREE_SHARE)
        if completion.stop_reason is StopReason.LENGTH:
            share = 1.0
        penalty = self.penalty * min(max(share, 0.0), 1.0)
        parts = judgement.parts or {"task": judgement.reward}
        return Judgement(judgement.reward - penalty, {**parts, "overlong": 0.0 - penalty})
