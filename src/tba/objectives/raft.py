"""RAFT: maximum likelihood on the answers that pass the reward (Dong et al. 2023, arXiv 2304.06767).

Invariant: a row that is not kept has no gradient. With a reward of 0 and 1 and on-policy, keeping what is positive is
REINFORCE without a baseline, sample by sample.

Shape legend: B rows (one completion each), T completion positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tba.batch import Batch
from tba.fields import as_declared
from tba.objectives.correction import Correction
from tba.objectives.reduce import Aggregation, average, group_max, group_mean, row_means
from tba.protocols import Measured, PolicyOutput


@dataclass(frozen=True)
@as_declared
class Raft:
    """L = -(1 / B) sum w log pi(y|x): w = 1 where r > 0 (`positive`), or 1 for the best row of each group (`best`).

    Several rows that are best together share their group's weight, which is its number of rows, so that every group
    weighs as much as it has rows. A group in which all rewards are equal is then learnt whole, however bad it is.
    """

    keep: Literal["positive", "best"] = "positive"  # rows with a reward above 0, or the best of each group
    loss_aggregation: Aggregation = "row"  # divisor: rows, each row's tokens and the rows (sequence), or all tokens
    correction: Correction = field(default_factory=Correction)  # for data that are not on-policy

    @property
    def needs(self) -> frozenset[str]:
        return self.correction.needs

    @property
    def by_group(self) -> bool:
        return self.loss_aggregation != "token"

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, Measured]:
        """Returns the scalar to minimise, and metrics, which are row means; `kept` is the share of rows that are."""
        weight_B = self._weight_B(batch)
        terms_BT, columns = self.correction.terms(output.log_policy_BT, weight_B, batch)
        return average(terms_BT, batch.mask_BT, self.loss_aggregation), row_means(kept=weight_B > 0, **columns)

    def _weight_B(self, batch: Batch) -> Tensor:
        if self.keep == "positive":
            return (batch.reward_B > 0).to(batch.reward_B.dtype)
        rows = batch.group_B, batch.groups
        best_B = (batch.reward_B == group_max(batch.reward_B, *rows)).to(batch.reward_B.dtype)
        return best_B / group_mean(best_B, *rows)  # size / number of best
