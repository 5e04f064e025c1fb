"""Beta's anneals and the learning rate's shapes, against the paper's numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.errors import UserError
from tba.recipe_names import recipe_names
from tba.schedules import (
    Constant,
    Linear,
    LinearThenCut,
    RateShape,
    Schedule,
    WarmupConstant,
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
    gsm8k_anneal,
    tldr_anneal,
)
from tba.settings import find, override


def test_on_tldr_beta_is_0_777_at_step_31_and_jumps_to_0_05_at_step_32() -> None:
    beta = tldr_anneal(256)
    assert beta(1) == 1.0
    assert beta(31) == pytest.approx(1 - 0.95 * 30 / 128)
    assert round(beta(31), 3) == 0.777
    assert [beta(step) for step in (32, 33, 256, 10_000)] == [0.05] * 4


def test_longer_tldr_runs_are_cut_at_an_eighth_rounded_up() -> None:
    assert tldr_anneal(825).cut_step == 104
    assert tldr_anneal(256) == LinearThenCut(1.0, 0.05, target_steps=128, cut_step=32)


def test_on_gsm8k_beta_falls_from_0_012_to_0_004_over_500_steps_and_stays_there() -> None:
    beta = gsm8k_anneal()
    assert beta(1) == 0.012
    assert beta(251) == pytest.approx(0.008)
    assert beta(500) == pytest.approx(0.004 + 0.008 / 500)
    assert beta(501) == beta(1000) == 0.004
    assert gsm8k_anneal(0.014)(1) == 0.014


def test_steps_count_from_1() -> None:
    for schedule in (Constant(1.0), Linear(1, 0, 2), tldr_anneal(), WarmupConstant(), WarmupStableDecay()):
        with pytest.raises(ValueError, match="steps count from 1"):
            schedule(0)


@settings(deadline=None)
@given(st.floats(1e-3, 10), st.floats(1e-3, 10), st.integers(1, 500), st.integers(1, 500), st.integers(1, 2000))
def test_an_anneal_is_monotone_and_bounded_by_its_first_and_last_value(
    start: float, end: float, steps: int, cut: int, step: int
) -> None:
    for schedule in (Linear(start, end, steps), LinearThenCut(start, end, steps, cut)):
        low, high = sorted((schedule(1), schedule.last))
        assert low * (1 - 1e-12) <= schedule(step) <= high * (1 + 1e-12)
        assert abs(schedule(step + 1) - end) <= abs(schedule(step) - end) + 1e-12
        assert schedule(2001) == schedule.last == end


def test_the_papers_wsd_rises_over_50_holds_to_500_and_falls_by_a_cosine_to_1000() -> None:
    rate = WarmupStableDecay(50, 450, 500)
    assert [rate(1), rate(25), rate(50)] == [1 / 50, 0.5, 1.0]
    assert [rate(step) for step in (51, 300, 500, 501)] == [1.0] * 4
    assert rate(751) == pytest.approx(0.5)
    assert rate(1000) == pytest.approx(0.5 * (1 + math.cos(math.pi * 499 / 500)))
    assert rate(1001) == rate(5000) == 0.0


def test_a_decay_longer_than_the_run_leaves_half_the_peak_at_its_last_step() -> None:
    """The 700-step run behind the paper's figure 1 passes 50/350/600: the rate is still 50 % when it ends."""
    assert WarmupStableDecay(50, 350, 600)(701) == pytest.approx(0.5)


def test_linear_and_cosine_begin_at_the_peak_without_warm_up_and_share_their_middle() -> None:
    linear, cosine = WarmupLinear(100), WarmupCosine(100)
    assert [linear(1), linear(51), linear(100), linear(101)] == pytest.approx([1.0, 0.5, 0.01, 0.0])
    assert [cosine(1), cosine(51), cosine(101)] == pytest.approx([1.0, 0.5, 0.0])
    assert cosine(26) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert linear(26) == pytest.approx(0.75)
    assert WarmupLinear(110, warmup=10, final=0.1)(61) == pytest.approx(0.55)


