"""The controller: what it makes of given signals, that it stays within bounds, and that it can be taken up again."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.errors import UserError
from tba.train.control import WIDEST, Control, Controller

ESS = Control("ess", low=0.5, high=0.9, every=2, most_sync_every=8, least_m=0.7)


def steered(
    controller: Controller, values: list[float], signal: str = "ess", first: int = 1
) -> list[tuple[int, int, float]]:
    """(step, k, m) of each change that these values lead to, one value a step."""
    changes = [controller.observe(first + i, {signal: value}) for i, value in enumerate(values)]
    return [(c.step, c.sync_every, c.m) for c in changes if c is not None]


def test_a_stale_window_halves_k_and_raises_m_and_the_window_after_it_is_not_judged() -> None:
    controller = ESS.start(sync_every=6, m=0.75, window=12)
    assert steered(controller, [0.4, 0.5] * 5) == [(2, 3, 0.85), (6, 1, 0.95), (10, 1, 1.0)]
    assert [c.value for c in controller.changes] == pytest.approx([0.45] * 3)
    assert steered(controller, [0.1] * 40) == []  # at its bounds


def test_three_fresh_windows_in_a_row_double_k_and_lower_m() -> None:
    controller = ESS.start(3, 0.95, 6)
    assert steered(controller, [0.95] * 14) == [(6, 6, 0.85), (14, 8, 0.75)]
    assert steered(controller, [0.95] * 8) == [(8, 8, 0.7)]  # after one that is not judged
    assert steered(controller, [1.0] * 40) == []


def test_a_window_within_the_range_changes_nothing_and_ends_a_row_of_fresh_ones() -> None:
    controller = ESS.start(4, 0.95, 8)
    assert steered(controller, [0.7] * 50) == []
    assert steered(controller, ([0.95] * 4 + [0.6] * 2) * 10) == []


def test_a_signal_that_rises_with_staleness_is_kept_below_its_high_end() -> None:
    lag = Control("lag", low=4.0, high=10.0, every=1)
    assert steered(lag.start(8, 0.95, 16), [11.0, 99.0, 12.0], "lag") == [(1, 4, 1.0), (3, 2, 1.0)]
    assert steered(lag.start(8, 0.95, 16), [3.0] * 3, "lag") == [(3, 16, 0.85)]


def test_steps_without_a_finite_signal_do_not_count_and_a_window_of_them_decides_nothing() -> None:
    controller = ESS.start(2, 0.95, 4)
    assert steered(controller, [math.nan] * 10) == []
    assert [controller.observe(step, {}) for step in range(10)] == [None] * 10
    assert steered(controller, [math.nan, 0.4]) == [(2, 1, 1.0)]


def drawn(recent: int, missed: int, ess: float) -> dict[str, float]:
    return {"ess": ess, "groups_recent": float(recent), "groups_recent_shortfall": float(missed)}


def test_a_stale_span_narrows_the_recent_window_with_k_and_widens_it_where_recent_data_were_short() -> None:
    controller = replace(ESS, every=1).start(sync_every=4, m=0.7, window=8)
    shown = [
        drawn(10, 0, 0.1),  # none missed: as k halves, to 4
        drawn(20, 0, 0.1),
        drawn(29, 1, 0.1),  # one in ten missed is not short: 2k = 2
        drawn(29, 11, 0.1),
        drawn(31, 19, 0.1),  # eight in ten
        drawn(31, 29, 0.1),
        drawn(31, 39, 0.1),
    ]
    windows = [c.recent_window for i, metrics in enumerate(shown) if (c := controller.observe(i, metrics))]
    assert windows == [4, 2, 4, 8]
    for i in range(40):
        controller.observe(10 + i, drawn(31, 49 + i, 0.1))
    assert (controller.sync_every, controller.m, controller.recent_window) == (1, 1.0, WIDEST)


def test_off_it_does_nothing_whatever_it_is_shown() -> None:
    controller = Control().start(100, 0.0, 200)
    assert steered(controller, [0.0, 1.0] * 20) == []
    assert (controller.on, controller.sync_every, controller.m) == (False, 100, 0.0)


SIGNALS = st.lists(st.floats(0.0, 1.0) | st.just(math.nan), max_size=200)


@given(SIGNALS, st.integers(1, 8), st.floats(0.7, 1.0))
def test_k_and_m_stay_within_their_bounds_and_every_change_is_a_change(values: list[float], k: int, m: float) -> None:
    controller = ESS.start(k, m, 2 * k)
    steered(controller, values)
    held = [(k, m, 2 * k), *((c.sync_every, c.m, c.recent_window) for c in controller.changes)]
    assert all(1 <= k <= 8 and 0.7 <= m <= 1.0 and 2 * k <= window <= 16 for k, m, window in held)
    assert all(before != after for before, after in itertools.pairwise(held))
    steps = [c.step for c in controller.changes]
    assert all(later - earlier >= 2 * ESS.every for earlier, later in itertools.pairwise(steps))


@given(SIGNALS, st.integers(0, 200))
def test_one_that_goes_on_from_its_state_does_what_it_would_have_done(values: list[float], cut: int) -> None:
    whole, first, second = (ESS.start(4, 0.95, 8) for _ in range(3))
    steered(whole, values)
    steered(first, values[:cut])
    second.restore(json.loads(json.dumps(first.state())))
    steered(second, values[cut:], first=1 + len(values[:cut]))
    assert second.changes == whole.changes
    assert second.state() == whole.state()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"low": 0.9, "high": 0.9}, "--control.low is 0.9 and --control.high 0.9: give a range"),
        ({"every": 0}, "--control.every is 0: give a number of updates, 1 or more"),
        ({"most_sync_every": 0}, "--control.most-sync-every is 0"),
        ({"least_m": 1.5}, "--control.least-m is 1.5, it is a probability"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Control("ess", **settings)  # type: ignore[arg-type]


def test_a_recipe_that_begins_out_of_bounds_is_refused() -> None:
    with pytest.raises(UserError, match=r"--sync-every is 9, above --control\.most-sync-every 8"):
        ESS.start(9, 0.95, 18)
    with pytest.raises(UserError, match=r"--replay\.selection\.m is 0\.5, below --control\.least-m 0\.7"):
        ESS.start(2, 0.5, 4)
