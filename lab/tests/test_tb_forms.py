"""Forms of Trajectory Balance for stale data: the ideal policy is their fixed point, whatever a row weighs."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from tba.objectives.trajectory_balance import TrajectoryBalance
from tba_lab.tb_forms import RemediedBalance, SpreadBalance, WeightedBalance

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "objectives"))
from objective_cases import BETA, random_batch, slopes

FORMS = {
    "one": WeightedBalance(BETA),
    **{w: WeightedBalance(BETA, w) for w in ("ratio", "mean-ratio", "root-ratio", "taper", "band")},
    "normalised": WeightedBalance(BETA, "ratio", cap=8.0, normalised=True),
    "bound": WeightedBalance(BETA, bound=0.5),
    "huber": WeightedBalance(BETA, "ratio", huber=1.0),
    "by-ess": WeightedBalance(BETA, "ratio", by_ess=True),
    "clip": RemediedBalance(BETA, clip=0.2),
    "steps-by-ess": RemediedBalance(BETA, by_ess=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_at_the_ideal_policy_its_gradient_is_zero_on_any_data(form: str) -> None:
    batch, log_policy_BT = random_batch(3)
    share_BT = batch.mask_BT.double() / batch.mask_BT.sum(1, keepdim=True)
    missing_B = batch.reward_B / BETA(1) - ((log_policy_BT - batch.log_reference_BT) * batch.mask_BT).sum(1)
    ideal_BT = log_policy_BT + share_BT * (missing_B - batch.group_B)[:, None]  # log Z of a group is its number
    assert float(slopes(FORMS[form], batch, ideal_BT)[0].abs().max()) < 1e-12
    assert float(slopes(FORMS[form], batch, log_policy_BT)[0].abs().max()) > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_the_rows_of_a_group_push_as_much_up_as_down(form: str) -> None:
    batch, log_policy_BT = random_batch(4)
    push_B = slopes(FORMS[form], batch, log_policy_BT)[0][:, 0]  # every row has sampled its first token
    assert bool(batch.mask_BT[:, 0].all())
    total_G = torch.zeros(batch.groups, dtype=push_B.dtype).index_add(0, batch.group_B, push_B)
    assert float(total_G.abs().max()) < 1e-12


def test_centred_plainly_and_then_weighted_they_do_not() -> None:
    batch, log_policy_BT = random_batch(4)
    push_B = slopes(WeightedBalance(BETA, "ratio", centre="plain"), batch, log_policy_BT)[0][:, 0]
    total_G = torch.zeros(batch.groups, dtype=push_B.dtype).index_add(0, batch.group_B, push_B)
    assert float(total_G.abs().max()) > 1e-3


def test_without_weights_it_is_trajectory_balance() -> None:
    batch, log_policy_BT = random_batch(5)
    form_BT, core_BT = (
        slopes(o, batch, log_policy_BT)[0] for o in (FORMS["one"], TrajectoryBalance(BETA, off_policy="none"))
    )
    torch.testing.assert_close(form_BT, core_BT, rtol=0, atol=1e-12)


def test_the_core_is_among_these_forms() -> None:
    batch, log_policy_BT = random_batch(6)
    assert batch.log_behavior_BT is not None
    far_BT = batch.log_behavior_BT + 4 * (log_policy_BT - batch.log_behavior_BT)
    exact = WeightedBalance(BETA, "ratio", cap=8.0, normalised=True, spread=2.0)
    for core in (TrajectoryBalance(BETA, off_policy="exact"), TrajectoryBalance(BETA)):  # nothing was seen before
        form_BT, core_BT = (slopes(o, batch, far_BT)[0] for o in (exact, core))
        torch.testing.assert_close(form_BT, core_BT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0, 2.0])
def test_between_the_papers_form_and_the_default_weights_spread_by_at_most_so_much(spread: float) -> None:
    batch, log_policy_BT = random_batch(6)
    assert batch.log_behavior_BT is not None
    far_BT = batch.log_behavior_BT + 4 * (log_policy_BT - batch.log_behavior_BT)
    equal = WeightedBalance(BETA, "ratio", cap=8.0, normalised=True, spread=spread) if spread else WeightedBalance(BETA)
    spread_BT, equal_BT = (slopes(o, batch, far_BT)[0] for o in (SpreadBalance(BETA, spread=spread), equal))
    torch.testing.assert_close(spread_BT, equal_BT, rtol=0, atol=1e-12)


def test_a_clipped_answer_has_no_say_in_its_group() -> None:
    batch, log_policy_BT = random_batch(6)
    assert batch.log_behavior_BT is not None
    far_BT = batch.log_behavior_BT + 4 * (log_policy_BT - batch.log_behavior_BT)
    clipped, plain = (slopes(RemediedBalance(BETA, clip=c), batch, far_BT)[0][:, 0] for c in (0.2, math.inf))
    rho_B = ((far_BT - batch.log_behavior_BT) * batch.mask_BT).sum(1).exp()
    up_B = plain < 0  # the slope of a loss
    out_B = torch.where(up_B, rho_B > 1.2, rho_B < 0.8)
    assert bool(out_B.any())
    assert not bool(out_B.all())
    assert float(clipped[out_B].abs().max()) == 0
    assert bool((clipped[~out_B] != 0).any())


def test_a_pull_to_the_weights_that_sampled_adds_the_log_ratio_to_the_slope() -> None:
    batch, log_policy_BT = random_batch(7)
    assert batch.log_behavior_BT is not None
    pulled, plain = (slopes(RemediedBalance(BETA, trust=t), batch, log_policy_BT)[0] for t in (0.1, 0.0))
    log_rho_B = ((log_policy_BT - batch.log_behavior_BT) * batch.mask_BT).sum(1)
    added_BT = 0.1 * log_rho_B[:, None] * batch.mask_BT / batch.rows
    torch.testing.assert_close(pulled - plain, added_BT.expand_as(pulled), rtol=0, atol=1e-12)
