"""GRPO and Dr. GRPO: advantages relative to the group, a ratio by token, and a divergence term.

Invariant: adding a constant to all rewards of a group changes nothing.

Shape legend: B rows (one completion each), T completion positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tba.batch import Batch
from tba.fields import as_declared
from tba.objectives.correction import Correction
from tba.objectives.penalty import clamped_divergence, k3
from tba.objectives.reduce import Aggregation, average, group_mean, group_sizes, group_std, row_means
from tba.protocols import Measured, PolicyOutput
from tba.schedules import Constant, Schedule

_LEAST_STD = 1e-4  # added to the standard deviation, so that a group of equal rewards has advantages of zero


@dataclass(frozen=True)
@as_declared
class Grpo:
    """L = (1 / B) sum over rows of (1 / |y|) sum over tokens of [max(-rho A, -clip(rho, 1 +- 0.2) A) + beta k3].

    A = (r - mean r) / std r over the row's group, rho = pi / mu of the token (Shao et al. 2024, arXiv 2402.03300,
    equation 3). The ratio form, `--objective.correction.form clamp`, has -min(rho, cap) A in the place of the maximum.

    With the `penalty` in the reward, r is r - beta sum log(pi / pi_ref), each token's kept within +-10, and there is no
    k3; `dr_grpo` with this penalty and the ratio form is TBA'.
    """

    beta: Schedule = Constant(0.04)  # weight of the divergence from the reference
    standardise: bool = True  # divide by the group's standard deviation, which gives easy and hard prompts more weight
    loss_aggregation: Aggregation = (
        "sequence"  # divisor: rows, each row's tokens and the rows (sequence), or all tokens
    )
    penalty: Literal["loss", "reward"] = "loss"  # the divergence as k3 in the loss, or in the reward before the mean
    correction: Correction = Correction("clip")  # how the ratio to the behaviour enters: clip

    @property
    def needs(self) -> frozenset[str]:
        return self.correction.needs

    @property
    def by_group(self) -> bool:
        return self.loss_aggregation != "token"

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, Measured]:
        """Returns the scalar whose gradient is the estimate, and metrics, which are row means."""
        beta, log_policy_BT = self.beta(step), output.log_policy_BT
        in_reward, rows = self.penalty == "reward", (batch.group_B, batch.groups)
        score_B = batch.reward_B - beta * clamped_divergence(log_policy_BT, batch) if in_reward else batch.reward_B
        advantage_B = score_B - group_mean(score_B, *rows)
        if self.standardise:
            advantage_B = advantage_B / (group_std(score_B, *rows) + _LEAST_STD)
        terms_BT, columns = self.correction.terms(log_policy_BT, advantage_B, batch)
        if not in_reward:
            terms_BT = terms_BT + beta * k3(log_policy_BT, batch)
        metrics = row_means(advantage=advantage_B.abs(), degenerate=group_sizes(*rows) == 1, **columns)
        return average(terms_BT, batch.mask_BT, self.loss_aggregation), metrics | {"beta": beta}


def dr_grpo(
    beta: Schedule = Constant(0.0),  # noqa: B008 - frozen
    form: Literal["clip", "clamp"] = "clip",
    penalty: Literal["loss", "reward"] = "loss",
) -> Grpo:
    """GRPO without its two biases: no division by the standard deviation, none by the length of a row.

    Liu et al. 2025, "Understanding R1-Zero-like training" (arXiv 2503.20783). Their division by a constant number of
    tokens is left to the learning rate: the loss is a mean over rows of sums over tokens, as Trajectory Balance's is.
    """
    return Grpo(beta, standardise=False, loss_aggregation="row", penalty=penalty, correction=Correction(form))
