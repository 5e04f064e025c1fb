"""PPO: advantages against a table made by hand, clipping at both signs, the value head's loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from objective_cases import per_row, random_batch, slopes

from tba.batch import Batch
from tba.errors import UserError
from tba.objectives.ppo import Ppo, gae
from tba.protocols import PolicyOutput
from tba.schedules import Constant

PLAIN = Ppo(Constant(0.0), whiten=False)


def test_generalised_advantages_are_those_of_a_table_made_by_hand() -> None:
    """gamma 0.9, lam 0.5: d = (0.5 + 0.9 * 2 - 1, 0.9 * 4 - 2, 1 - 4); A_t = d_t + 0.45 A_(t+1)."""
    reward = torch.tensor([[0.5, 0.0, 1.0]])
    value = torch.tensor([[1.0, 2.0, 4.0]])
    whole = torch.ones(1, 3, dtype=torch.bool)
    assert gae(reward, value, whole, 0.9, 0.5)[0].tolist() == pytest.approx([1.4125, 0.25, -3.0])
    assert gae(reward, value, whole, 0.9, 0.0)[0].tolist() == pytest.approx([1.3, 1.6, -3.0])  # one step
    assert gae(reward, value, whole, 1.0, 1.0)[0].tolist() == pytest.approx([0.5, -1.0, -3.0])  # return less value


def test_positions_that_were_not_sampled_are_passed_over_and_padding_has_none() -> None:
    mask = torch.tensor([[True, False, True, True, False]])
    reward = torch.tensor([[0.5, 9.0, 0.0, 1.0, 9.0]])
    value = torch.tensor([[1.0, 9.0, 2.0, 4.0, 9.0]])
    assert gae(reward, value, mask, 0.9, 0.5)[0].tolist() == pytest.approx([1.4125, 0, 0.25, -3.0, 0])


def returns(batch: Batch, beta: float) -> dict[tuple[int, int], float]:
    """What is still to come at each token, with gamma = 1: -beta log(mu / pi_ref) of each, and r at the end."""
    assert batch.log_behavior_BT is not None
    return_of = {}
    for b, row in enumerate(per_row(batch)):
        reward_to_go = float(batch.reward_B[b])
        for t in reversed(row):
            reward_to_go -= beta * float(batch.log_behavior_BT[b, t] - batch.log_reference_BT[b, t])
            return_of[b, t] = reward_to_go
    return return_of


def valued(batch: Batch) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(batch.mask_BT.shape, dtype=torch.float64, generator=generator) * batch.mask_BT


@pytest.mark.parametrize("per", ["token", "row", "sequence"])
def test_slopes_are_the_clipped_ratio_times_the_advantage_and_the_values_error(per: str) -> None:
    """With lam = 1 the advantage is the return less the value, and the value's target the return."""
    batch, log_policy_BT = random_batch()
    value_BT, beta = valued(batch), 0.2
    objective = Ppo(Constant(beta), lam=1.0, value_weight=0.5, whiten=False, loss_aggregation=per)
    at_policy, at_value = slopes(objective, batch, log_policy_BT, value_BT)
    assert batch.log_behavior_BT is not None
    rho_BT = (log_policy_BT - batch.log_behavior_BT).exp()
    to_come, rows, seen = returns(batch, beta), per_row(batch), set()
    expected, expected_value = torch.zeros_like(at_policy), torch.zeros_like(at_policy)
    for (b, t), total in to_come.items():
        divisor = {"token": len(to_come), "row": batch.rows, "sequence": batch.rows * len(rows[b])}[per]
        advantage, rho = total - float(value_BT[b, t]), float(rho_BT[b, t])
        cut = rho > 1.2 if advantage > 0 else rho < 0.8
        seen.add((cut, advantage > 0))
        expected[b, t] = 0.0 if cut else -rho * advantage / divisor
        expected_value[b, t] = 0.5 * (float(value_BT[b, t]) - total) / divisor
    assert len(seen) == 4
    torch.testing.assert_close(at_policy, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(at_value, expected_value, rtol=1e-9, atol=1e-12)


def test_whitened_advantages_change_the_policys_slope_and_not_the_values_target() -> None:
    batch, _ = random_batch()
    value_BT = valued(batch)
    assert batch.log_behavior_BT is not None
    plain, plain_value = slopes(PLAIN, batch, batch.log_behavior_BT, value_BT)
    white, white_value = slopes(replace(PLAIN, whiten=True), batch, batch.log_behavior_BT, value_BT)
    torch.testing.assert_close(white_value, plain_value)
    advantage, whitened = (-x[batch.mask_BT].numpy() * int(batch.mask_BT.sum()) for x in (plain, white))
    np.testing.assert_allclose(whitened, (advantage - advantage.mean()) / advantage.std(), rtol=1e-6)


def test_a_values_slope_is_that_of_its_error_up_to_the_clip() -> None:
    batch, log_policy_BT = random_batch()
    value_BT, tokens = valued(batch), int(batch.mask_BT.sum())
    free = slopes(PLAIN, batch, log_policy_BT, value_BT)[1] * tokens / 0.1
    bounded = slopes(replace(PLAIN, value_clip=0.5), batch, log_policy_BT, value_BT)[1] * tokens / 0.1
    torch.testing.assert_close(bounded, free.clamp(-0.5, 0.5))
    assert 0 < int((free.abs() > 0.5).sum()) < tokens


def test_the_value_heads_loss_is_at_the_minimum_when_values_are_the_returns() -> None:
    batch, log_policy_BT = random_batch()
    value_BT = torch.zeros_like(log_policy_BT)
    for (b, t), total in returns(batch, 0.2).items():
        value_BT[b, t] = total
    objective = Ppo(Constant(0.2), whiten=False)
    at_policy, at_value = slopes(objective, batch, log_policy_BT, value_BT)
    assert at_value.abs().max() < 1e-12  # the last value of a row has its token's penalty and its reward before it
    assert at_policy.abs().max() < 1e-12
    _, metrics = objective(PolicyOutput(log_policy_BT, value_BT), batch, 1)
    assert metrics["value_error"] == pytest.approx(0, abs=1e-12)


def test_settings_that_cannot_work_are_refused() -> None:
    for changes, said in (
        ({"clip": 1.5}, "clip of a ratio is 1.5"),
        ({"lam": 1.5}, "PPO's lam is 1.5"),
        ({"gamma": -0.1}, "PPO's gamma is -0.1"),
        ({"value_clip": 0.0}, "value_clip 0.0"),
        ({"value_weight": -1.0}, "value_weight is -1.0"),
    ):
        with pytest.raises(UserError, match=said):
            Ppo(**changes)
