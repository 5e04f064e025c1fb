"""Variants of Trajectory Balance that are tried for stability on stale data. A winner moves to `tba.objectives`.

Invariant: within a group the gradient is -sum_i w_i A_i grad log pi_i with sum_i w_i A_i = 0 wherever `centre` is
"weighted", for any weights w > 0 that carry no gradient: A = g - sum w g / sum w with g = r - beta log(pi / pi_ref) is
zero for every answer exactly at pi* = pi_ref exp(r / beta) / Z, so that the fixed point does not depend on w.

Shape legend: B rows (one completion each), T completion positions, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from tba.batch import Batch
from tba.objectives.correction import Correction, log_ratio_to_behavior
from tba.objectives.reduce import group_max, group_mean, group_sizes, masked_sum, row_means
from tba.objectives.trajectory_balance import Memory, TrajectoryBalance, slant_B
from tba.protocols import Measured, PolicyOutput
from tba.schedules import Constant, Schedule
from tba.training.optimizer import Optimizer, OptimizerSettings
from tba.training.staleness import effective_share


@dataclass(frozen=True)
class WeightedBalance:
    """(beta / 2) sum w (g / beta - its centre)^2 over rows, each row weighing w.

    weight: of a row, with rho = pi / mu of the whole answer and |y| its tokens
        one         1
        ratio       min(rho, cap)
        mean-ratio  min(rho^(1 / |y|), cap)
        root-ratio  min(rho^(1 / sqrt |y|), cap)
        taper       min(rho, cap) where the answer is worse than its group, else 1
        untaper     min(rho, cap) where it is better, else 1
        band        rho^2 exp(3 (1 - rho)) where better, rho^3 exp(2 (1 - rho)) where worse (VESPO, arXiv 2602.10693)
    """

    beta: Schedule
    weight: Literal["one", "ratio", "mean-ratio", "root-ratio", "taper", "untaper", "band"] = "one"
    cap: float = 1.0  # the largest ratio
    floor: float = 0.0  # the smallest weight
    spread: float = math.inf  # of log rho in a group: where it is larger, log rho is divided until it is this
    centre: Literal["weighted", "plain"] = "weighted"  # the mean that is subtracted: with these weights, or without
    normalised: bool = False  # weights of a group are divided by their mean
    by_spread: float = math.inf  # groups are divided by their standard deviation of rewards, at least this much
    shift: Schedule = Constant(0.0)  # how many standard deviations of its group the centre lies below the mean
    lowest: float = 0.0  # the centre is this far on the way from the mean to the lowest gap of the group
    fading: bool = False  # with the square of that deviation, once it is below the reward's own in the group
    bound: float = math.inf  # of |A|, in units of reward; centred again after it
    huber: float = math.inf  # |A| above this many standard deviations of the batch weighs its inverse (Huber 1964)
    by_ess: bool = False  # the loss is multiplied by the root of the batch's effective sample size
    cap_log_ratio: float = math.inf  # of |log(pi / pi_ref)| in the pull to the reference

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"log_behavior"})

    @property
    def by_group(self) -> bool:
        return not self.by_ess and math.isinf(self.huber)

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[Tensor, Measured]:
        """The scalar to minimise at optimizer step `step` (from 1), and its metrics."""
        beta = self.beta(step)
        log_policy_B = masked_sum(output.log_policy_BT, batch.mask_BT)
        log_ratio_B = log_policy_B - masked_sum(batch.log_reference_BT, batch.mask_BT)
        log_rho_B = log_ratio_to_behavior(output.log_policy_BT, batch).detach().sum(1)
        pull_B = log_ratio_B.detach().clamp(-self.cap_log_ratio, self.cap_log_ratio)
        gap_B = batch.reward_B - beta * pull_B
        better_B = gap_B > group_mean(gap_B, batch.group_B, batch.groups)
        limited_log_rho_B = self._limit_spread(log_rho_B, batch)
        weight_B = self._weights(limited_log_rho_B, batch.length_B, better_B).clamp(min=self.floor)
        mean_weight_B = group_mean(weight_B, batch.group_B, batch.groups).clamp(min=1e-12)
        if self.centre == "weighted":
            advantage_B = gap_B - group_mean(weight_B * gap_B, batch.group_B, batch.groups) / mean_weight_B
        else:
            advantage_B = gap_B - group_mean(gap_B, batch.group_B, batch.groups)
        if self.lowest:
            least_B = -group_max(-advantage_B, batch.group_B, batch.groups)
            advantage_B = advantage_B - self.lowest * least_B
        if shift := self.shift(step):
            rows = (batch.group_B, batch.groups)
            spread_B = (group_mean(weight_B * advantage_B.square(), *rows) / mean_weight_B).sqrt()
            if self.fading:
                mean_B = group_mean(weight_B * batch.reward_B, *rows) / mean_weight_B
                reward_spread_B = group_mean(weight_B * (batch.reward_B - mean_B).square(), *rows) / mean_weight_B
                spread_B = spread_B * (spread_B / reward_spread_B.sqrt().clamp(min=1e-6)).clamp(max=1)
            advantage_B = advantage_B + shift * spread_B
        if math.isfinite(self.huber):
            spread = advantage_B.square().mean().sqrt()
            weight_B = weight_B * (self.huber * spread / advantage_B.abs().clamp(min=1e-12)).clamp(max=1)
            mean_weight_B = group_mean(weight_B, batch.group_B, batch.groups).clamp(min=1e-12)
            advantage_B = gap_B - group_mean(weight_B * gap_B, batch.group_B, batch.groups) / mean_weight_B
        if math.isfinite(self.bound):
            advantage_B = advantage_B.clamp(-self.bound, self.bound)
            advantage_B = advantage_B - group_mean(advantage_B, batch.group_B, batch.groups)
        if self.normalised:
            weight_B = weight_B / mean_weight_B
        if math.isfinite(self.by_spread):
            rows = (batch.group_B, batch.groups)
            spread_B = group_mean((batch.reward_B - group_mean(batch.reward_B, *rows)).square(), *rows).sqrt()
            weight_B = weight_B * self.by_spread / spread_B.clamp(min=self.by_spread)
        scale = effective_share(log_rho_B).sqrt() if self.by_ess else 1.0
        loss_B = -scale * (weight_B * advantage_B).detach() * log_policy_B
        size_B = group_sizes(batch.group_B, batch.groups)
        metrics = row_means(
            loss=loss_B, residual=advantage_B.abs(), log_ratio=log_ratio_B, reward=batch.reward_B, weight=weight_B,
            off_policy=-log_rho_B, group_size=size_B, degenerate=size_B == 1,
        )  # fmt: skip
        return loss_B.mean(), metrics | {"beta": beta}

    def _limit_spread(self, log_rho_B: Tensor, batch: Batch) -> Tensor:
        if math.isinf(self.spread):
            return log_rho_B
        rows = (batch.group_B, batch.groups)
        spread_B = group_mean((log_rho_B - group_mean(log_rho_B, *rows)).square(), *rows).sqrt()
        return log_rho_B * (self.spread / spread_B.clamp(min=self.spread))

    def _weights(self, log_rho_B: Tensor, length_B: Tensor, better_B: Tensor) -> Tensor:
        limit = math.log(self.cap)
        if self.weight == "one":
            return torch.ones_like(log_rho_B)
        if self.weight == "band":
            rho_B = log_rho_B.clamp(-20, 5).exp()
            return torch.where(better_B, rho_B**2 * torch.exp(3 * (1 - rho_B)), rho_B**3 * torch.exp(2 * (1 - rho_B)))
        power_B = {"mean-ratio": 1 / length_B.clamp(min=1), "root-ratio": length_B.clamp(min=1).rsqrt()}.get(
            self.weight, torch.ones_like(log_rho_B)
        )
        weight_B = (log_rho_B * power_B).clamp(max=limit).exp()
        if self.weight == "taper":
            return torch.where(better_B, 1.0, weight_B)
        if self.weight == "untaper":
            return torch.where(better_B, weight_B, 1.0)
        return weight_B


def lowered(beta: Schedule) -> WeightedBalance:
    """Returns `exact` with log Z half way between the group's mean and its lowest, once the default.

    Where rewards are noisy its optimum is another one: the group's lowest contains the answer's own luck.
    """
    return WeightedBalance(beta, "ratio", cap=8.0, spread=2.0, normalised=True, lowest=0.5)


@dataclass(frozen=True)
class LeastVarianceBalance(TrajectoryBalance):
    """`none` or `exact` with log Z by squared gradients: a row weighs sum (1 - p)^2 over its tokens in that mean.

    This is nearly the baseline with which the gradient's variance is least (Greensmith et al. 2004, JMLR 5). Groups
    whose answers do not come as often as they were sampled keep the mean with the weights of the loss.
    """

    def _log_z_B(self, gap_B: Tensor, weight_B: Tensor, output: PolicyOutput, batch: Batch) -> Tensor:
        log_z_B = super()._log_z_B(gap_B, weight_B, output, batch)
        by_square_B = log_z_B + slant_B(gap_B, weight_B, output, batch)
        return (
            by_square_B if batch.as_sampled_G is None else by_square_B.where(batch.as_sampled_G[batch.group_B], log_z_B)
        )


@dataclass(frozen=True)
class SpreadBalance(TrajectoryBalance):
    """`asymmetric` with weights whose log spreads by at most `spread` within a group: with 0 they are 1 as in the
    paper's form, which is then pushed up; with 2 it is `asymmetric` itself.
    """

    spread: float = 0.0  # nats

    def weight_B(self, gap_B: Tensor, log_rho_B: Tensor | None, batch: Batch) -> Tensor:
        """[B] positive weights of mean 1 in each group."""
        if log_rho_B is None or not self.spread:
            return torch.ones_like(gap_B)
        rows = (batch.group_B, batch.groups)
        log_rho_B = log_rho_B.nan_to_num(nan=0.0)
        spread_B = group_mean((log_rho_B - group_mean(log_rho_B, *rows)).square(), *rows).sqrt()
        return super().weight_B(gap_B, log_rho_B * (self.spread / spread_B.clamp(min=self.spread)), batch)


@dataclass(frozen=True)
class RemediedBalance(TrajectoryBalance):
    """`asymmetric` joined with another remedy for stale data.

    by_ess: the loss is multiplied by the root of the batch's effective sample size, as a share (VCPO, arXiv 2602.17616)
    clip: answers whose rho has passed 1 + clip and that would be pushed up, or 1 - clip and down, weigh 0, in log Z too
    trust: this times log(pi / mu)^2 / 2 of a whole answer is added to its loss, which pulls to the weights that sampled
        it; mu is where the answer's log-probabilities are known
    """

    by_ess: bool = False
    clip: float = math.inf
    trust: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"log_behavior"})

    @property
    def by_group(self) -> bool:
        return not self.by_ess

    def __call__(
        self, output: PolicyOutput, batch: Batch, step: int, memory: Memory | None = None
    ) -> tuple[Tensor, Measured]:
        """The scalar to minimise at optimizer step `step` (from 1), and its metrics."""
        loss, metrics = super().__call__(output, batch, step, memory)
        log_rho_B = log_ratio_to_behavior(output.log_policy_BT, batch).sum(1)
        if self.by_ess:
            loss = loss * effective_share(log_rho_B.detach()).sqrt()
        if self.trust:
            loss = loss + self.trust * (log_rho_B.square() / 2).mean()
        return loss, metrics

    def weight_B(self, gap_B: Tensor, log_rho_B: Tensor | None, batch: Batch) -> Tensor:
        """[B] weights: 0 where an answer is clipped, else those of `asymmetric`."""
        weight_B = super().weight_B(gap_B, log_rho_B, batch)
        if log_rho_B is None or math.isinf(self.clip):
            return weight_B
        better_B = gap_B > group_mean(weight_B * gap_B, batch.group_B, batch.groups)
        rho_B = log_rho_B.nan_to_num(nan=0.0).exp()
        return weight_B.where(torch.where(better_B, rho_B <= 1 + self.clip, rho_B >= 1 - self.clip), 0.0)

    def _log_z_B(self, gap_B: Tensor, weight_B: Tensor, output: PolicyOutput, batch: Batch) -> Tensor:
        rows = (batch.group_B, batch.groups)  # what is left of a group has no longer a mean weight of 1
        return group_mean(weight_B * gap_B, *rows) / group_mean(weight_B, *rows).clamp(min=1e-12)


@dataclass(frozen=True)
class CorrectedBalance:
    """Trajectory Balance whose advantages are centred without weights and then corrected as a policy gradient's."""

    beta: Schedule
    correction: Correction = field(default_factory=Correction)

    @property
    def needs(self) -> frozenset[str]:
        return self.correction.needs

    @property
    def by_group(self) -> bool:
        return True

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[Tensor, Measured]:
        """The scalar whose gradient is the estimate, and metrics, which are row means."""
        beta = self.beta(step)
        log_ratio_B = masked_sum(output.log_policy_BT.detach() - batch.log_reference_BT, batch.mask_BT)
        gap_B = batch.reward_B - beta * log_ratio_B
        advantage_B = gap_B - group_mean(gap_B, batch.group_B, batch.groups)
        terms_BT, columns = self.correction.terms(output.log_policy_BT, advantage_B, batch)
        metrics = row_means(residual=advantage_B.abs(), log_ratio=log_ratio_B, reward=batch.reward_B, **columns)
        return masked_sum(terms_BT, batch.mask_BT).mean(), metrics | {"beta": beta}


@dataclass(frozen=True)
class QuantileClip(OptimizerSettings):
    """AdamW with the gradient's norm clipped at a running quantile of its own past."""

    quantile: float = 0.5  # of the last `window` norms
    window: int = 50

    def start(self, parameters: Sequence[Parameter], heads: Sequence[Parameter] = ()) -> Optimizer:
        """An optimizer of `parameters`, as that of `OptimizerSettings`."""
        return _QuantileClipped(self, parameters, heads)


class _QuantileClipped(Optimizer):
    settings: QuantileClip

    def __init__(self, settings: QuantileClip, parameters: Sequence[Parameter], heads: Sequence[Parameter]) -> None:
        super().__init__(settings, parameters, heads)
        self._norms: list[float] = []

    def _update(self, step: int, norm: Tensor, norm_value: float) -> None:
        self._norms = [*self._norms, norm_value][-self.settings.window :]
        limit = sorted(self._norms)[int(self.settings.quantile * (len(self._norms) - 1))]
        if norm_value > limit:
            torch.nn.utils.clip_grads_with_norm_(self._masters, limit, norm)
        super()._update(step, norm, min(norm_value, limit))
