"""GRPO and Dr. GRPO: standardised advantages, lengths, clipping at both signs, and the divergence term."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from objective_cases import per_row, random_batch, slopes

from tba.objectives.correction import Correction
from tba.objectives.grpo import Grpo, dr_grpo
from tba.objectives.penalty import k3
from tba.schedules import Constant

NO_PENALTY = Constant(0.0)


def advantages(reward: np.ndarray, group: np.ndarray, standardise: bool) -> np.ndarray:
    values = np.zeros(len(reward))
    for g in set(group.tolist()):
        group_rewards = reward[group == g]
        scale = group_rewards.std(ddof=1) + 1e-4 if standardise else 1.0
        values[group == g] = (group_rewards - group_rewards.mean()) / scale
    return values


@pytest.mark.parametrize("form", ["clip", "clamp"])
@pytest.mark.parametrize("doctored", [False, True])
def test_the_slope_is_the_equations_with_and_without_the_two_divisions(form: str, doctored: bool) -> None:
    """GRPO divides by the standard deviation and by each row's length, Dr. GRPO by neither."""
    batch, log_policy_BT = random_batch()
    cap = 1.3
    objective = dr_grpo(NO_PENALTY) if doctored else Grpo(NO_PENALTY)
    objective = replace(objective, correction=Correction(form, cap=cap))
    slope_BT, _ = slopes(objective, batch, log_policy_BT)
    assert batch.log_behavior_BT is not None
    rho_BT = (log_policy_BT - batch.log_behavior_BT).exp()
    advantage = advantages(batch.reward_B.numpy(), batch.group_B.numpy(), not doctored)
    expected, seen = torch.zeros_like(slope_BT), set()
    for b, row in enumerate(per_row(batch)):
        for t in row:
            rho, a = float(rho_BT[b, t]), advantage[b]
            cut = rho > cap if form == "clamp" else (rho > 1.2 if a > 0 else rho < 0.8)
            seen.add((cut, a > 0, rho > 1))
            expected[b, t] = 0.0 if cut else -rho * a / batch.rows / (1 if doctored else len(row))
    torch.testing.assert_close(slope_BT, expected, rtol=1e-9, atol=1e-12)
    assert {(True, True, True), (True, form == "clamp", form == "clamp"), (False, True, False)} <= seen


def test_a_group_of_equal_rewards_teaches_nothing_and_a_constant_added_to_all_changes_nothing() -> None:
    batch, log_policy_BT = random_batch()
    slope_BT, _ = slopes(Grpo(NO_PENALTY), batch, log_policy_BT)
    moved, _ = slopes(Grpo(NO_PENALTY), replace(batch, reward_B=batch.reward_B + 7), log_policy_BT)
    torch.testing.assert_close(moved, slope_BT)
    same = torch.where(batch.group_B == 1, torch.tensor(0.1, dtype=torch.float64), batch.reward_B)
    equal, _ = slopes(Grpo(NO_PENALTY), replace(batch, reward_B=same), log_policy_BT)
    assert equal[batch.group_B == 1].abs().max() < 1e-10
    torch.testing.assert_close(equal[batch.group_B != 1], slope_BT[batch.group_B != 1])


def test_the_divergence_term_is_k3_with_slope_beta_times_1_less_u() -> None:
    batch, log_policy_BT = random_batch()
    beta = 0.7
    with_term, _ = slopes(dr_grpo(Constant(beta)), batch, log_policy_BT)
    without, _ = slopes(dr_grpo(NO_PENALTY), batch, log_policy_BT)
    for b, row in enumerate(per_row(batch)):
        for t in row:
            u = math.exp(float(batch.log_reference_BT[b, t] - log_policy_BT[b, t]))
            assert float(k3(log_policy_BT, batch)[b, t]) == pytest.approx(u - math.log(u) - 1)
            assert float((with_term - without)[b, t]) == pytest.approx(beta * (1 - u) / batch.rows)
    assert torch.autograd.gradcheck(lambda x: k3(x, batch), (log_policy_BT.clone().requires_grad_(),))


def test_the_divergence_of_one_token_is_at_most_10_and_its_mean_on_policy_is_the_kl() -> None:
    batch, log_policy_BT = random_batch()
    far_BT = log_policy_BT.clone()
    far_BT[1, 0] -= 50
    far_BT.requires_grad_()
    divergence = k3(far_BT, batch)
    (slope,) = torch.autograd.grad(divergence.sum(), far_BT)
    assert divergence[1, 0].item() == 10
    assert slope[1, 0].item() == 0
    assert divergence.min().item() >= 0
    # all tokens of one position, weighted by the policy
    log_p = torch.log_softmax(torch.tensor([[0.3], [1.0], [-1.0]], dtype=torch.float64), 0)
    log_q = torch.log_softmax(torch.tensor([[0.0], [-1.0], [0.5]], dtype=torch.float64), 0)
    three = replace(batch, mask_BT=torch.ones(3, 1, dtype=torch.bool), log_reference_BT=log_q)
    kl = float((log_p.exp() * (log_p - log_q)).sum())
    assert float((log_p.exp() * k3(log_p, three)).sum()) == pytest.approx(kl)
