"""VinePPO's advantages on a tree made by hand, and how they are used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from objective_cases import per_row, random_batch, slopes

from tba.batch import Batch
from tba.objectives.vine_ppo import VinePpo, step_advantages
from tba.schedules import Constant


def tree() -> tuple[Batch, list[list[float]]]:
    """Three answers to one prompt, whose value is 0.5, and the advantages of their tokens by hand.

    The first two share a first step, after which 3 of 4 rollouts were right (0.75); the first goes on to a second step
    of value 1 and is right, the second ends wrong. The third is a single step, right.
    """
    base, _ = random_batch(rows=3, positions=6, groups=1)
    length_B = torch.tensor([6, 4, 2])
    mask_BT = torch.arange(6) < length_B[:, None]
    batch = replace(
        base,
        length_B=length_B,
        mask_BT=mask_BT,
        reward_B=torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64),
        log_behavior_BT=torch.where(mask_BT, -1.0, 0.0).double(),
        log_reference_BT=torch.where(mask_BT, -1.0, 0.0).double(),
        step_start_BS=torch.tensor([[0, 2, 5], [0, 2, 4], [0, 2, 2]]),
        step_value_BS=torch.tensor([[0.5, 0.75, 1.0], [0.5, 0.75, 0.0], [0.5, 0.0, 0.0]], dtype=torch.float64),
    )
    up, on = 0.75 - 0.5, 1.0 - 0.75
    return batch, [[up, up, on, on, on, 1.0 - 1.0], [up, up, 0.0 - 0.75, 0.0 - 0.75], [1.0 - 0.5] * 2]


def test_each_token_has_the_advantage_of_its_step() -> None:
    batch, by_hand = tree()
    advantage_BT = step_advantages(batch)
    for b, row in enumerate(per_row(batch)):
        assert advantage_BT[b, row].tolist() == by_hand[b]


def test_what_the_steps_gain_adds_up_to_the_reward_less_the_prompts_value() -> None:
    batch, _ = tree()
    assert batch.step_start_BS is not None
    for b in range(batch.rows):
        starts = [s for s in batch.step_start_BS[b].tolist() if s < int(batch.length_B[b])]
        gained = float(step_advantages(batch)[b, starts].sum())
        assert gained == pytest.approx(float(batch.reward_B[b]) - 0.5)


def test_on_policy_the_slope_is_minus_the_advantage_whitened_or_not() -> None:
    batch, by_hand = tree()
    assert batch.log_behavior_BT is not None
    expected = -torch.tensor([x for row in by_hand for x in row], dtype=torch.float64)
    plain, _ = slopes(VinePpo(Constant(0.0), whiten=False), batch, batch.log_behavior_BT)
    torch.testing.assert_close(plain[batch.mask_BT], expected / 12)
    white, _ = slopes(VinePpo(Constant(0.0)), batch, batch.log_behavior_BT)
    torch.testing.assert_close(white[batch.mask_BT], (expected - expected.mean()) / expected.std(correction=0) / 12)


@pytest.mark.parametrize(("rho", "advantage"), [(1.3, 0.5), (0.7, 0.5), (1.3, -0.75), (0.7, -0.75)])
def test_ratios_are_clipped_at_both_signs(rho: float, advantage: float) -> None:
    batch, _ = tree()
    b, t = (2, 1) if advantage > 0 else (1, 3)
    assert batch.log_behavior_BT is not None
    log_policy_BT = batch.log_behavior_BT.clone()
    log_policy_BT[b, t] += float(torch.tensor(rho, dtype=torch.float64).log())
    slope_BT, _ = slopes(VinePpo(Constant(0.0), whiten=False), batch, log_policy_BT)
    cut = (rho > 1) == (advantage > 0)
    assert float(slope_BT[b, t]) == pytest.approx(0.0 if cut else -rho * advantage / 12)


def test_the_divergence_term_is_added_to_every_token() -> None:
    batch, _ = tree()
    assert batch.log_behavior_BT is not None
    apart_BT = batch.log_behavior_BT - 0.1 * batch.mask_BT
    beta = 0.5
    with_term, _ = slopes(VinePpo(Constant(beta)), batch, apart_BT)
    without, _ = slopes(VinePpo(Constant(0.0)), batch, apart_BT)
    expected = beta * (1 - torch.tensor(0.1, dtype=torch.float64).exp()) / 12
    torch.testing.assert_close((with_term - without)[batch.mask_BT], expected.expand(12))
