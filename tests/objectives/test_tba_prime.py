"""TBA' against its equation, and against the objectives that it is close to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from objective_cases import BETA, centred, per_row, perturbed, random_batch, sampled, slopes

from tba.objectives.correction import Correction
from tba.objectives.grpo import dr_grpo
from tba.objectives.tba_prime import TbaPrime
from tba.objectives.trajectory_balance import TrajectoryBalance

STEEP = 0.3  # the value of BETA


@pytest.mark.parametrize("per", ["token", "row"])
def test_the_slope_is_minus_ratio_times_advantage_and_zero_where_the_ratio_is_cut(per: str) -> None:
    batch, log_policy_BT = random_batch()
    log_policy_BT[0, 0] += 3.0  # a ratio of 20 more
    log_policy_BT[1, 0] += 12.0  # a log-ratio to the reference that is cut to 10
    assert batch.log_behavior_BT is not None
    rho_BT = (log_policy_BT - batch.log_behavior_BT).exp()
    log_ratio_BT = (log_policy_BT - batch.log_reference_BT).clamp(-10, 10)
    kl = np.array([sum(float(log_ratio_BT[b, t]) for t in row) for b, row in enumerate(per_row(batch))])
    group = batch.group_B.numpy()
    advantage = centred(batch.reward_B.numpy(), group) - STEEP * centred(kl, group)
    expected, cut = torch.zeros_like(log_policy_BT), 0
    divisor = int(batch.mask_BT.sum()) if per == "token" else batch.rows
    for b, row in enumerate(per_row(batch)):
        for t in row:
            rho = float(rho_BT[b, t])
            cut += rho > 8
            expected[b, t] = 0.0 if rho > 8 else -rho * advantage[b] / divisor
    slope_BT, _ = slopes(TbaPrime(BETA, loss_aggregation=per), batch, log_policy_BT)
    torch.testing.assert_close(slope_BT, expected, rtol=1e-9, atol=1e-12)
    assert cut == 2
    assert float((log_policy_BT - batch.log_reference_BT).max()) > 10


def test_it_is_dr_grpo_in_the_ratio_form_with_the_divergence_in_the_reward() -> None:
    batch, log_policy_BT = random_batch()
    slope_BT, _ = slopes(TbaPrime(BETA, loss_aggregation="row"), batch, log_policy_BT)
    expected_BT, _ = slopes(dr_grpo(BETA, "clamp", penalty="reward"), batch, log_policy_BT)
    torch.testing.assert_close(slope_BT, expected_BT, rtol=1e-12, atol=1e-15)
    in_loss, _ = slopes(dr_grpo(BETA, "clamp"), batch, log_policy_BT)
    assert (in_loss - slope_BT).abs().max() > 0.01  # the divergence as a loss is something else


def test_on_policy_and_by_rows_it_has_the_gradient_of_trajectory_balance() -> None:
    policy = perturbed()
    batch = sampled(policy, [5, 2, 7])
    output = policy.evaluate(batch)
    slope_BT, _ = slopes(TbaPrime(BETA, loss_aggregation="row"), batch, output.log_policy_BT.detach())
    balance, _ = slopes(TrajectoryBalance(BETA, off_policy="none"), batch, output.log_policy_BT.detach())
    torch.testing.assert_close(slope_BT, balance, rtol=1e-5, atol=1e-8)  # the behaviour is stored in float32


def test_without_importance_weights_it_is_trajectory_balance_on_any_data() -> None:
    batch, log_policy_BT = random_batch()
    plain = TbaPrime(BETA, loss_aggregation="row", correction=Correction("none"))
    assert plain.needs == frozenset()
    slope_BT, _ = slopes(plain, replace(batch, log_behavior_BT=None), log_policy_BT)
    torch.testing.assert_close(slope_BT, slopes(TrajectoryBalance(BETA, off_policy="none"), batch, log_policy_BT)[0])
