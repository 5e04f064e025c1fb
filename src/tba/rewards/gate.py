"""As many calls at once as a server takes: additive increase, multiplicative decrease, as TCP has it.

Invariant: the calls under way are at most the limit at their beginning, and the limit is from 1 to `highest`. It grows
by one after as many successes as it allows calls, unless they became slow; a refusal halves it, once for all calls that
were under way together. Nothing here is drawn at random, and the clock is given.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tba.errors import DeadlineExceeded
from tba.grading import pausing_deadline

_INITIAL_CALLS = 16  # calls at once before anything is known of a server
_SLOWDOWN = 3.0  # times the best mean duration, beyond which more calls at once are no gain
_WINDOWS = 16  # whose best is compared with: a server that became slow for good does not hold the limit down for ever


class Limit:
    """The number of calls that may be under way at once, by how earlier ones went."""

    def __init__(self, highest: int) -> None:
        self.highest = highest
        self.calls = min(_INITIAL_CALLS, highest)
        self.halvings = 0
        self._successes, self._seconds = 0, 0.0  # of the window that is under way
        self._means: deque[float] = deque(maxlen=_WINDOWS)  # seconds of a call, by window

    def record_success(self, seconds: float) -> None:
        """Counts a successful call at the limit; calls below the limit say nothing of a higher one."""
        self._successes += 1
        self._seconds += seconds
        if self._successes < self.calls:
            return
        mean = self._seconds / self._successes
        if mean <= _SLOWDOWN * min(self._means, default=mean):
            self.calls = min(self.highest, self.calls + 1)
        self._means.append(mean)
        self._successes, self._seconds = 0, 0.0

    def record_refusal(self, halvings: int) -> None:
        """Halves the limit for a refused call, unless it has been halved since the call began."""
        if halvings == self.halvings:
            self.halvings += 1
            self.calls = max(1, self.calls // 2)
            self._successes, self._seconds = 0, 0.0


@dataclass
class PendingCall:
    """One call that is under way; its caller sets how it went before it ends."""

    halvings: int  # of the limit, when it began
    seconds: float | None = None  # that it took, if it succeeded
    is_refused: bool = False  # because the server has too much to do
    pause: float = 0.0  # seconds for which the server wants no further call


class Gate:
    """Lets calls through, in the order in which they come."""

    def __init__(self, server: str, highest: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = Limit(highest)
        self.active_calls = 0  # calls under way
        self._server, self._clock = server, clock
        self._opening_time = -math.inf  # when the server takes calls again
        self._lock = threading.Lock()
        self._queue: deque[threading.Condition] = deque()  # who waits, the longest wait at its head

    @contextmanager
    def turn(self, patience: float) -> Iterator[PendingCall]:
        """Waits for a turn, yields its call, and ends it. Raises `DeadlineExceeded` after `patience` seconds."""
        with pausing_deadline():
            call = self.enter(patience)
        try:
            yield call
        finally:
            self.leave(call)

    def enter(self, patience: float) -> PendingCall:
        """Waits for a turn; returns its call, to be ended by `leave`. Raises `DeadlineExceeded` after `patience` s."""
        with self._lock:
            condition = threading.Condition(self._lock)
            self._queue.append(condition)
            deadline = self._clock() + patience
            try:
                while (pause := self._pause(condition)) > 0:
                    remaining = deadline - self._clock()
                    if remaining <= 0:
                        raise DeadlineExceeded(
                            f"waited {patience:g} s for one of the {self.limit.calls} calls at once that "
                            f"{self._server} takes: lower its concurrency, or see why it is slow"
                        )
                    condition.wait(min(pause, remaining))
                self.active_calls += 1
                return PendingCall(self.limit.halvings)
            finally:
                self._queue.remove(condition)
                self._wake()

    def leave(self, call: PendingCall) -> None:
        """Ends a call, and adapts the limit to how it went."""
        with self._lock:
            was_full = self.active_calls >= self.limit.calls
            self.active_calls -= 1
            if call.is_refused:
                self.limit.record_refusal(call.halvings)
            elif call.seconds is not None and was_full:
                self.limit.record_success(call.seconds)
            self._opening_time = max(self._opening_time, self._clock() + call.pause)
            self._wake()

    def _pause(self, condition: threading.Condition) -> float:
        """Returns the seconds until to ask again; 0: the turn has come, infinite: the condition is notified."""
        if self._queue[0] is not condition or self.active_calls >= self.limit.calls:
            return math.inf
        return self._opening_time - self._clock()

    def _wake(self) -> None:
        if self._queue:
            self._queue[0].notify()
