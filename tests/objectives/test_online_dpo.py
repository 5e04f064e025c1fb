"""Online DPO: the direction and size of its gradient, ties, and the IPO square."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from objective_cases import finite_differences, per_row, perturbed, random_batch, sampled, slopes
from torch import Tensor

from tba.errors import UserError
from tba.objectives.online_dpo import OnlineDpo
from tba.protocols import PolicyOutput
from tba.schedules import Constant

STEEP = 0.7


def log_ratios(log_policy_BT: Tensor, reference_BT: Tensor) -> list[float]:
    return (log_policy_BT - reference_BT).sum(1).tolist()


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_the_best_of_a_group_is_raised_and_the_worst_lowered_by_the_equation(loss: str) -> None:
    """-log sigmoid(beta d) has the slope -beta sigmoid(-beta d) at the best; the square 2 (d - 1 / (2 beta))."""
    batch, log_policy_BT = random_batch()
    slope_BT, _ = slopes(OnlineDpo(Constant(STEEP), loss), batch, log_policy_BT)
    ratio, expected = log_ratios(log_policy_BT, batch.log_reference_BT), torch.zeros_like(slope_BT)
    for g in range(3):
        rows = [b for b in range(batch.rows) if b % 3 == g]
        best = max(rows, key=lambda b: float(batch.reward_B[b]))
        worst = min(rows, key=lambda b: float(batch.reward_B[b]))
        d = ratio[best] - ratio[worst]
        slope = 2 * (d - 1 / (2 * STEEP)) if loss == "ipo" else -STEEP / (1 + math.exp(STEEP * d))
        expected[best, per_row(batch)[best]] = slope / 3
        expected[worst, per_row(batch)[worst]] = -slope / 3
    torch.testing.assert_close(slope_BT, expected, rtol=1e-9, atol=1e-12)
    if loss == "dpo":
        assert sorted((slope_BT.sum(1).sign()).tolist()) == [-1.0] * 3 + [0.0] * 6 + [1.0] * 3


def test_the_gradient_agrees_with_finite_differences() -> None:
    policy, batch = perturbed(), sampled(perturbed(1), [5, 2, 7], 1.5)
    for loss in ("dpo", "ipo"):
        numeric, analytic = finite_differences(OnlineDpo(loss=loss), policy, batch, 4)
        assert numeric == pytest.approx(analytic, rel=1e-6)
        assert abs(analytic) > 1e-3


def test_a_group_of_equal_rewards_has_no_pair_weighs_nothing_and_is_counted() -> None:
    batch, log_policy_BT = random_batch()
    reward_B = torch.where(batch.group_B == 0, 0.25, batch.reward_B)
    tied = replace(batch, reward_B=reward_B)
    slope_BT, _ = slopes(OnlineDpo(), tied, log_policy_BT)
    assert slope_BT[batch.group_B == 0].abs().max() == 0
    untied, _ = slopes(OnlineDpo(), batch, log_policy_BT)
    torch.testing.assert_close(slope_BT[batch.group_B != 0], untied[batch.group_B != 0])
    loss, metrics = OnlineDpo()(PolicyOutput(log_policy_BT), tied, 1)
    assert metrics["ties"] == pytest.approx(4 / 12)
    both, _ = slopes(OnlineDpo(), replace(batch, reward_B=torch.ones(12)), log_policy_BT)
    assert both.abs().max() == 0
    assert math.isfinite(loss)


def test_rows_that_are_best_together_count_as_the_mean_over_all_pairs() -> None:
    batch, log_policy_BT = random_batch()
    reward_B = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0, 0, 0.5, 0, 0])  # in group 0 two best and one worst
    loss, metrics = OnlineDpo(Constant(STEEP))(PolicyOutput(log_policy_BT), replace(batch, reward_B=reward_B), 1)
    ratio = log_ratios(log_policy_BT, batch.log_reference_BT)
    terms = [math.log1p(math.exp(-STEEP * (ratio[best] - ratio[6]))) for best in (0, 3)]
    assert loss.item() == pytest.approx(sum(terms) / 2 / 3)
    assert metrics["ties"] == pytest.approx(8 / 12)
    assert metrics["margin"] == pytest.approx((ratio[0] + ratio[3] - 2 * ratio[6]) / 2 / 3)


def test_a_beta_of_zero_is_refused() -> None:
    with pytest.raises(UserError, match="Online DPO divides by beta"):
        OnlineDpo(Constant(0.0))
