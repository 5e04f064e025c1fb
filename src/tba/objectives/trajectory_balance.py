"""Trajectory Balance, in the VarGrad form of Trajectory Balance with Asynchrony (arXiv 2503.18929, equations 3 to 5).

Invariant: the loss is zero on *any* multiset of samples exactly when, within each group, log(pi / pi_ref) - r / beta is
constant, as it is at the ideal policy pi* = pi_ref exp(r / beta) / Z. Where the samples came from never enters.

Shape legend: B rows (one completion each), T completion positions, G groups (one prompt each).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tba.batch import Batch
from tba.errors import UserError
from tba.objectives.correction import Correction
from tba.objectives.reduce import group_mean, group_sizes, masked_sum, row_means
from tba.protocols import Measured, PolicyOutput
from tba.schedules import Constant, Schedule


@dataclass(frozen=True)
class TrajectoryBalance:
    """L = mean over rows of (SG[log Z(x)] + log pi(y|x) - log pi_ref(y|x) - r / beta)^2, y a whole sequence.

    log Z(x) is estimated by the mean of r / beta - log(pi / pi_ref) over the row's own group, at the current policy.
    With A = (r - mean r) - beta (log-ratio - mean log-ratio), means over the group, the gradient is

        raw:        -(2 / (B beta)) sum A grad log pi     (L itself: grows like 1 / beta)
        advantage:  -(1 / B)        sum A grad log pi     ((beta / 2) L: of the size of a policy gradient)

    Every row weighs 1 / B, so that in a ragged batch larger groups weigh more; a group of one has no residual and
    contributes zero. The stop-gradient changes nothing while a group is whole, since its residuals sum to zero.

    With `log_z` learned, log Z(x) is the policy's own head and is trained by the same square (Malkin et al. 2022, arXiv
    2201.13259; as in Lee et al. 2024, arXiv 2405.18540): it needs no group, and a row alone in its group teaches too.

    With a `reward_temperature` T and a `reference_temperature` g the target is tempered, as in Lee et al. 2024:
    log pi* + log Z = (log pi_ref / g + r / beta) / T. With T above 1 it is flatter, and easier to reach early on.

    With a `correction` each A grad log pi takes the ratio to the behaviour, clipped or truncated, as a factor (the
    paper's future work); at pi* every A is zero, so the optimum stays. The scalar's value then means nothing.

    Every metric is a mean over rows, so those of micro-batches combine by their numbers of rows. `log_ratio` estimates
    KL(policy || reference) only as far as the rows are on-policy; `residual` is absolute; `degenerate` is the share of
    rows that are alone in their group.
    """

    beta: Schedule  # strength of the pull to the reference, in units of reward; positive
    form: Literal["advantage", "raw"] = "advantage"  # scale of the loss
    log_z: Literal["group", "learned"] = "group"  # the mean over the row's group, or a head of the policy
    correction: Correction = field(default_factory=Correction)  # none: Trajectory Balance needs none
    reward_temperature: Schedule = Constant(1.0)  # T, temperature of the whole target, by step; 1: none
    reference_temperature: Schedule = Constant(1.0)  # g, temperature of the reference in it, by step; 1: none

    def __post_init__(self) -> None:
        for name in ("beta", "reward_temperature", "reference_temperature"):
            require_positive(getattr(self, name), "Trajectory Balance", name)

    @property
    def needs(self) -> frozenset[str]:
        return self.correction.needs | frozenset({"log_z"} if self.log_z == "learned" else ())

    @property
    def by_group(self) -> bool:
        return True

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, Measured]:
        """The scalar to minimise at optimizer step `step` (from 1), and its metrics."""
        beta = self.beta(step) * self.reward_temperature(step)
        power = 1 / (self.reference_temperature(step) * self.reward_temperature(step))  # of the reference
        log_ratio_B = masked_sum(output.log_policy_BT - batch.log_reference_BT, batch.mask_BT)
        gap_B = batch.reward_B / beta - log_ratio_B
        if power != 1:
            gap_B = gap_B + (power - 1) * masked_sum(batch.log_reference_BT, batch.mask_BT)
        log_z_B = self._log_z_B(gap_B, output, batch)
        residual_B = gap_B - log_z_B
        scale = beta / 2 if self.form == "advantage" else 1.0
        loss_B, columns = scale * residual_B.square(), dict[str, Tensor]()
        if self.correction.form != "none":
            loss_B, columns = self._corrected(2 * scale * residual_B, log_z_B, output, batch)

        size_B = group_sizes(batch.group_B, batch.groups)
        metrics = row_means(
            loss=loss_B,
            log_z=log_z_B,
            residual=residual_B.abs(),
            log_ratio=log_ratio_B,
            reward=batch.reward_B,
            group_size=size_B,
            degenerate=size_B == 1,
            **columns,
        )
        return loss_B.mean(), metrics | {"beta": beta}

    def _log_z_B(self, gap_B: Tensor, output: PolicyOutput, batch: Batch) -> Tensor:
        if self.log_z == "group":
            return group_mean(gap_B.detach(), batch.group_B, batch.groups)
        if output.log_z_G is None:
            raise ValueError("log_z='learned' needs log_z of the policy, but this one has no such head")
        return output.log_z_G[batch.group_B]

    def _corrected(
        self, advantage_B: Tensor, log_z_B: Tensor, output: PolicyOutput, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Rows whose gradient is -A grad log pi with the ratio as a factor; that of log Z is as it was."""
        terms_BT, columns = self.correction.terms(output.log_policy_BT, advantage_B, batch)
        return masked_sum(terms_BT, batch.mask_BT) - advantage_B.detach() * log_z_B, columns


def require_positive(schedule: Schedule, name: str, what: str = "beta") -> None:
    """Raises `UserError` unless a monotone schedule stays above 0."""
    for value in (schedule(1), schedule.last):
        if value <= 0:
            raise UserError(
                f"{name} divides by {what}, but its schedule {schedule} reaches {value}; give a schedule that stays "
                "above 0."
            )
