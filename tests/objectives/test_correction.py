"""Ratios to the behaviour: each form's slope against its equation, at both signs of the advantage."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from objective_cases import per_row, random_batch, slopes
from torch import Tensor

from tba.batch import Batch
from tba.errors import UserError
from tba.objectives.correction import Correction, clipped
from tba.objectives.policy_gradient import Reinforce
from tba.schedules import Constant

CAP, CLIP = 1.4, 0.2
FORMS = ("none", "truncate", "clamp", "mask", "clip", "decoupled")
LEVELS = ("token", "sequence", "mean")


def factor(form: str, rho: float, advantage: float, lag: int) -> float:
    """What multiplies -A grad log pi, from the equations."""
    if form == "none":
        return 1.0
    if form == "truncate":
        return min(rho, CAP)
    if form == "clamp":
        return rho if rho < CAP else 0.0
    if form == "mask":
        return rho if 1 / CAP < rho < CAP else 0.0
    anchor = 1.0 if form == "clip" or lag < 0 else rho if lag == 0 else rho ** (1 - 1 / lag)  # of the bounds: prox / mu
    moved_far_enough = rho > anchor * (1 + CLIP) if advantage > 0 else rho < anchor * (1 - CLIP)
    return 0.0 if moved_far_enough else min(anchor, CAP) * rho / anchor


def aged(batch: Batch) -> Batch:
    """The batch with rows of unknown age, of the present weights, and one to four updates old."""
    return replace(batch, lag_B=torch.arange(batch.rows) % 6 - 1)


def ratios(batch: Batch, log_policy_BT: Tensor, level: str) -> np.ndarray:
    """rho [B, T] by plain loops."""
    assert batch.log_behavior_BT is not None
    rho = np.ones(tuple(log_policy_BT.shape))
    for b, positions in enumerate(per_row(batch)):
        logs = {t: float(log_policy_BT[b, t] - batch.log_behavior_BT[b, t]) for t in positions}
        for t in positions:
            whole = sum(logs.values()) / (len(logs) if level == "mean" else 1)
            rho[b, t] = math.exp(logs[t] if level == "token" else whole)
    return rho


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", FORMS)
def test_the_slope_is_the_factor_of_the_equation_times_the_advantage(form: str, level: str) -> None:
    batch, log_policy_BT = random_batch(rows=24)
    assert batch.log_behavior_BT is not None
    batch = aged(batch)
    log_policy_BT = batch.log_behavior_BT + 2 * (log_policy_BT - batch.log_behavior_BT)
    correction = Correction(form, level, CAP, CLIP)
    slope_BT, _ = slopes(Reinforce(Constant(0.0), "none", correction=correction), batch, log_policy_BT)
    rho = ratios(batch, log_policy_BT, level)
    expected, factors = torch.zeros_like(slope_BT), []
    for b, positions in enumerate(per_row(batch)):
        advantage = float(batch.reward_B[b])
        for t in positions:
            factors.append((factor(form, rho[b, t], advantage, b % 6 - 1), rho[b, t], advantage))
            expected[b, t] = -factors[-1][0] * advantage / batch.rows
    torch.testing.assert_close(slope_BT, expected, rtol=1e-9, atol=1e-12)
    if form == "clip":  # both ways of being cut, and both of being far and not cut, are among them
        assert {(f == 0, r > 1, a > 0) for f, r, a in factors if abs(r - 1) > CLIP} == {
            (True, True, True), (True, False, False), (False, False, True), (False, True, False),
        }  # fmt: skip
    elif form != "none":
        assert any(r > CAP for _, r, _ in factors)
        assert any(r < 1 / CAP for _, r, _ in factors)


def test_with_a_higher_upper_bound_a_ratio_is_pushed_up_as_far_as_that_and_down_as_before() -> None:
    batch, log_policy_BT = random_batch()
    rho = ratios(batch, log_policy_BT, "token")
    places = [(b, t) for b, positions in enumerate(per_row(batch)) for t in positions]
    above = sorted(rho[b, t] for b, t in places if rho[b, t] > 1 + CLIP and batch.reward_B[b] > 0)
    high = (above[len(above) // 2 - 1] + above[len(above) // 2]) / 2 - 1
    assert high > CLIP
    wider = Correction("clip", clip=CLIP, clip_high=high)
    slope_BT, _ = slopes(Reinforce(Constant(0.0), "none", correction=wider), batch, log_policy_BT)
    seen = set()
    for b, t in places:
        r, advantage = rho[b, t], float(batch.reward_B[b])
        cut = r > 1 + high if advantage > 0 else r < 1 - CLIP
        seen.add((advantage > 0, r > 1 + CLIP, cut))
        assert float(slope_BT[b, t]) == pytest.approx(0.0 if cut else -r * advantage / batch.rows, rel=1e-9, abs=1e-12)
    assert seen >= {(True, True, True), (True, True, False), (False, True, False), (False, False, True)}
    same = Correction("clip", clip=CLIP, clip_high=CLIP)
    for correction, equal in ((same, Correction("clip", clip=CLIP)), (replace(wider, clip_high=None), same)):
        narrow_BT, _ = slopes(Reinforce(Constant(0.0), "none", correction=correction), batch, log_policy_BT)
        two, _ = slopes(Reinforce(Constant(0.0), "none", correction=equal), batch, log_policy_BT)
        assert torch.equal(narrow_BT, two)
    with pytest.raises(UserError, match="clip_high is 0"):
        Correction("clip", clip_high=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_every_form_has_the_plain_gradient(form: str, level: str) -> None:
    batch = aged(random_batch()[0])
    assert batch.log_behavior_BT is not None
    plain, _ = slopes(Reinforce(), batch, batch.log_behavior_BT)
    slope_BT, _ = slopes(Reinforce(correction=Correction(form, level)), batch, batch.log_behavior_BT)
    torch.testing.assert_close(slope_BT, plain, rtol=1e-12, atol=1e-15)
    assert plain.abs().max() > 0.01


@pytest.mark.parametrize("level", LEVELS)
def test_the_metrics_say_what_share_was_cut_and_how_far_the_rows_are_from_the_policy(level: str) -> None:
    batch, log_policy_BT = random_batch()
    assert batch.log_behavior_BT is not None
    rho = ratios(batch, log_policy_BT, level)
    correction = Correction("clamp", level, CAP)
    _, columns = correction.terms(log_policy_BT, batch.reward_B, batch)
    for b, positions in enumerate(per_row(batch)):
        assert float(columns["cut"][b]) == pytest.approx(np.mean([rho[b, t] > CAP for t in positions]))
        apart = sum(float(batch.log_behavior_BT[b, t] - log_policy_BT[b, t]) for t in positions)
        assert float(columns["off_policy"][b]) == pytest.approx(apart)
    assert 0 < columns["cut"].mean() < 1


@pytest.mark.parametrize("level", LEVELS)
def test_decoupled_is_truncated_for_rows_of_the_present_and_clipped_for_rows_one_update_old(level: str) -> None:
    batch, log_policy_BT = random_batch()

    def slope(correction: Correction, lag_B: Tensor | None = None) -> Tensor:
        objective = Reinforce(Constant(0.0), "none", correction=correction)
        return slopes(objective, replace(batch, lag_B=lag_B), log_policy_BT)[0]

    decoupled, age = Correction("decoupled", level, CAP, CLIP), torch.ones(batch.rows, dtype=torch.int64)
    torch.testing.assert_close(slope(decoupled, 0 * age), slope(Correction("truncate", level, CAP)))
    for lag_B in (age, -age, None):
        torch.testing.assert_close(slope(decoupled, lag_B), slope(Correction("clip", level, clip=CLIP)))
    wide = slope(Correction("decoupled", level, 1e9, CLIP), 3 * age)  # rho within (1 +- clip)^3
    bounds = Correction("clip", level, clip=1 - (1 - CLIP) ** 3, clip_high=(1 + CLIP) ** 3 - 1)
    torch.testing.assert_close(wide, slope(bounds))


def test_a_ratio_is_not_pushed_further_up_for_what_was_good_nor_further_down_for_what_was_bad() -> None:
    log_rho = torch.tensor([1.3, 0.7, 1.3, 0.7], dtype=torch.float64).log().requires_grad_()
    loss, cut = clipped(log_rho, torch.tensor([2.0, 2.0, -2.0, -2.0]), 0.2)
    assert loss.tolist() == pytest.approx([-2 * 1.2, -2 * 0.7, 2 * 1.3, 2 * 0.8])
    assert cut.tolist() == [True, False, False, True]
    (slope,) = torch.autograd.grad(loss.sum(), log_rho)
    assert slope.tolist() == pytest.approx([0.0, -2 * 0.7, 2 * 1.3, 0.0])


def test_bounds_with_which_even_on_policy_rows_would_be_cut_are_refused() -> None:
    with pytest.raises(UserError, match=r"cap is 0.5, but it has to be at least 1"):
        Correction("truncate", cap=0.5)
    for clip in (0.0, 1.0):
        with pytest.raises(UserError, match="it has to be above 0 and below 1"):
            Correction("clip", clip=clip)
    assert Correction().needs == frozenset()
    assert Correction("clip").needs == {"log_behavior"}
