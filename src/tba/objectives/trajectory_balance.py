"""Trajectory Balance, in the VarGrad form of Trajectory Balance with Asynchrony (arXiv 2503.18929, equations 3 to 5).

Invariant: the loss is zero on *any* multiset of samples exactly when, within each group, log(pi / pi_ref) - r / beta is
constant, as it is at the ideal policy pi* = pi_ref exp(r / beta) / Z. Where the samples came from never enters.

Shape legend: B rows (one completion each), T completion positions, G groups (one prompt each).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tba.batch import Batch
from tba.errors import UserError
from tba.objectives.reduce import group_mean, group_sizes, masked_sum, row_means
from tba.protocols import PolicyOutput
from tba.schedules import Schedule


@dataclass(frozen=True)
class TrajectoryBalance:
    """L = mean over rows of (SG[log Z(x)] + log pi(y|x) - log pi_ref(y|x) - r / beta)^2, y a whole sequence.

    log Z(x) is estimated by the mean of r / beta - log(pi / pi_ref) over the row's own group, at the current policy.
    With A = (r - mean r) - beta (log-ratio - mean log-ratio), means over the group, the gradient is

        raw:        -(2 / (B beta)) sum A grad log pi     (L itself: grows like 1 / beta)
        advantage:  -(1 / B)        sum A grad log pi     ((beta / 2) L: of the size of a policy gradient)

    Every row weighs 1 / B, so that in a ragged batch larger groups weigh more; a group of one has no residual and
    contributes zero. The stop-gradient changes nothing while a group is whole, since its residuals sum to zero.

    Every metric is a mean over rows, so those of micro-batches combine by their numbers of rows. `log_ratio` estimates
    KL(policy || reference) only as far as the rows are on-policy; `residual` is absolute; `degenerate` is the share of
    rows that are alone in their group.
    """

    beta: Schedule  # strength of the pull to the reference, in units of reward; positive
    form: Literal["advantage", "raw"] = "advantage"  # scale of the loss

    def __post_init__(self) -> None:
        for value in (self.beta(1), self.beta.last):
            if value <= 0:
                raise UserError(
                    f"Trajectory Balance divides by beta, but its schedule {self.beta} reaches {value}; "
                    "give a schedule that stays above 0."
                )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @property
    def by_group(self) -> bool:
        return True

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        """The scalar to minimise at optimizer step `step` (from 1), and its metrics."""
        beta = self.beta(step)
        log_ratio_B = masked_sum(output.log_policy_BT - batch.log_reference_BT, batch.mask_BT)
        gap_B = batch.reward_B / beta - log_ratio_B
        log_z_B = group_mean(gap_B.detach(), batch.group_B, batch.groups)
        residual_B = gap_B - log_z_B
        scale = beta / 2 if self.form == "advantage" else 1.0
        loss_B = scale * residual_B.square()

        size_B = group_sizes(batch.group_B, batch.groups)
        metrics = row_means(
            loss=loss_B,
            log_z=log_z_B,
            residual=residual_B.abs(),
            log_ratio=log_ratio_B,
            reward=batch.reward_B,
            group_size=size_B,
            degenerate=size_B == 1,
        )
        return loss_B.mean(), metrics | {"beta": beta}
