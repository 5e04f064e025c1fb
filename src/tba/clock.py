"""A clock that divides the wall-clock time of a loop among states.

Invariant: at every moment the clock is in exactly one state, so the seconds of all states add up to the time since it
was made. Until `end_warm_up()` all of it is warm-up; shares are of the wall-clock after warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

SearchState: TypeAlias = Literal["generating", "environment", "reward", "reference", "weights"]
State: TypeAlias = Literal["warm_up", "busy", "idle", "paced", "eval", "journal"] | SearchState
# The states of a searcher besides evaluating: it generates, or waits for what the key names.
SEARCHER_STATES: Mapping[str, tuple[State, ...]] = {
    **{name: (name,) for name in get_args(SearchState)},
    "waiting": ("paced", "journal"),
}


class ShareClock:
    """Divides the wall-clock time of one loop among states, from `state` on. `now` gives seconds and is monotone."""

    def __init__(
        self, is_warming_up: bool = False, now: Callable[[], float] = time.perf_counter, state: State = "busy"
    ) -> None:
        self._now = now
        self._is_warming_up = is_warming_up
        self._state = state
        self._counted_until = now()
        self._seconds: dict[State, float] = {}

    @contextmanager
    def state(self, name: State) -> Iterator[None]:
        """Counts time inside the context as `name`, and afterwards as before. Of nested states the inner one counts."""
        outer_state = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer_state)

    @property
    def current_state(self) -> State:
        """Returns the state that time counts as now."""
        return self._state

    def reclassify(self, name: State) -> None:
        """Counts time from here on as `name`, for a wait whose reason changes while it lasts."""
        self._switch(name)

    def end_warm_up(self) -> None:
        """Counts time from here on as the current state instead of warm-up. Further calls change nothing."""
        self._add_elapsed()
        self._is_warming_up = False

    def carry(self, seconds: Mapping[State, float]) -> None:
        """Add the seconds of an earlier clock of the same loop, which this one continues."""
        for name, state_seconds in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + state_seconds

    @property
    def is_warming_up(self) -> bool:
        return self._is_warming_up

    def seconds(self) -> dict[State, float]:
        """Returns the seconds in each state that was entered, up to now."""
        self._add_elapsed()
        return dict(self._seconds)

    def share(self, name: State) -> float:
        """Returns the share of `name` in the wall-clock after warm-up, 0..1."""
        return combined_share([self.seconds()], name)

    def _switch(self, name: State) -> State:
        self._add_elapsed()
        previous_state, self._state = self._state, name
        return previous_state

    def _add_elapsed(self) -> None:
        """Adds the time since the last call to the current state."""
        now = self._now()
        name: State = "warm_up" if self._is_warming_up else self._state
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._counted_until
        self._counted_until = now


def combined_share(clocks: Iterable[Mapping[State, float]], name: State) -> float:
    """Returns the share (0..1) of a state in the wall-clock after warm-up of several loops, given their `seconds()`."""
    state_seconds = total_seconds = 0.0
    for seconds in clocks:
        state_seconds += seconds.get(name, 0.0)
        total_seconds += sum(v for state, v in seconds.items() if state != "warm_up")
    return state_seconds / total_seconds if total_seconds > 0 else 0.0
