"""One token from each row of logits, with its log-probability under the distribution it was drawn from.

Invariant: `log_behavior` is the log-probability of the drawn token after temperature and after top-p, renormalised over
what top-p keeps. The draw is the inverse of the cumulative distribution at a given uniform number, so that equal
uniforms give equal tokens, and because `torch.multinomial` costs 20 times as much on a large vocabulary.

Shape legend: R rows, V vocabulary, K candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tba.types import Sampling

_FIRST_CANDIDATES = 64  # top-p looks at this many tokens first, then at 8 times as many, ...


def draw(logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(int64 tokens [R], float32 log_behavior [R]) for uniforms in [0, 1). Temperature 0 takes the best token."""
    if sampling.temperature == 0:
        token_R = logits_RV.argmax(-1)
        return token_R, torch.zeros(token_R.shape, device=token_R.device)
    logits_RV = logits_RV.float()
    if sampling.temperature != 1:
        logits_RV = logits_RV / sampling.temperature
    probability_RV = torch.softmax(logits_RV, -1)
    if sampling.top_p >= 1:
        token_R1, chosen_R1 = _inverse_cumulative(probability_RV, uniform_R)
    else:
        kept_RK, token_RK = _nucleus(probability_RV, sampling.top_p)
        index_R1, chosen_R1 = _inverse_cumulative(kept_RK, uniform_R)
        token_R1 = token_RK.gather(1, index_R1)
    return token_R1[:, 0], chosen_R1[:, 0].log()


def _inverse_cumulative(weight_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """An index drawn in proportion to `weight_RV`, and its share of the row's sum; both [R, 1]."""
    cumulative_RV = weight_RV.cumsum(-1)
    total_R1 = cumulative_RV[:, -1:]
    # right=True: the first index whose cumulative weight exceeds the target, which therefore has a weight of its own.
    index_R1 = torch.searchsorted(cumulative_RV, uniform_R[:, None] * total_R1, right=True)
    # a target that is rounded up to the sum gets the last that has one
    last_R1 = torch.searchsorted(cumulative_RV, total_R1.contiguous())
    index_R1 = torch.minimum(index_R1, last_R1).clamp(max=weight_RV.shape[1] - 1)  # of weights that are NaN: any
    return index_R1, weight_RV.gather(1, index_R1) / total_R1


def _nucleus(probability_RV: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest most probable tokens that hold `top_p` (Holtzman et al. 2020): (probability or 0, token), both [R, K].

    Only as many candidates are sorted as are needed; the best token is always kept.
    """
    size = probability_RV.shape[-1]
    candidates = min(_FIRST_CANDIDATES, size)
    while True:
        best_RK, token_RK = probability_RV.topk(candidates, -1)
        before_RK = best_RK.cumsum(-1) - best_RK
        if candidates == size or bool((before_RK[:, -1] >= top_p).all()):
            outside_RK = before_RK >= top_p
            outside_RK[:, 0] = False
            return best_RK.masked_fill(outside_RK, 0.0), token_RK
        candidates = min(8 * candidates, size)
