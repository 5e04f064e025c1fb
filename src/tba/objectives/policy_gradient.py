"""The plain policy gradient with the KL penalty in the reward: REINFORCE and RLOO.

Invariant: nothing here corrects for where the samples came from; the estimate is unbiased on-policy only. (With a
baseline over the group and the *current* policy penalised, its gradient is Trajectory Balance's, on any data.)

Shape legend: B rows (one completion each), T completion positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tba.batch import Batch
from tba.objectives.reduce import group_mean, group_sizes, leave_one_out_mean, masked_sum, row_means
from tba.protocols import PolicyOutput
from tba.schedules import Constant, Schedule


@dataclass(frozen=True)
class Reinforce:
    """Gradient -(1 / B) sum (s - b) grad log pi, with the score s = r - beta log(q / pi_ref) and a baseline b.

    q is the current policy, or the behaviour that sampled the row (as when the penalty is computed together with the
    reward, once; on-policy they agree). `leave_one_out` is RLOO (Ahmadian et al. 2024), `mean` is (K - 1) / K of it.
    A row alone in its group contributes zero, but with baseline `none`.
    """

    beta: Schedule = Constant(0.0)  # weight of the KL penalty in the reward
    baseline: Literal["mean", "leave_one_out", "none"] = "leave_one_out"  # taken over the row's own group
    penalised: Literal["policy", "behavior"] = "policy"  # whose distance to the reference is penalised

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"log_behavior"} if self.penalised == "behavior" else ())

    @property
    def by_group(self) -> bool:
        return True

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        """The scalar whose gradient is the estimate (its value means nothing), and metrics, which are row means."""
        beta = self.beta(step)
        log_policy_B = masked_sum(output.log_policy_BT, batch.mask_BT)
        log_reference_B = masked_sum(batch.log_reference_BT, batch.mask_BT)
        penalised_B = log_policy_B.detach() if self.penalised == "policy" else self._log_behavior_B(batch)
        score_B = batch.reward_B - beta * (penalised_B - log_reference_B)
        advantage_B = score_B - self._baseline_B(score_B, batch)
        loss_B = -advantage_B * log_policy_B

        metrics = row_means(
            loss=loss_B,
            advantage=advantage_B.abs(),
            log_ratio=log_policy_B - log_reference_B,
            reward=batch.reward_B,
            degenerate=group_sizes(batch.group_B, batch.groups) == 1,
        )
        return loss_B.mean(), metrics | {"beta": beta}

    def _baseline_B(self, score_B: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.baseline == "mean":
            return group_mean(score_B, batch.group_B, batch.groups)
        if self.baseline == "leave_one_out":
            return leave_one_out_mean(score_B, batch.group_B, batch.groups)
        return torch.zeros_like(score_B)

    @staticmethod
    def _log_behavior_B(batch: Batch) -> torch.Tensor:
        if batch.log_behavior_BT is None:
            raise ValueError("penalised='behavior' needs log_behavior of every row, but this batch lacks it")
        return masked_sum(batch.log_behavior_BT, batch.mask_BT)
