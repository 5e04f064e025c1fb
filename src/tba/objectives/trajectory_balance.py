"""Trajectory Balance, in the VarGrad form of Trajectory Balance with Asynchrony (arXiv 2503.18929, equations 3 to 5).

Invariant: the loss is zero on *any* multiset of samples exactly when, within each group, log(pi / pi_ref) - r / beta is
constant, as it is at the ideal policy pi* = pi_ref exp(r / beta) / Z. Where the samples came from, and how much each of
them weighs, does not move this optimum.

Shape legend: B rows (one completion each), T completion positions, G groups (one prompt each).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tba.batch import Batch
from tba.errors import UserError
from tba.fields import as_declared
from tba.objectives.correction import sequence_log_ratio
from tba.objectives.reduce import group_max, group_mean, group_sizes, masked_sum, row_means
from tba.protocols import Measured, Objective, PolicyOutput
from tba.schedules import Constant, Schedule
from tba.types import Json

CAP = 8.0  # the largest weight of a row before division by its group's mean; 2 and 1 do about as well (lab/results.md)
DECAY = 0.9  # of the running means over steps
ERRORS = 2.0  # standard errors of a running mean, below which it may be chance
SPREAD = 2.0  # nats; 20 rows of normally spread log rho are then worth 4 below the cap, 8 at it (medians)
_LEAST_SQUARE = 1e-6  # of a row's gradient: where the policy is sure of all answers, they weigh the same


@dataclass(frozen=True)
@as_declared
class TrajectoryBalance:
    """L = mean over rows of w (SG[log Z(x)] + log pi(y|x) - log pi_ref(y|x) - r / beta)^2, y a whole sequence.

    log Z(x) is estimated by the mean of r / beta - log(pi / pi_ref) over the row's own group, at the current policy and
    with the weights w, which carry no gradient. With A = (r - mean r) - beta (log-ratio - mean log-ratio), weighted
    means over the group, the gradient is

        raw:        -(2 / (B beta)) sum w A grad log pi     (L itself: grows like 1 / beta)
        advantage:  -(1 / B)        sum w A grad log pi     ((beta / 2) L: of the size of a policy gradient)

    `off_policy` says how stale data are dealt with. rho = pi / mu is how likely the policy is to give the answer now,
    over how likely it was when it was sampled (1 where that is unknown); w is divided by its mean over the group:

        none        w = 1: the paper's form
        exact       w = min(rho, 8): an answer that the policy has left behind hardly counts
        tapered     w = min(rho, 1) where A < 0, else 1: rare successes are learnt again after the policy has lost them
        asymmetric  as exact, and in a run, where log Z is estimated from groups, every answer is pushed up by
                    c min(rho, 8) grad log pi more: pushing down is what goes wrong on stale data, since it does not
                    say where probability is to go

    On-policy the first three are the same. They leave the optimum where it is on any data: log Z is estimated with the
    same weights, so that sum w A = 0 in every group. With noisy rewards or hidden worlds `none` and `exact` still do,
    being linear in the rewards; `tapered` takes luck for merit. Where log rho spreads by more than 2 within a group, w
    is computed with a spread of 2, so that in long answers one row seldom gets all of the weight.

    In `asymmetric`, c = max(0, -slant) of a running mean over *earlier* batches, less two of its standard errors, so
    that c is 0 where the slant may be chance. The slant of a group is a difference of two means of h = r - beta log(pi
    / pi_ref): that in which a row weighs sum (1 - p)^2, p being what the policy gives each of its tokens, less that
    with the weights w. The former is nearly the baseline with which the gradient's variance is least (Greensmith et al.
    2004, JMLR 5): unlikely answers weigh most in it. While a policy learns, its unlikely answers are the worse ones, so
    that the slant is negative. At the optimum h is on average the same for all answers, whoever sampled them and with
    noisy rewards too, so that the slant is 0, and so is c. Groups whose answers do not come as often as they were
    sampled (`Batch.as_sampled_G`), and rows of unknown behaviour, are not pushed.

    Every row weighs 1 / B, so that in a ragged batch larger groups weigh more; a group of one has no residual and
    contributes zero. The stop-gradient changes nothing while a group is whole, since its residuals sum to zero.

    With `log_z` learned, log Z(x) is the policy's own head and is trained by the same square (Malkin et al. 2022, arXiv
    2201.13259; as in Lee et al. 2024, arXiv 2405.18540): it needs no group, and a row alone in its group teaches too.
    The weights are then not divided by their mean.

    With a `reward_temperature` T and a `reference_temperature` g the target is tempered, as in Lee et al. 2024:
    log pi* + log Z = (log pi_ref / g + r / beta) / T. With T above 1 it is flatter, and easier to reach early on.

    Every metric is a mean over rows, so those of micro-batches combine by their numbers of rows. `log_ratio` estimates
    KL(policy || reference) only as far as the rows are on-policy; `residual` is absolute; `weight_ess` is the effective
    sample size of w within groups, as a share; `degenerate` is the share of rows that are alone in their group; `push`
    is c; `cut` is the share of rows whose rho is above 8, where c cuts it; w does when its spread is 2 at most.
    """

    beta: Schedule  # strength of the pull to the reference, in units of reward; positive
    form: Literal["advantage", "raw"] = "advantage"  # scale of the loss
    log_z: Literal["group", "learned"] = "group"  # mean over the row's group, or a head of the policy
    off_policy: Literal["asymmetric", "exact", "tapered", "none"] = "asymmetric"  # for stale data; none: the paper's
    reward_temperature: Schedule = Constant(1.0)  # T, temperature of the whole target, by step; 1: none
    reference_temperature: Schedule = Constant(1.0)  # g, temperature of the reference in it, by step; 1: none

    def __post_init__(self) -> None:
        for name in ("beta", "reward_temperature", "reference_temperature"):
            require_positive(getattr(self, name), "Trajectory Balance", name)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"log_z"} if self.log_z == "learned" else ())

    @property
    def by_group(self) -> bool:
        return True

    def start(self) -> Objective:
        """Returns the objective of one run: in the form `asymmetric` with a memory of its batches."""
        return Asymmetric(self) if self.off_policy == "asymmetric" and self.log_z == "group" else self

    def __call__(
        self, output: PolicyOutput, batch: Batch, step: int, memory: Memory | None = None
    ) -> tuple[torch.Tensor, Measured]:
        """Returns the scalar to minimise at optimizer step `step` (from 1), and its metrics."""
        beta = self.beta(step) * self.reward_temperature(step)
        power = 1 / (self.reference_temperature(step) * self.reward_temperature(step))  # of the reference
        log_ratio_B = masked_sum(output.log_policy_BT - batch.log_reference_BT, batch.mask_BT)
        gap_B = batch.reward_B / beta - log_ratio_B
        if power != 1:
            gap_B = gap_B + (power - 1) * masked_sum(batch.log_reference_BT, batch.mask_BT)
        log_rho_B = None if self.off_policy == "none" else sequence_log_ratio(output.log_policy_BT.detach(), batch)
        weight_B = self.weight_B(gap_B.detach(), log_rho_B, batch)
        log_z_B = self._log_z_B(gap_B.detach(), weight_B, output, batch)
        residual_B = gap_B - log_z_B
        scale = beta / 2 if self.form == "advantage" else 1.0
        loss_B = scale * weight_B * residual_B.square()
        extra_metrics: Measured = {}
        if memory is not None and log_rho_B is not None:
            push = memory.push(step, beta * slant_B(gap_B.detach(), weight_B, output, batch), batch)
            log_policy_B = masked_sum(output.log_policy_BT, batch.mask_BT)
            pushed_B = push * plain_weights(log_rho_B, batch) * (log_policy_B - log_policy_B.detach())  # a slope at 0
            loss_B = loss_B - scale * 2 / beta * pushed_B
            extra_metrics = {"push": push}
        if log_rho_B is not None and self.off_policy != "tapered":
            extra_metrics |= row_means(cut=log_rho_B > math.log(CAP))

        rows = (batch.group_B, batch.groups)
        size_B = group_sizes(*rows)
        metrics = row_means(
            loss=loss_B,
            log_z=log_z_B,
            residual=residual_B.abs(),
            log_ratio=log_ratio_B,
            reward=batch.reward_B,
            weight_ess=group_mean(weight_B, *rows).square() / group_mean(weight_B.square(), *rows),
            group_size=size_B,
            degenerate=size_B == 1,
        )
        return loss_B.mean(), metrics | extra_metrics | {"beta": beta}

    def weight_B(self, gap_B: Tensor, log_rho_B: Tensor | None, batch: Batch) -> Tensor:
        """Returns [B] positive weights, of mean 1 in each group where log Z is estimated from the group."""
        if log_rho_B is None:
            return torch.ones_like(gap_B)
        rows = (batch.group_B, batch.groups)
        log_rho_B = log_rho_B.nan_to_num(nan=0.0)
        spread_B = group_mean((log_rho_B - group_mean(log_rho_B, *rows)).square(), *rows).sqrt()
        log_rho_B = log_rho_B * (SPREAD / spread_B.clamp(min=SPREAD))
        if self.off_policy == "tapered":
            log_weight_B = log_rho_B.clamp(max=0).where(~(gap_B > group_mean(gap_B, *rows)), 0.0)
        else:
            log_weight_B = log_rho_B.clamp(max=math.log(CAP))
        if self.log_z == "learned":
            return log_weight_B.exp()
        weight_B = (log_weight_B - group_max(log_weight_B, *rows)).exp()  # their largest is 1: their mean is not 0
        return weight_B / group_mean(weight_B, *rows)

    def _log_z_B(self, gap_B: Tensor, weight_B: Tensor, output: PolicyOutput, batch: Batch) -> Tensor:
        rows = (batch.group_B, batch.groups)
        if self.log_z == "group":
            return group_mean(weight_B * gap_B, *rows)
        if output.log_z_G is None:
            raise ValueError("log_z='learned' needs log_z of the policy, but this one has no such head")
        return output.log_z_G[batch.group_B]


@dataclass(frozen=True)
class Asymmetric:
    """Trajectory Balance in the form `asymmetric` during one run. `state` is what a checkpoint keeps of it."""

    settings: TrajectoryBalance
    memory: Memory = field(default_factory=lambda: Memory())

    @property
    def needs(self) -> frozenset[str]:
        return self.settings.needs

    @property
    def by_group(self) -> bool:
        return self.settings.by_group

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, Measured]:
        """Returns the scalar to minimise at optimizer step `step` (from 1), and its metrics."""
        return self.settings(output, batch, step, self.memory)

    def state(self) -> Json:
        """Returns the memory as JSON, which `restore` takes."""
        return self.memory.state()

    def restore(self, state: Json) -> None:
        """Continue with the memory that `state` gave."""
        self.memory.restore(state)


class Memory:
    """Remembers the slant of earlier steps' batches: running means of it and of its square. That of the present step is
    kept apart.

    They are sums on the policy's device, which is not waited for. A slant that is not finite leaves no trace. Where an
    update is skipped, its batch and the next one may count as one step.
    """

    def __init__(self) -> None:
        self.moments_2: Tensor | None = None  # of the steps before; None: there were none
        self._step = 0
        self._sums_2: Tensor | None = None  # of the present step: the sum of its groups' slants, and their number

    def push(self, step: int, slant_B: Tensor, batch: Batch) -> Tensor:
        """Returns max(0, -slant - 2 standard errors) of the steps before `step`, 0 where there were none.

        It then adds this batch, or part of one, to the present step.

        slant_B: in units of reward, of each row's group. Groups that do not come as sampled do not count.
        """
        share_B = 1 / group_sizes(batch.group_B, batch.groups).to(slant_B.dtype)  # sums over rows are sums over groups
        if batch.as_sampled_G is not None:
            share_B = share_B * batch.as_sampled_G[batch.group_B]
        sums_2 = torch.stack([slant_B @ share_B, share_B.sum()])
        sums_2 = sums_2.where(sums_2.isfinite().all(), 0.0)
        self._begin(step, sums_2)
        self._sums_2 = sums_2 if self._sums_2 is None else self._sums_2 + sums_2
        if self.moments_2 is None:
            return torch.zeros_like(sums_2[0])
        mean, square = self.moments_2
        error = ((square - mean.square()).clamp(min=0) * (1 - DECAY) / (1 + DECAY)).sqrt()
        return (-mean - ERRORS * error).clamp(min=0)

    def state(self) -> Json:
        """Returns it as JSON. The device is waited for."""
        return [self._step, *(None if t is None else t.tolist() for t in (self.moments_2, self._sums_2))]

    def restore(self, state: Json) -> None:
        """Continue with what `state` returned; the sums of a run of before this form count for nothing."""
        self._step, *tensors = state
        tensors = [None if t is not None and len(t) != 2 else t for t in tensors]
        self.moments_2, self._sums_2 = (None if t is None else torch.tensor(t, dtype=torch.float64) for t in tensors)

    def _begin(self, step: int, like: Tensor) -> None:
        self.moments_2, self._sums_2 = (None if t is None else t.to(like) for t in (self.moments_2, self._sums_2))
        if step == self._step:
            return
        if self._sums_2 is not None:
            sum_of_slants, count = self._sums_2
            slant = sum_of_slants / count.clamp(min=1e-6)
            new_2 = torch.stack([slant, slant.square()])
            old_2 = new_2 if self.moments_2 is None else self.moments_2
            self.moments_2 = torch.where(count > 0, DECAY * old_2 + (1 - DECAY) * new_2, old_2)
        self._step, self._sums_2 = step, None


def slant_B(gap_B: Tensor, weight_B: Tensor, output: PolicyOutput, batch: Batch) -> Tensor:
    """[B] of each row's group, in units of `gap_B`: its mean by squared gradients less its mean by `weight_B`.

    A row's squared gradient is sum (1 - p)^2 over its tokens: that in the logits is between once and twice it.
    """
    rows = (batch.group_B, batch.groups)
    square_B = masked_sum((1 - output.log_policy_BT.detach().exp()).square(), batch.mask_BT) + _LEAST_SQUARE
    by_square_B = group_mean(square_B * gap_B, *rows) / group_mean(square_B, *rows)
    return by_square_B - group_mean(weight_B * gap_B, *rows) / group_mean(weight_B, *rows)


def plain_weights(log_rho_B: Tensor, batch: Batch) -> Tensor:
    """[B] min(rho, 8): what makes a sum over rows that a behaviour sampled one over rows of the policy. 0 where the
    behaviour is not known, and in groups whose answers do not come as often as they were sampled.
    """
    rho_B = log_rho_B.clamp(max=math.log(CAP)).exp().nan_to_num(nan=0.0)
    return rho_B if batch.as_sampled_G is None else rho_B * batch.as_sampled_G[batch.group_B]


def require_positive(schedule: Schedule, objective_name: str, field_name: str = "beta") -> None:
    """Raises `UserError` unless a monotone schedule stays above 0."""
    for value in (schedule(1), schedule.last):
        if value <= 0:
            raise UserError(
                f"{objective_name} divides by {field_name}, but its schedule {schedule} reaches {value}; give a "
                "schedule that stays above 0."
            )