@pytest.mark.parametrize(
    "shape", [WarmupConstant(10), WarmupLinear(50, 10), WarmupCosine(50, 10), WarmupStableDecay(10, 20, 20)]
)
def test_no_update_within_the_planned_steps_has_the_rate_zero(shape: RateShape) -> None:
    rates = [shape(step) for step in range(1, 51)]
    assert rates[:10] == [n / 10 for n in range(1, 11)]
    assert all(0 < rate <= 1 for rate in rates)


@pytest.mark.parametrize(
    "shape", [WarmupConstant(10), WarmupLinear(50, 10), WarmupCosine(50, 10), WarmupStableDecay(10, 20, 20)]
)
@pytest.mark.parametrize("steps", [51, 75, 1000])
def test_a_shape_that_is_made_to_last_has_the_same_rates_at_the_same_share_of_the_run(
    shape: RateShape, steps: int
) -> None:
    longer = shape.lasting(steps)
    assert longer(steps) > 0
    if shape.planned is None:
        assert longer == shape
        return
    assert longer.planned == steps
    assert longer(steps + 1) == shape(51) == 0
    for n in range(12, 51):  # after the warm-up, which is rounded
        assert longer(1 + round((n - 1) * steps / 50)) == pytest.approx(shape(n), abs=0.05)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_has_a_learning_rate_to_its_last_step_however_many_are_asked_for(name: str) -> None:
    recipe = find(name)
    for steps in (recipe.steps, 625, 1500, 3 * recipe.steps):
        longer = override(recipe, ["--steps", str(steps)], "tba train")
        assert longer.optimizer.schedule(steps) > 0
        rate = recipe.optimizer.schedule
        assert longer.optimizer.schedule == rate or longer.optimizer.schedule.planned == steps > rate.planned
    planned = recipe.optimizer.schedule.planned
    if planned is not None and recipe.optimizer.schedule(planned + 1) == 0:  # else a share of it is left for longer
        with pytest.raises(UserError, match=r"but the learning rate is 0 after \d+ of them: make the schedule as long"):
            replace(recipe, steps=3 * planned)


def test_a_schedule_that_is_set_by_hand_stays_as_it_is_set_or_is_refused() -> None:
    recipe = find("quickstart")
    own = ["--steps", "1200", "--optimizer.schedule.decay", "920"]
    assert override(recipe, own, "tba train").optimizer.schedule == WarmupStableDecay(20, 260, 920)
    with pytest.raises(UserError, match="is 1200, but the learning rate is 0 after 480 of them"):
        override(recipe, ["--steps=1200", "--optimizer.schedule.decay", "200"], "tba train")
    shorter = override(recipe, ["--steps", "60"], "tba train")
    assert shorter.optimizer.schedule == recipe.optimizer.schedule


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Constant(math.nan), "value is nan"),
        (lambda: Linear(1.0, math.inf, 10), "end is inf"),
        (lambda: Linear(1.0, 0.5, 0), "steps is 0"),
        (lambda: LinearThenCut(1.0, 0.5, 10, 0), "cut_step is 0"),
        (lambda: WarmupConstant(-1), "warmup is -1"),
        (lambda: WarmupLinear(10, warmup=10), "leave none to decay"),
        (lambda: WarmupCosine(10, final=1.5), "final is 1.5"),
        (lambda: WarmupStableDecay(decay=0), "leave none to decay"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(build: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build()


@dataclass(frozen=True)
class _Settings:
    beta: Schedule = Linear(0.012, 0.004, 500)
    rate: RateShape = WarmupConstant()


def test_the_fields_of_a_schedule_are_set_on_the_command_line() -> None:
    made = override(_Settings(), ["--beta.start", "0.014", "--rate.warmup", "5"], "it")
    assert made == _Settings(Linear(0.014, 0.004, 500), WarmupConstant(5))
