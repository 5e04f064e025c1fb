"""Online DPO: the best and the worst of a group as a preference (Guo et al. 2024, arXiv 2402.04792).

Invariant: only log(pi / pi_ref) of whole sequences enters, so where the samples came from does not (as in Trajectory
Balance), and a group in which all rewards are equal has no pair and no gradient.

Shape legend: B rows (one completion each), T completion positions, N pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tba.batch import Batch
from tba.fields import as_declared
from tba.objectives.reduce import group_max, group_sizes, masked_sum, row_means
from tba.objectives.trajectory_balance import require_positive
from tba.protocols import Measured, PolicyOutput
from tba.schedules import Constant, Schedule


@dataclass(frozen=True)
@as_declared
class OnlineDpo:
    """L = mean over groups of -log sigmoid(beta d), d = log(pi / pi_ref)(best) - log(pi / pi_ref)(worst).

    Best and worst of the K by reward, as Noukhovitch et al. 2025 (ICLR) take them; DPO is Rafailov et al. 2023 (arXiv
    2305.18290). With `loss` ipo the term is (d - 1 / (2 beta))^2 (Azar et al. 2023, arXiv 2310.12036).

    Where several rows are best or worst together, the term is the mean over all such pairs, which is what drawing one
    of them gives on average. Where best and worst are equal there is no pair: the group counts with zero, and `ties`
    says which share of the rows this concerns. In a ragged batch larger groups weigh more.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    by_group: ClassVar[bool] = True
    beta: Schedule = Constant(0.1)  # of the logistic (or of the square's target), not in units of reward; positive
    loss: Literal["dpo", "ipo"] = "dpo"  # logistic loss, or squared

    def __post_init__(self) -> None:
        require_positive(self.beta, "Online DPO")

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, Measured]:
        """Returns the scalar to minimise, and metrics (row means); `margin` is d, `ranked` the share with d > 0."""
        beta = self.beta(step)
        log_ratio_B = masked_sum(output.log_policy_BT - batch.log_reference_BT, batch.mask_BT)
        best_N, worst_N = _best_worst_pairs(batch)
        margin_N = log_ratio_B[best_N] - log_ratio_B[worst_N]
        square_N, logistic_N = (margin_N - 1 / (2 * beta)).square(), -torch.nn.functional.logsigmoid(beta * margin_N)
        loss_N = square_N if self.loss == "ipo" else logistic_N

        group_N, size_B = batch.group_B[best_N], group_sizes(batch.group_B, batch.groups)
        weight_N = size_B[best_N].to(margin_N.dtype) / (group_sizes(group_N, batch.groups) * batch.rows)
        paired_B = torch.isin(batch.group_B, group_N)
        metrics = row_means(  # the sums over pairs are means over rows already
            ties=~paired_B, margin=(weight_N * margin_N).sum(), ranked=(weight_N * (margin_N > 0)).sum()
        )
        return (weight_N * loss_N).sum(), metrics | {"beta": beta}


def _best_worst_pairs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Rows (best [N], worst [N]): all pairs of a group's best and worst rows, none where these are equal."""
    reward_B, rows = batch.reward_B, (batch.group_B, batch.groups)
    best_B, worst_B = reward_B == group_max(reward_B, *rows), -reward_B == group_max(-reward_B, *rows)
    pair_BB = best_B[:, None] & worst_B & (batch.group_B[:, None] == batch.group_B) & (reward_B[:, None] > reward_B)
    best_N, worst_N = pair_BB.nonzero(as_tuple=True)
    return best_N, worst_N
