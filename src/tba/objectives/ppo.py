"""PPO by token, with a value head and generalised advantages, on data of any age; the clipped terms of VinePPO too.

Invariant: advantages and value targets are constants of the step, from the value head as it is; the ratio is to the
stored behaviour. So nothing has to be remembered between the sampling of a row and its use.

Shape legend: B rows (one completion each), T completion positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tba.batch import Batch
from tba.errors import UserError
from tba.fields import as_declared
from tba.objectives.correction import clipped, log_ratio_to_behavior, require_clip
from tba.objectives.penalty import Penalised, penalised_log_ratio
from tba.objectives.reduce import Aggregation, average, row_means, token_mean, whitened
from tba.protocols import Measured, PolicyOutput
from tba.schedules import Constant, Schedule


@dataclass(frozen=True)
@as_declared
class Ppo:
    """L = mean of max(-rho A, -clip(rho, 1 +- clip) A) + value_weight * mean of (V - (A + SG[V]))^2 / 2, over tokens.

    Schulman et al. 2017 (arXiv 1707.06347), on language as in Ziegler et al. 2019 (arXiv 1909.08593): a token's reward
    is -beta log(q / pi_ref), plus r at the last one; A is GAE(gamma, lam) of these with V detached (`gae`), whitened
    before it is used, and not in the target; rho = pi / mu of the token.

    PPO's own value clipping keeps values near those of an older value head. No such value is stored here, and the
    current one would never be clipped; `value_clip` bounds the slope instead, at an error that large (Huber 1964).
    Raises `UserError` when a field makes no sense.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"log_behavior", "value"})
    beta: Schedule = Constant(0.05)  # weight of the KL penalty in each token's reward
    clip: float = 0.2  # how far from 1 a ratio still has a gradient
    gamma: float = 1.0  # discount per token
    lam: float = 0.95  # lambda of GAE: 1 takes the whole return, 0 one step and the next value
    value_weight: float = 0.1  # weight of the value head's loss
    value_clip: float | None = None  # error beyond which the value loss is linear instead of square; None: never
    whiten: bool = True  # advantages of mean 0 and variance 1 over the batch's tokens
    penalised: Penalised = "behavior"  # whose distance to the reference is penalised
    loss_aggregation: Aggregation = "token"  # divisor: rows, each row's tokens and the rows (sequence), or all tokens

    def __post_init__(self) -> None:
        require_clip(self.clip)
        for name, share in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= share <= 1:
                raise UserError(f"PPO's {name} is {share}, but it has to be from 0 to 1.")
        if self.value_weight < 0 or (self.value_clip is not None and self.value_clip <= 0):
            raise UserError(
                f"PPO's value_weight is {self.value_weight} and its value_clip {self.value_clip}, but the one must not "
                "be negative and the other has to be positive or None."
            )

    @property
    def by_group(self) -> bool:
        return self.loss_aggregation != "token" and not self.whiten

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, Measured]:
        """Returns the scalar to minimise, and metrics; `cut` is the share of tokens without gradient, by row."""
        if output.value_BT is None:
            raise ValueError("PPO needs value of the policy, but this one has no such head")
        beta, mask_BT, value_BT = self.beta(step), batch.mask_BT, output.value_BT
        penalty_BT = penalised_log_ratio(output.log_policy_BT, batch, self.penalised)
        reward_BT = _place_at_last_token(batch.reward_B, mask_BT) - beta * penalty_BT
        advantage_BT = gae(reward_BT, value_BT.detach(), mask_BT, self.gamma, self.lam)
        error_BT = value_BT - (advantage_BT + value_BT.detach())
        terms_BT, columns = proximal_terms(output.log_policy_BT, advantage_BT, batch, self.clip, self.whiten)
        policy_loss = average(terms_BT, mask_BT, self.loss_aggregation)
        value_loss = average(self._square(error_BT), mask_BT, self.loss_aggregation)

        columns |= {"value": token_mean(value_BT, mask_BT), "value_error": token_mean(error_BT.square(), mask_BT)}
        return policy_loss + self.value_weight * value_loss, row_means(**columns) | {"beta": beta}

    def _square(self, error_BT: Tensor) -> Tensor:
        """Returns error^2 / 2, continued as a straight line beyond `value_clip`."""
        if self.value_clip is None:
            return error_BT.square() / 2
        return torch.nn.functional.huber_loss(
            error_BT, torch.zeros_like(error_BT), reduction="none", delta=self.value_clip
        )


def gae(reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Tensor:
    """Returns [B, T]: A_t = d_t + gamma lam A_(t+1), d_t = r_t + gamma V_(t+1) - V_t; 0 where nothing was sampled.

    V is of the prefix before a token and 0 after the last; what comes after a token is the next *sampled* one.
    Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438).
    """
    advantage_BT = torch.zeros_like(value_BT)
    next_advantage_B = next_value_B = torch.zeros_like(value_BT[:, 0])
    for t in range(value_BT.shape[1] - 1, -1, -1):
        mask_B, value_B = mask_BT[:, t], value_BT[:, t]
        advantage_B = reward_BT[:, t] + gamma * next_value_B - value_B + gamma * lam * next_advantage_B
        advantage_BT[:, t] = torch.where(mask_B, advantage_B, 0.0)
        next_advantage_B = torch.where(mask_B, advantage_B, next_advantage_B)
        next_value_B = torch.where(mask_B, value_B, next_value_B)
    return advantage_BT


def _place_at_last_token(x_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns [B, T]: x at the last sampled position of each row, 0 elsewhere."""
    remaining_BT = mask_BT.flip(1).cumsum(1).flip(1)  # sampled positions from here on
    return x_B[:, None] * (mask_BT & (remaining_BT == 1))


def proximal_terms(
    log_policy_BT: Tensor, advantage_BT: Tensor, batch: Batch, clip: float, whiten: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns [B, T] max(-rho A, -clip(rho, 1 +- clip) A), rho = pi / mu of the token, and columns [B] for metrics.

    The advantages are constants; with `whiten` they are first brought to mean 0 and variance 1 over the batch's tokens.
    """
    mask_BT = batch.mask_BT
    scaled_BT = whitened(advantage_BT, mask_BT) if whiten else advantage_BT
    log_rho_BT = log_ratio_to_behavior(log_policy_BT, batch)
    terms_BT, cut_BT = clipped(log_rho_BT, scaled_BT, clip)
    columns = {
        "advantage": token_mean(advantage_BT.abs(), mask_BT),
        "cut": token_mean(cut_BT.to(terms_BT.dtype), mask_BT),
        "off_policy": -log_rho_BT.sum(1),
    }
    return terms_BT, columns
