"""RAFT: whose likelihood is raised, and when it is REINFORCE."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from objective_cases import per_row, perturbed, random_batch, sampled, slopes

from tba.objectives.correction import Correction
from tba.objectives.policy_gradient import Reinforce
from tba.objectives.raft import Raft
from tba.schedules import Constant


def test_with_a_reward_of_0_and_1_on_policy_it_is_reinforce_without_a_baseline() -> None:
    policy = perturbed()
    batch = sampled(policy, [6, 6, 6])
    batch = replace(batch, reward_B=(batch.reward_B > 0.5).double())
    assert 0 < batch.reward_B.mean() < 1
    log_policy_BT = policy.evaluate(batch).log_policy_BT.detach()
    reinforce, _ = slopes(Reinforce(Constant(0.0), "none"), batch, log_policy_BT)
    torch.testing.assert_close(slopes(Raft(), batch, log_policy_BT)[0], reinforce, rtol=0, atol=0)
    weighted = slopes(Raft(correction=Correction("truncate", "sequence")), batch, log_policy_BT)[0]
    torch.testing.assert_close(weighted, reinforce, rtol=1e-5, atol=1e-8)


def test_the_best_rows_of_a_group_share_its_weight() -> None:
    batch, log_policy_BT = random_batch()
    reward_B = torch.tensor([0.0, 1, 0, 0.5, 1, 0, 0.5, 0, 0, 0.25, 0, 0], dtype=torch.float64)
    batch = replace(batch, reward_B=reward_B)  # groups by row modulo 3, four rows each
    slope_BT, _ = slopes(Raft("best"), batch, log_policy_BT)
    weight = {3: 2.0, 6: 2.0, 1: 2.0, 4: 2.0, 2: 1.0, 5: 1.0, 8: 1.0, 11: 1.0}
    for b, row in enumerate(per_row(batch)):
        assert slope_BT[b, row].tolist() == pytest.approx([-weight.get(b, 0.0) / 12] * len(row))


def test_only_rows_with_a_positive_reward_are_kept() -> None:
    batch, log_policy_BT = random_batch()
    slope_BT, _ = slopes(Raft(), batch, log_policy_BT)
    for b, row in enumerate(per_row(batch)):
        assert slope_BT[b, row].tolist() == [-1 / 12 if batch.reward_B[b] > 0 else 0.0] * len(row)
    negative = replace(batch, reward_B=-batch.reward_B.abs())
    assert slopes(Raft(), negative, log_policy_BT)[0].abs().max() == 0
