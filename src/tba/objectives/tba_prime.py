"""TBA', the advantage form of Trajectory Balance with a ratio by token (arXiv 2503.18929, section on TBA').

Invariant: with every ratio at 1 its gradient is Trajectory Balance's, up to the normalisation and the clamp on a
token's log-ratio. It differs from Dr. GRPO in one place only: the divergence from the reference is in the advantage.

Shape legend: B rows (one completion each), T completion positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tba.batch import Batch
from tba.fields import as_declared
from tba.objectives.correction import Correction
from tba.objectives.penalty import clamped_divergence
from tba.objectives.reduce import Aggregation, average, group_mean, group_sizes, row_means
from tba.protocols import Measured, PolicyOutput
from tba.schedules import Schedule


@dataclass(frozen=True)
@as_declared
class TbaPrime:
    """L = -(1 / N) sum over rows and tokens of min(rho, 8) A, rho = pi / mu of the token, N the batch's tokens.

    A = (r - mean r) - beta (kl - mean kl), means over the row's group; kl = sum of log(pi / pi_ref) over the row's
    tokens, each kept within +-10, without gradient. No gradient where rho is cut; `--objective.correction.form none` is
    the variant without importance weights. kl and its mean are both of the policy as it is: the authors' code takes
    the mean of an older snapshot, an asymmetry that they call a defect.
    """

    beta: Schedule  # strength of the pull to the reference, in units of reward (the paper's MATH run: 0.005)
    loss_aggregation: Aggregation = "token"  # divisor: the tokens, or (row) the rows, as in Trajectory Balance
    correction: Correction = Correction("clamp", cap=8.0)  # for data that are not on-policy: clamp, at 8

    @property
    def needs(self) -> frozenset[str]:
        return self.correction.needs

    @property
    def by_group(self) -> bool:
        return self.loss_aggregation != "token"

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, Measured]:
        """Returns the scalar whose gradient is the estimate, and metrics, which are row means."""
        beta = self.beta(step)
        kl_B = clamped_divergence(output.log_policy_BT, batch)
        reward_B, rows = batch.reward_B, (batch.group_B, batch.groups)
        advantage_B = (reward_B - group_mean(reward_B, *rows)) - beta * (kl_B - group_mean(kl_B, *rows))
        terms_BT, columns = self.correction.terms(output.log_policy_BT, advantage_B, batch)
        metrics = row_means(advantage=advantage_B.abs(), degenerate=group_sizes(*rows) == 1, **columns)
        return average(terms_BT, batch.mask_BT, self.loss_aggregation), metrics | {"beta": beta}
