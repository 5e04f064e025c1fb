"""A clock that divides the wall-clock time of a loop among states.

Invariant: at every moment the clock is in exactly one state, so the seconds of all states add up to the time since it
was made. Until `end_warm_up()` all of it is warm-up; shares are of the wall-clock after warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

Searching: TypeAlias = Literal["generating", "environment", "reward", "reference", "weights"]
State: TypeAlias = Literal["warm_up", "busy", "idle", "paced", "eval", "journal"] | Searching
# What a searcher's time goes to, besides evaluating: it generates, or stands still for what is named.
SEARCHER_STATES: Mapping[str, tuple[State, ...]] = {
    **{name: (name,) for name in get_args(Searching)},
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
        """Inside, time counts as `name`; afterwards as what it was before. States may be nested: the inner counts."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    @property
    def current_state(self) -> State:
        """The state that it is in."""
        return self._state

    def reclassify(self, name: State) -> None:
        """From here on time counts as `name`: for a wait whose reason changes while it lasts."""
        self._switch(name)

    def end_warm_up(self) -> None:
        """From here on time counts as the state it is in. Further calls change nothing."""
        self._add_elapsed()
        self._is_warming_up = False

    def carry(self, seconds: Mapping[State, float]) -> None:
        """Add the seconds of an earlier clock of the same loop, which this one continues."""
        for name, spent in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    @property
    def is_warming_up(self) -> bool:
        return self._is_warming_up

    def seconds(self) -> dict[State, float]:
        """Seconds in each state that was entered, up to now."""
        self._add_elapsed()
        return dict(self._seconds)

    def share(self, name: State) -> float:
        """The share of `name` in the wall-clock after warm-up, 0..1."""
        return combined_share([self.seconds()], name)

    def _switch(self, name: State) -> State:
        self._add_elapsed()
        previous, self._state = self._state, name
        return previous

    def _add_elapsed(self) -> None:
        """Add the time since the last call to the present state."""
        now = self._now()
        name: State = "warm_up" if self._is_warming_up else self._state
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._counted_until
        self._counted_until = now


def combined_share(clocks: Iterable[Mapping[State, float]], name: State) -> float:
    """The share of `name` in the wall-clock after warm-up of several loops together (their `seconds()`), 0..1."""
    state_seconds = total_seconds = 0.0
    for seconds in clocks:
        state_seconds += seconds.get(name, 0.0)
        total_seconds += sum(v for state, v in seconds.items() if state != "warm_up")
    return state_seconds / total_seconds if total_seconds > 0 else 0.0
