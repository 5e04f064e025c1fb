"""Exploration is behaviour: it is drawn, recorded, and then plays no part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tba.batch import collate
from tba.errors import UserError
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.rollout.exploration import Fixed, RandomPerRound
from tba.schedules import Constant
from tba.types import Group, Sampling
from toy.engine import sample_groups, tabular_prompts
from toy.policy import TabularPolicy, TabularTask

RNG = np.random.default_rng


def test_fixed_is_the_same_in_every_round() -> None:
    rng = RNG(0)
    assert {Fixed(0.8, 0.9).draw(rng) for _ in range(20)} == {Sampling(0.8, 0.9)}


def test_random_settings_are_drawn_as_often_and_as_widely_as_said() -> None:
    exploration, n = RandomPerRound(1.0, 0.3, 0.7, 1.1, 0.4, 0.6), 4000
    rng = RNG(0)
    draws = [exploration.draw(rng) for _ in range(n)]
    warm = np.array([d.temperature for d in draws if d.temperature != 1.0])
    nucleus = np.array([d.top_p for d in draws if d.top_p < 1])
    deviation = 4 * (0.25 / n) ** 0.5  # four standard deviations of a share
    assert abs(len(warm) / n - 0.3) < deviation
    assert abs(len(nucleus) / n - 0.4) < deviation
    for values, low, high in ((warm, 0.7, 1.1), (nucleus, 0.6, 1.0)):
        assert low <= values.min() < low + 0.01
        assert high - 0.01 < values.max() <= high
        assert abs(values.mean() - (low + high) / 2) < 4 * (high - low) / (12 * len(values)) ** 0.5


def test_one_setting_does_not_shift_what_is_drawn_for_the_other() -> None:
    without, given = RNG(3), RNG(3)
    alone = [RandomPerRound(p_temperature=0.5, p_top_p=0.0).draw(without).temperature for _ in range(50)]
    both = [RandomPerRound(p_temperature=0.5, p_top_p=0.5).draw(given).temperature for _ in range(50)]
    assert alone == both


def test_what_is_said_to_have_no_effect_changes_no_draw() -> None:
    never = RandomPerRound(temperature=0.8, p_temperature=0, p_top_p=0)
    assert set(never.unused) == {"temperature_low", "temperature_high", "top_p_low"}
    assert RandomPerRound().unused == {}
    other = replace(never, temperature_low=0.1, temperature_high=9.0, top_p_low=0.2)
    draws = [[e.draw(np.random.default_rng(seed)) for seed in range(200)] for e in (never, other)]
    assert draws[0] == draws[1] == [Sampling(0.8, 1.0)] * 200


@pytest.mark.parametrize(
    ("exploration", "greedy"),
    [
        (Fixed(), False),
        (Fixed(0.0), True),
        (RandomPerRound(), False),
        (RandomPerRound(temperature=0.0), True),
        (RandomPerRound(temperature=0.0, p_temperature=1.0), False),
        (RandomPerRound(p_temperature=0.5, temperature_low=0.0, temperature_high=0.0), True),
    ],
)
def test_exploration_knows_whether_a_round_can_be_greedy(exploration: Fixed | RandomPerRound, greedy: bool) -> None:
    rng = RNG(0)
    assert exploration.greedy == greedy == any(exploration.draw(rng).temperature == 0 for _ in range(200))


@pytest.mark.parametrize(
    ("exploration", "full"),
    [
        (Fixed(), True),
        (Fixed(0.5), True),
        (Fixed(0.0), False),
        (Fixed(1.0, 0.99), False),
        (Fixed(top_k=50), False),
        (Fixed(min_p=0.01), False),
        (Fixed(repetition_penalty=1.2), True),
        (RandomPerRound(), True),
        (RandomPerRound(p_top_p=1.0), False),
        (RandomPerRound(p_top_p=1.0, top_p_low=1.0), True),
        (RandomPerRound(temperature=0.0), True),  # three rounds in ten are warm
        (RandomPerRound(temperature=0.0, p_temperature=0.0), False),
        (RandomPerRound(temperature=1.0, p_temperature=1.0, temperature_low=0.0, temperature_high=0.0), False),
    ],
)
def test_support_is_full_if_some_round_can_draw_every_answer(exploration: Fixed | RandomPerRound, full: bool) -> None:
    rng = RNG(0)
    assert exploration.full_support is full
    assert any(exploration.draw(rng).full_support for _ in range(200)) is full


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0},
        {"temperature_low": 1.2},
        {"top_p_low": 0.0},
        {"p_top_p": 1.5},
        {"p_temperature": -0.1},
    ],
)
def test_settings_out_of_range_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UserError):
        RandomPerRound(**fields)
    for name, value in {"top_p": 0.0, "top_k": -1, "min_p": 1.5, "repetition_penalty": 0.0}.items():
        with pytest.raises(UserError, match=f"{name} .*{value}"):
            Fixed(**{name: value})


def test_the_temperature_of_most_rounds_may_lie_outside_the_range_of_the_others() -> None:
    assert RandomPerRound(temperature=1.5, p_temperature=0.0).draw(RNG(0)).temperature == 1.5


def test_trajectory_balance_does_not_know_how_an_answer_was_sampled() -> None:
    task = TabularTask()
    groups = sample_groups(task, tabular_prompts(task), 12, Sampling(1.6, 0.8), RNG(1))
    disguised = [
        Group.of(
            [
                replace(
                    t,
                    completion=replace(
                        t.completion,
                        sampling=Sampling(0.3),
                        log_behavior=np.full(t.length, -77.0, dtype=np.float32),
                    ),
                )
                for t in group.trajectories
            ]
        )
        for group in groups
    ]
    policy = TabularPolicy(task, 0.7)
    losses = []
    for some in (groups, disguised):
        batch = collate(some)
        losses.append(TrajectoryBalance(Constant(0.5), off_policy="none")(policy.evaluate(batch), batch, 1)[0].item())
    assert losses[0] == losses[1] > 0
