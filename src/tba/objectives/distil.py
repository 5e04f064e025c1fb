"""Distillation of whole distributions: a divergence from the teacher at each token, over the teacher's top tokens.

Invariant: every term is at its least, 0, where the policy gives the teacher's probabilities to the teacher's top tokens
at this place, and so to all others together. Who wrote the tokens before it never enters.

Shape legend: B rows (one completion each), T completion positions, C a teacher's K top tokens and all others together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tba.batch import Batch
from tba.errors import UserError
from tba.fields import as_declared
from tba.objectives.reduce import Aggregation, average, masked_sum, row_means
from tba.protocols import TOP_TOKENS, Measured, PolicyOutput


@dataclass(frozen=True)
@as_declared
class Distil:
    """L = the mean over answers of the sum over their tokens of D(pi, p_T), + pull / 2 (log pi - log pi_ref)^2.

    D compares pi and p_T, one teacher's next-token distributions, after they are summed up in C = K + 1 buckets: each
    of the teacher's K most probable tokens (`Teacher(top=K)`) and all others together. By `divergence`:

        reverse   sum over buckets of pi (log pi - log p_T), GKD's KL(student || teacher)
        forward   sum over buckets of p_T (log p_T - log pi)
        js        half of each, to the mean of pi and p_T (the generalised Jensen-Shannon divergence with beta 1/2)

    These are the losses of on-policy distillation (Agarwal et al. 2024, arXiv 2306.13649, equations 1, 2 and 5) with
    buckets in the place of the vocabulary. With all of it (K = V) the optimum is p_T on tokens of any origin, as long
    as they cover what the policy writes. With fewer, the policy is free to divide the last bucket among its tokens.

    `pull` adds the squared log-ratio to the run's own reference at each sampled token. It is the one term whose weight
    follows from whoever wrote the tokens, so that stale data move the optimum.
    """

    divergence: Literal["reverse", "forward", "js"] = "reverse"  # from the policy to the teacher, back, or half of each
    pull: float = 0.0  # weight of the squared log-ratio to the reference, in nats a square nat; 0: it is not scored
    loss_aggregation: Aggregation = "row"  # the sum over an answer's tokens (row), their mean (sequence), or the mean
    # over all tokens of the batch (token)

    needs: ClassVar[frozenset[str]] = frozenset({TOP_TOKENS})

    def __post_init__(self) -> None:
        if not (math.isfinite(self.pull) and self.pull >= 0):
            raise UserError(f"the pull of distillation is {self.pull}: give a number, 0 or more")

    @property
    def by_group(self) -> bool:
        """Returns whether the loss is a mean over rows."""
        return self.loss_aggregation != "token"

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, Measured]:
        """Returns the scalar to minimise, and metrics (row means): `divergence` in nats an answer."""
        if output.log_top_BTC is None or batch.log_top_BTC is None:
            raise ValueError("distillation needs teacher_top of every answer, but this batch has some without")
        term_BT = _divergence(output.log_top_BTC, batch.log_top_BTC, self.divergence)
        metrics = row_means(divergence=masked_sum(term_BT, batch.mask_BT))
        if self.pull:
            if batch.log_anchor_BT is None:
                raise ValueError("a pull needs the reference's log-probabilities beside the teacher's")
            log_ratio_BT = torch.where(batch.mask_BT, output.log_policy_BT - batch.log_anchor_BT, 0.0)
            term_BT = term_BT + self.pull / 2 * log_ratio_BT.square()
        return average(term_BT, batch.mask_BT, self.loss_aggregation), metrics


def _divergence(log_p_BTC: Tensor, log_q_BTC: Tensor, divergence: str) -> Tensor:
    """Returns [B, T]: D between the policy's p and the teacher's q. A bucket that is -inf under q does not exist: then
    the others may sum up to less than 1, and p - q, or q - p, keeps each term of a Kullback-Leibler divergence at 0 or
    above. Where the sums are 1 it adds nothing.
    """
    exists_BTC = torch.isfinite(log_q_BTC)
    log_p_BTC, log_q_BTC = (torch.where(exists_BTC, log_BTC, 0.0) for log_BTC in (log_p_BTC, log_q_BTC))
    p_BTC, q_BTC = log_p_BTC.exp(), log_q_BTC.exp()
    if divergence == "reverse":
        term_BTC = p_BTC * (log_p_BTC - log_q_BTC) + q_BTC - p_BTC
    elif divergence == "forward":
        term_BTC = q_BTC * (log_q_BTC - log_p_BTC) + p_BTC - q_BTC
    else:
        log_mean_BTC = torch.logaddexp(log_p_BTC, log_q_BTC) - math.log(2)
        term_BTC = (p_BTC * (log_p_BTC - log_mean_BTC) + q_BTC * (log_q_BTC - log_mean_BTC)) / 2
    return torch.where(exists_BTC, term_BTC, 0.0).sum(-1)
