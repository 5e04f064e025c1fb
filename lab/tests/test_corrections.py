"""Corrections of published methods against their formulas, written once more, one number at a time, in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from tests.objectives.objective_cases import per_row, random_batch, slopes
from torch import Tensor

from tba.batch import Batch
from tba.objectives.grpo import Grpo
from tba.objectives.policy_gradient import Reinforce
from tba.schedules import Constant
from tba_lab.corrections import Dppo, Topr

DPPO = Grpo(Constant(0.0), standardise=False, loss_aggregation="token", correction=Dppo())
TOPR = Reinforce(Constant(0.0), "mean", correction=Topr())


def far(seed: int) -> tuple[Batch, Tensor]:
    """A batch, and a policy that has moved from its behaviour by up to some nats."""
    batch, log_policy_BT = random_batch(seed, rows=24)
    assert batch.log_behavior_BT is not None
    return batch, batch.log_behavior_BT + 2 * (log_policy_BT - batch.log_behavior_BT)


def advantage(batch: Batch, row: int) -> float:
    group = [float(batch.reward_B[b]) for b in range(batch.rows) if batch.group_B[b] == batch.group_B[row]]
    return float(batch.reward_B[row]) - fmean(group)


def test_dppo_leaves_out_what_moved_far_by_probability_and_pulls_by_the_square_everywhere() -> None:
    for seed in range(4):
        batch, log_policy_BT = far(seed)
        assert batch.log_behavior_BT is not None
        expected_BT, outcomes = torch.zeros_like(log_policy_BT), set()
        tokens = sum(len(positions) for positions in per_row(batch))
        for b, positions in enumerate(per_row(batch)):
            a = advantage(batch, b)
            for t in positions:
                log_pi, log_mu = float(log_policy_BT[b, t]), float(batch.log_behavior_BT[b, t])
                change = math.exp(log_pi) - math.exp(log_mu)
                cut = change > 0.2 if a > 0 else change < -0.2
                outcomes.add((a > 0, abs(change) > 0.2, cut))
                slope = -(0.0 if cut else math.exp(log_pi - log_mu) * a) + 2e-3 * (log_pi - log_mu)
                expected_BT[b, t] = slope / tokens
        torch.testing.assert_close(slopes(DPPO, batch, log_policy_BT)[0], expected_BT, rtol=1e-12, atol=1e-12)
        assert {(True, True, True), (True, True, False), (False, True, True), (False, True, False)} <= outcomes


def test_topr_weighs_bad_answers_by_their_ratio_up_to_one_and_good_ones_in_full() -> None:
    for seed in range(4):
        batch, log_policy_BT = far(seed)
        assert batch.log_behavior_BT is not None
        expected_BT = torch.zeros_like(log_policy_BT)
        for b, positions in enumerate(per_row(batch)):
            a = advantage(batch, b)
            log_rho = sum(float(log_policy_BT[b, t] - batch.log_behavior_BT[b, t]) for t in positions)
            weight = 1.0 if a > 0 else min(math.exp(log_rho), 1.0)
            expected_BT[b, positions] = -weight * a / batch.rows
        torch.testing.assert_close(slopes(TOPR, batch, log_policy_BT)[0], expected_BT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("objective", "plain"), [(TOPR, Reinforce(baseline="mean")), (DPPO, replace(DPPO))])
def test_on_policy_both_have_the_plain_gradient(objective: Grpo | Reinforce, plain: Grpo | Reinforce) -> None:
    batch, _ = random_batch()
    assert batch.log_behavior_BT is not None
    if isinstance(plain, Grpo):
        plain = replace(plain, correction=Grpo().correction)
    expected_BT = slopes(plain, batch, batch.log_behavior_BT)[0]
    torch.testing.assert_close(slopes(objective, batch, batch.log_behavior_BT)[0], expected_BT)
    assert expected_BT.abs().max() > 0.001


@pytest.mark.parametrize("objective", [DPPO, TOPR])
def test_ratios_that_would_overflow_leave_the_gradient_finite(objective: Grpo | Reinforce) -> None:
    batch, log_policy_BT = random_batch()
    assert batch.log_behavior_BT is not None
    for shift in (-300, 300):
        shifted_batch = replace(batch, log_behavior_BT=torch.where(batch.mask_BT, batch.log_behavior_BT + shift, 0.0))
        assert bool(slopes(objective, shifted_batch, log_policy_BT)[0].isfinite().all())
    assert objective.needs == {"log_behavior"}
