"""Pacing: when each side may go on, that the balance stays in its band, and that neither side can starve the other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.errors import UserError
from tba.replay.pacing import Pacing

TWO = Pacing(warm_up=100, samples_per_insert=2.0, saved_batches=3.0)  # batches of 10 below


def test_by_default_only_warm_up_and_the_bound_on_reuse_hold_the_trainer_and_nothing_the_searchers() -> None:
    default = Pacing(warm_up=100)
    assert default.hold_reason(99, 0, 10) == "warm_up"
    assert default.hold_reason(100, 0, 10) is None
    assert default.hold_reason(100, 790, 10) is None
    assert default.hold_reason(100, 791, 10) == "paced"
    assert default.searcher_limit(0, 10, 2) is None


def test_the_trainer_is_held_when_it_would_be_more_than_the_band_ahead() -> None:
    assert TWO.hold_reason(100, 20, 10) is None  # 2 (100 - 100) - 20 - 10 = -30, three batches
    assert TWO.hold_reason(100, 21, 10) == "paced"
    assert TWO.hold_reason(110, 41, 10) == "paced"
    assert TWO.hold_reason(111, 41, 10) is None
    assert replace(TWO, throttled_side="searchers").hold_reason(100, 41, 10) is None


def test_searchers_ease_off_when_they_are_more_than_the_band_and_the_updates_to_come_ahead() -> None:
    assert TWO.searcher_limit(0, 10, 0) == 100 + 15  # 2 (115 - 100) - 0 = 30, three batches
    assert TWO.searcher_limit(0, 10, 4) == 100 + 35
    assert TWO.searcher_limit(21, 10, 0) == 100 + 26
    assert replace(TWO, throttled_side="trainer").searcher_limit(0, 10, 4) is None


@given(
    st.floats(0.1, 8.0),
    st.floats(1.0, 20.0),
    st.integers(0, 300),
    st.integers(1, 30),
    st.integers(1, 200),
    st.integers(0, 5000),
)
def test_a_trainer_that_has_all_that_searchers_may_send_before_the_next_sync_is_never_held(
    uses: float, saved_batches: float, warm_up: int, k: int, batch: int, trained: int
) -> None:
    pacing = Pacing(warm_up=warm_up, samples_per_insert=uses, saved_batches=saved_batches)
    wanted = pacing.searcher_limit(trained, batch, k)
    assert wanted is not None
    assert [pacing.hold_reason(wanted, trained + j * batch, batch) for j in range(k)] == [None] * k


@pytest.mark.parametrize(("rounds", "more"), [(140, 8), (280, 16), (1400, 80), (20, 8)])
def test_when_nothing_comes_any_longer_8_batches_are_taken_or_8_uses_of_the_newest_whatever_was_saved(
    rounds: int, more: int
) -> None:
    pacing, trained, lost = Pacing(warm_up=0), 0, 0.0
    received = 100 * rounds
    while received < 200 * rounds:  # one use of each: 7 of 8 are not made use of
        received += rounds
        lost = pacing.forfeit(received, trained, 140, rounds, lost)
        trained += rounds
    lost = pacing.forfeit(received + rounds, trained, 140, rounds, lost)
    taken = 0
    while pacing.hold_reason(received + rounds, trained + 140 * taken, 140, lost) is None:
        taken += 1
    assert taken == more
    assert pacing.hold_reason(received + rounds, trained, 140) is None  # without a loss it would go on and on
    assert pacing.hold_reason(received + rounds, trained + 140 * 100, 140) is None


def test_data_that_came_all_at_once_can_be_used_as_often_as_the_bound_says_and_without_one_nothing_is_lost() -> None:
    assert Pacing().forfeit(10_000, 0, 140, 10_000) == 0.0
    assert Pacing().forfeit(10_000, 70_000, 140, 10_000) == 0.0
    assert Pacing(max_mean_uses=math.inf).forfeit(10_000, 0, 140, 1) == 0.0


def test_nothing_is_lost_where_searchers_ease_off_for_they_would_wait_for_a_trainer_that_is_held() -> None:
    """1,000 are more than they may be ahead by; the trainer has to take some before they go on."""
    assert TWO.searcher_limit(0, 10, 2) == 100 + 25
    assert TWO.forfeit(1100, 0, 10, 10) == replace(TWO, throttled_side="searchers").forfeit(1100, 0, 10, 10) == 0.0
    assert replace(TWO, throttled_side="trainer").forfeit(1100, 0, 10, 10) == 1100 - 10  # left: 8 uses of the newest 10


@given(st.floats(0.1, 20.0), st.integers(1, 300), st.integers(1, 200), st.lists(st.booleans(), max_size=60))
def test_a_trainer_that_is_held_is_let_go_by_new_arrivals_however_few_come_at_a_time(
    uses: float, each: int, batch: int, turns: list[bool]
) -> None:
    pacing = Pacing(warm_up=0, max_mean_uses=uses)
    received = trained = 0
    lost = 0.0
    for arrives in turns:
        if arrives:
            received += each
            lost = pacing.forfeit(received, trained, batch, each, lost)
        elif pacing.hold_reason(received, trained, batch, lost) is None:
            trained += batch
        assert trained <= uses * received + 1e-6
    needed = math.ceil(batch / (uses * each)) + 1
    for _ in range(needed):
        received += each
        lost = pacing.forfeit(received, trained, batch, each, lost)
    assert pacing.hold_reason(received, trained, batch, lost) is None


@given(st.lists(st.booleans(), max_size=400), st.sampled_from([0.5, 1.0, 2.5]), st.integers(1, 12))
def test_whoever_is_faster_the_balance_stays_in_its_band(turns: list[bool], uses: float, per_round: int) -> None:
    pacing = Pacing(warm_up=20, samples_per_insert=uses, saved_batches=2.0)
    received = trained = 0
    for trainers in turns:
        wanted = pacing.searcher_limit(trained, 10, 0)
        assert wanted is not None
        if trainers and pacing.hold_reason(received, trained, 10) is None:
            trained += 10
        elif not trainers and received < wanted:
            received += per_round
        balance = uses * (received - 20) - trained
        assert balance >= -2.0 * 10 - 1e-9 or received < 20
        assert balance <= 2.0 * 10 + uses * (per_round + 1) + 1e-9  # a round that was begun is finished


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"samples_per_insert": 0.0}, "--replay.pacing.samples-per-insert is 0.0"),
        ({"samples_per_insert": 9.0}, "give a positive number up to --replay.pacing.max-mean-uses, 8.0"),
        ({"saved_batches": 0.5}, "--replay.pacing.saved-batches is 0.5: give 1 batch or more"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Pacing(**settings)
