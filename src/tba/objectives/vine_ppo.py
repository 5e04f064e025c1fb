"""VinePPO: PPO by steps, whose values come from rollouts and not from a head (Kazemnejad et al. 2024).

Invariant: all tokens of a step share its advantage, which is computed from the values stored with the trajectory.

Shape legend: B rows (one completion each), T completion positions, S steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tba.batch import Batch
from tba.objectives.correction import require_clip
from tba.objectives.penalty import k3
from tba.objectives.ppo import proximal_terms
from tba.objectives.reduce import Aggregation, average, row_means
from tba.protocols import Measured, PolicyOutput
from tba.schedules import Constant, Schedule


@dataclass(frozen=True)
class VinePpo:
    """L = mean over tokens of max(-rho A, -clip(rho, 1 +- clip) A) + beta k3, A being that of the token's step.

        A_i = r_i + V(s_(i+1)) - V(s_i),     r_i = r at the last step, else 0,     V(whole answer) = 0

    V(s_i), the value of the answer's first i steps, is the mean reward of rollouts that a searcher continued from there
    (`rollout/vine.py`). rho = pi / mu of the token. Source: arXiv 2410.01679.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"log_behavior", "step_value"})
    beta: Schedule = Constant(1e-4)  # weight of the divergence from the reference, as k3 in the loss
    clip: float = 0.2  # how far from 1 a ratio still has a gradient
    whiten: bool = True  # advantages of mean 0 and variance 1 over the batch's tokens
    loss_aggregation: Aggregation = "token"  # divisor: rows, each row's tokens and the rows (sequence), or all tokens

    def __post_init__(self) -> None:
        require_clip(self.clip)

    @property
    def by_group(self) -> bool:
        return self.loss_aggregation != "token" and not self.whiten

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, Measured]:
        """Returns a scalar with the estimate as gradient, and metrics; `cut` is the share of tokens without one."""
        beta, mask_BT = self.beta(step), batch.mask_BT
        advantage_BT = step_advantages(batch)
        terms_BT, columns = proximal_terms(output.log_policy_BT, advantage_BT, batch, self.clip, self.whiten)
        loss = average(terms_BT + beta * k3(output.log_policy_BT, batch), mask_BT, self.loss_aggregation)
        return loss, row_means(**columns) | {"beta": beta}


def step_advantages(batch: Batch) -> Tensor:
    """Returns [B, T]: each token's step's advantage. Raises `ValueError` when the batch has no steps."""
    start_BS, value_BS = batch.step_start_BS, batch.step_value_BS
    if start_BS is None or value_BS is None:
        raise ValueError("VinePPO needs step_value of every row, but the batch lacks it")
    next_start_BS = torch.cat([start_BS[:, 1:], batch.length_B[:, None]], 1)
    next_value_BS = torch.nn.functional.pad(value_BS[:, 1:], (0, 1))  # 0 after the last step, also where padded
    last_BS = next_start_BS == batch.length_B[:, None]
    advantage_BS = torch.where(last_BS, batch.reward_B[:, None], next_value_BS) - value_BS
    position_BT = torch.arange(batch.mask_BT.shape[1], device=start_BS.device).expand(batch.mask_BT.shape)
    step_BT = torch.searchsorted(start_BS.contiguous(), position_BT.contiguous(), right=True) - 1
    return advantage_BS.gather(1, step_BT)
