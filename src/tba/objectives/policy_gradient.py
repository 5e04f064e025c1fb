"""The policy gradient with the KL penalty in the reward: REINFORCE, RLOO and Proximal RLOO.

Invariant: without a correction the estimate is unbiased on-policy only. (With a baseline over the group and the
*current* policy penalised, its gradient is Trajectory Balance's, on any data.)

Shape legend: B rows (one completion each), T completion positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from tba.batch import Batch
from tba.fields import as_declared
from tba.objectives.correction import Correction
from tba.objectives.penalty import Penalised, penalised_log_ratio
from tba.objectives.reduce import group_mean, group_sizes, leave_one_out_mean, masked_sum, row_means
from tba.protocols import Measured, PolicyOutput
from tba.schedules import Constant, Schedule


@dataclass(frozen=True)
@as_declared
class Reinforce:
    """Gradient -(1 / B) sum (s - b) grad log pi, with the score s = r - beta log(q / pi_ref) and a baseline b.

    q is the current policy, or the behaviour that sampled the row (as when the penalty is computed together with the
    reward, once; on-policy they agree). `leave_one_out` is RLOO (Ahmadian et al. 2024), `mean` is (K - 1) / K of it.
    A row alone in its group contributes zero, except with baseline `none`.
    """

    by_group: ClassVar[bool] = True
    beta: Schedule = Constant(0.0)  # weight of the KL penalty in the reward
    baseline: Literal["mean", "leave_one_out", "none"] = "leave_one_out"  # computed over the row's own group
    penalised: Penalised = "policy"  # whose distance to the reference is penalised
    correction: Correction = field(default_factory=Correction)  # for data that are not on-policy

    @property
    def needs(self) -> frozenset[str]:
        return self.correction.needs | frozenset({"log_behavior"} if self.penalised == "behavior" else ())

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, Measured]:
        """Returns a scalar whose gradient is the estimate (its value means nothing), and metrics (row means)."""
        beta = self.beta(step)
        score_B = batch.reward_B - beta * penalised_log_ratio(output.log_policy_BT, batch, self.penalised).sum(1)
        advantage_B = score_B - self._baseline_B(score_B, batch)
        terms_BT, columns = self.correction.terms(output.log_policy_BT, advantage_B, batch)
        loss_B = masked_sum(terms_BT, batch.mask_BT)
        degenerate_B = group_sizes(batch.group_B, batch.groups) == 1
        metrics = row_means(loss=loss_B, advantage=advantage_B.abs(), degenerate=degenerate_B, **columns)
        return loss_B.mean(), metrics | {"beta": beta}

    def _baseline_B(self, score_B: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.baseline == "mean":
            return group_mean(score_B, batch.group_B, batch.groups)
        if self.baseline == "leave_one_out":
            return leave_one_out_mean(score_B, batch.group_B, batch.groups)
        return torch.zeros_like(score_B)


def proximal_rloo(beta: Schedule = Constant(0.0), clip: float = 0.2) -> Reinforce:  # noqa: B008 - frozen
    """Loss mean of max(-A rho, -A clip(rho, 1 +- clip)): rho = pi(y|x) / mu(y|x) of the whole sequence, A as in RLOO.

    The penalty in the reward is the behaviour's, log(mu / pi_ref). At rho = 1 its gradient is RLOO's. Source: equation
    6 of Trajectory Balance with Asynchrony (arXiv 2503.18929), the comparator of Noukhovitch et al. 2025 (ICLR).
    """
    return Reinforce(beta, "leave_one_out", "behavior", Correction("clip", "sequence", clip=clip))
