"""Sub-trajectory balance over the prefixes of an answer, with the reference's log-probabilities as partial energies.

Invariant: the loss is zero on any samples at the ideal policy pi* = pi_ref exp(r / beta) / Z with the values
V*(s) = beta log E[exp(r / beta) | s] under pi_ref, and only there on data of full support. Where the samples came from
never enters.

Shape legend: B rows (one completion each), T completion positions, S = T + 1 states (prefixes of 0 to T tokens).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tba.batch import Batch
from tba.errors import UserError
from tba.fields import as_declared
from tba.objectives.reduce import masked_sum, row_means
from tba.objectives.trajectory_balance import require_positive
from tba.protocols import Measured, PolicyOutput
from tba.schedules import Schedule


@dataclass(frozen=True)
@as_declared
class SubtrajectoryBalance:
    """L = mean over rows of the weighted mean over prefixes i < j of d_ij^2 / (2 beta), weights lam^(j - i).

        d_ij = beta (log(pi / pi_ref) of the tokens between i and j) + V(s_i) - V(s_j),      V(whole answer) = r

    This is SubTB(lambda) (Madan et al. 2023, arXiv 2209.12782) with the flow of a prefix written as F(s) = pi_ref(s)
    exp(V(s) / beta), so that the reference is the partial energy of forward-looking GFlowNets (Pan et al. 2023, arXiv
    2302.01687) and V is what the policy's value head learns. It is also path consistency learning (Nachum et al. 2017,
    arXiv 1702.08892) relative to pi_ref. V(no tokens) = beta log Z(x), and the longest stretch alone, i = 0 to the
    end, is Trajectory Balance with a learned log Z, in its advantage form.

    A small `lam` trains on short stretches: less variance, and the reward takes many updates to reach the first
    tokens. Tokens that the policy did not sample are taken to follow from those before them.

    With the `flow` one, V is 0 everywhere, which it is where the reference alone is the target (one teacher of weight
    1, no reward), and needs no head: then the loss is that of stretches of one token, beta / 2 times the mean over an
    answer's tokens of (log pi - log pi_ref)^2. On-policy its gradient is that of the KL divergence from the policy to
    the teacher at each prefix; on other data it has the same optimum.
    """

    by_group: ClassVar[bool] = True
    beta: Schedule  # strength of the pull to the reference, in units of reward; positive
    lam: float = 1.0  # a stretch of n tokens weighs lam^n; above 0, at most 1
    flow: Literal["learned", "one"] = "learned"  # one: V is 0, for a teacher that is the whole target

    def __post_init__(self) -> None:
        require_positive(self.beta, "Sub-trajectory balance")
        if not 0 < self.lam <= 1:
            raise UserError(f"the lam of sub-trajectory balance is {self.lam}, but it has to be above 0, at most 1.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"value"} if self.flow == "learned" else ())

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the field without effect: where single tokens are balanced, no stretches are weighed."""
        return {} if self.flow == "learned" else {"lam": "flow learned"}

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, Measured]:
        """Returns the scalar to minimise, and metrics (row means); `residual` is the mean |d| from start to end."""
        beta = self.beta(step)
        if self.flow == "one":
            return self._by_token(output, batch, beta)
        level_BS, state_BS = _prefix_levels(output, batch, beta)
        loss_B = _weighted_mean_square(level_BS, state_BS, self.lam) / (2 * beta)
        residual_B = level_BS.gather(1, batch.length_B[:, None])[:, 0] - level_BS[:, 0]
        metrics = row_means(residual=residual_B.abs(), value=-level_BS[:, 0])
        return loss_B.mean(), metrics | {"beta": beta}

    def _by_token(self, output: PolicyOutput, batch: Batch, beta: float) -> tuple[torch.Tensor, Measured]:
        log_ratio_BT = torch.where(batch.mask_BT, output.log_policy_BT - batch.log_reference_BT, 0.0)
        loss_B = beta / 2 * masked_sum(log_ratio_BT.square(), batch.mask_BT) / batch.mask_BT.sum(1).clamp(min=1)
        metrics = row_means(residual=log_ratio_BT.sum(1).abs() * beta)
        return loss_B.mean(), metrics | {"beta": beta}


def _prefix_levels(output: PolicyOutput, batch: Batch, beta: float) -> tuple[Tensor, Tensor]:
    """Returns c [B, S] with d_ij = c_j - c_i, and which states count: before a sampled token, and the whole answer."""
    if output.value_BT is None:
        raise ValueError("sub-trajectory balance needs value of the policy, but this one has no such head")
    log_ratio_BT = torch.where(batch.mask_BT, output.log_policy_BT - batch.log_reference_BT, 0.0)
    prefix_log_ratio_BS = torch.nn.functional.pad(log_ratio_BT.cumsum(1), (1, 0))
    value_BS = torch.nn.functional.pad(output.value_BT, (0, 1))
    position_S = torch.arange(prefix_log_ratio_BS.shape[1], device=prefix_log_ratio_BS.device)
    is_whole_BS = position_S == batch.length_B[:, None]
    value_BS = torch.where(is_whole_BS, batch.reward_B[:, None].to(value_BS.dtype), value_BS)
    return beta * prefix_log_ratio_BS - value_BS, torch.nn.functional.pad(batch.mask_BT, (0, 1)) | is_whole_BS


def _weighted_mean_square(level_BS: Tensor, state_BS: Tensor, lam: float) -> Tensor:
    """Returns [B]: the mean of (c_j - c_i)^2 over the states i < j of a row, weights lam^(j - i).

    As a quadratic form, sum_i d_i c_i^2 - sum_ij L_ij c_i c_j with L_ij = lam^|j - i| and d its row sums, it takes S^2
    memory once and not for each row. It does not change when c is shifted, so c is centred first, for its rounding.
    """
    position_S = torch.arange(level_BS.shape[1], device=level_BS.device, dtype=level_BS.dtype)
    weight_SS = lam ** (position_S[:, None] - position_S).abs()
    included_BS = state_BS.to(level_BS.dtype)
    centre_B1 = masked_sum(level_BS.detach(), state_BS)[:, None] / included_BS.sum(1, keepdim=True)
    centred_BS = torch.where(state_BS, level_BS - centre_B1, 0.0)
    weighted_sum_BS = included_BS @ weight_SS
    twice_B = 2 * ((weighted_sum_BS * centred_BS - centred_BS @ weight_SS) * centred_BS).sum(1)
    pairs_B = (weighted_sum_BS * included_BS).sum(1) - included_BS.sum(1)  # both orders, without i = j
    return twice_B / pairs_B.clamp(min=1e-12)  # 0 / 0 where nothing was sampled
