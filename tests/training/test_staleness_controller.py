"""The controller: what it makes of given signals, that it stays within bounds, and that it can be taken up again."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.errors import UserError
from tba.training.staleness_controller import Control, Controller

ESS = Control("ess", lower_bound=0.5, upper_bound=0.9, every=2, most_sync_every=8, least_m=0.7)


def steered(
    controller: Controller, values: list[float], signal: str = "ess", first: int = 1
) -> list[tuple[int, int, float]]:
    """(step, k, m) of each change that these values lead to, one value a step."""
    changes = [controller.observe(first + i, {signal: value}) for i, value in enumerate(values)]
    return [(c.step, c.sync_every, c.m) for c in changes if c is not None]


def test_a_stale_window_halves_k_and_raises_m_and_the_window_after_it_is_not_judged() -> None:
    controller = ESS.start(sync_every=6, m=0.75)
    assert steered(controller, [0.4, 0.5] * 5) == [(2, 3, 0.85), (6, 1, 0.95), (10, 1, 1.0)]
    assert [c.value for c in controller.changes] == pytest.approx([0.45] * 3)
    assert steered(controller, [0.1] * 40) == []  # at its bounds


def test_three_fresh_windows_in_a_row_double_k_and_lower_m() -> None:
    controller = ESS.start(3, 0.95)
    assert steered(controller, [0.95] * 14) == [(6, 6, 0.85), (14, 8, 0.75)]
    assert steered(controller, [0.95] * 8) == [(8, 8, 0.7)]  # after one that is not judged
    assert steered(controller, [1.0] * 40) == []


def test_a_window_within_the_range_changes_nothing_and_ends_a_row_of_fresh_ones() -> None:
    controller = ESS.start(4, 0.95)
    assert steered(controller, [0.7] * 50) == []
    assert steered(controller, ([0.95] * 4 + [0.6] * 2) * 10) == []


def test_a_signal_that_rises_with_staleness_is_kept_below_its_high_end() -> None:
    lag = Control("lag", lower_bound=4.0, upper_bound=10.0, every=1)
    assert steered(lag.start(8, 0.95), [11.0, 99.0, 12.0], "lag") == [(1, 4, 1.0), (3, 2, 1.0)]
    assert steered(lag.start(8, 0.95), [3.0] * 3, "lag") == [(3, 16, 0.85)]


def test_steps_without_a_finite_signal_do_not_count_and_a_window_of_them_decides_nothing() -> None:
    controller = ESS.start(2, 0.95)
    assert steered(controller, [math.nan] * 10) == []
    assert [controller.observe(step, {}) for step in range(10)] == [None] * 10
    assert steered(controller, [math.nan, 0.4]) == [(2, 1, 1.0)]


def test_off_it_does_nothing_whatever_it_is_shown() -> None:
    controller = Control().start(100, 0.0)
    assert steered(controller, [0.0, 1.0] * 20) == []
    assert (controller.on, controller.sync_every, controller.m) == (False, 100, 0.0)


SIGNALS = st.lists(st.floats(0.0, 1.0) | st.just(math.nan), max_size=200)


@given(SIGNALS, st.integers(1, 8), st.floats(0.7, 1.0))
def test_k_and_m_stay_within_their_bounds_and_every_change_is_a_change(values: list[float], k: int, m: float) -> None:
    controller = ESS.start(k, m)
    steered(controller, values)
    settings = [(k, m), *((c.sync_every, c.m) for c in controller.changes)]
    assert all(1 <= k <= 8 and 0.7 <= m <= 1.0 for k, m in settings)
    assert all(before != after for before, after in itertools.pairwise(settings))
    steps = [c.step for c in controller.changes]
    assert all(later - earlier >= 2 * ESS.every for earlier, later in itertools.pairwise(steps))


@given(SIGNALS, st.integers(0, 200))
def test_one_that_goes_on_from_its_state_does_what_it_would_have_done(values: list[float], cut: int) -> None:
    whole, first_controller, second = (ESS.start(4, 0.95) for _ in range(3))
    steered(whole, values)
    steered(first_controller, values[:cut])
    second.restore(json.loads(json.dumps(first_controller.state())))
    steered(second, values[cut:], first=1 + len(values[:cut]))
    assert second.changes == whole.changes
    assert second.state() == whole.state()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"lower_bound": 0.9, "upper_bound": 0.9},
            "--control.lower-bound is 0.9 and --control.upper-bound 0.9: give a range",
        ),
        ({"every": 0}, "--control.every is 0: give a number of updates, 1 or more"),
        ({"most_sync_every": 0}, "--control.most-sync-every is 0"),
        ({"least_m": 1.5}, "--control.least-m is 1.5, it is a probability"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Control("ess", **settings)


def test_a_recipe_that_begins_out_of_bounds_is_refused() -> None:
    with pytest.raises(UserError, match=r"--sync-every is 9, above --control\.most-sync-every 8"):
        ESS.start(9, 0.95)
    with pytest.raises(UserError, match=r"--replay\.selection\.m is 0\.5, below --control\.least-m 0\.7"):
        ESS.start(2, 0.5)
