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

_START = 16  # calls at once before anything is known of a server
_SLOWER = 3.0  # times the best mean duration, beyond which more calls at once are no gain
_WINDOWS = 16  # whose best is compared with: a server that became slow for good does not hold the limit down for ever


class Limit:
    """How many calls may be under way at once."""

    def __init__(self, highest: int) -> None:
        self.highest = highest
        self.calls = min(_START, highest)
        self.halvings = 0
        self._successes, self._seconds = 0, 0.0  # of the window that is under way
        self._means: deque[float] = deque(maxlen=_WINDOWS)  # seconds of a call, by window

    def succeeded(self, seconds: float) -> None:
        """Counts a call that took so long while the limit was reached; others say nothing of a higher one."""
        self._successes += 1
        self._seconds += seconds
        if self._successes < self.calls:
            return
        mean = self._seconds / self._successes
        if mean <= _SLOWER * min(self._means, default=mean):
            self.calls = min(self.highest, self.calls + 1)
        self._means.append(mean)
        self._successes, self._seconds = 0, 0.0

    def refused(self, halvings: int) -> None:
        """Halves the limit for a refused call, unless it has been halved since that began."""
        if halvings == self.halvings:
            self.halvings += 1
            self.calls = max(1, self.calls // 2)
            self._successes, self._seconds = 0, 0.0


@dataclass
class Turn:
    """One call that is under way, and what its caller says of it before it ends."""

    halvings: int  # of the limit, when it began
    seconds: float | None = None  # that it took, if it succeeded
    refused: bool = False  # because the server has too much to do
    pause: float = 0.0  # seconds for which the server wants no further call


class Gate:
    """Lets calls through, in the order in which they come."""

    def __init__(self, called: str, highest: int, now: Callable[[], float] = time.monotonic) -> None:
        self.limit = Limit(highest)
        self.busy = 0  # calls under way
        self._called, self._now = called, now
        self._opens = -math.inf  # when the server takes calls again
        self._lock = threading.Lock()
        self._queue: deque[threading.Condition] = deque()  # who waits, the longest wait at its head

    @contextmanager
    def turn(self, patience: float) -> Iterator[Turn]:
        """Waits for a turn, and ends it. Raises `DeadlineExceeded` after `patience` seconds."""
        with pausing_deadline():
            turn = self.enter(patience)
        try:
            yield turn
        finally:
            self.leave(turn)

    def enter(self, patience: float) -> Turn:
        """Returns a turn, which has to `leave`. Raises `DeadlineExceeded` after `patience` seconds."""
        with self._lock:
            waiting = threading.Condition(self._lock)
            self._queue.append(waiting)
            expires = self._now() + patience
            try:
                while (pause := self._pause(waiting)) > 0:
                    remaining = expires - self._now()
                    if remaining <= 0:
                        raise DeadlineExceeded(
                            f"waited {patience:g} s for one of the {self.limit.calls} calls at once that "
                            f"{self._called} takes: lower its concurrency, or see why it is slow"
                        )
                    waiting.wait(min(pause, remaining))
                self.busy += 1
                return Turn(self.limit.halvings)
            finally:
                self._queue.remove(waiting)
                self._wake()

    def leave(self, turn: Turn) -> None:
        """Ends a turn, and learns from it."""
        with self._lock:
            full = self.busy >= self.limit.calls
            self.busy -= 1
            if turn.refused:
                self.limit.refused(turn.halvings)
            elif turn.seconds is not None and full:
                self.limit.succeeded(turn.seconds)
            self._opens = max(self._opens, self._now() + turn.pause)
            self._wake()

    def _pause(self, waiting: threading.Condition) -> float:
        """Returns the seconds after which to look again; 0: it is its turn, infinite: it will be called."""
        if self._queue[0] is not waiting or self.busy >= self.limit.calls:
            return math.inf
        return self._opens - self._now()

    def _wake(self) -> None:
        if self._queue:
            self._queue[0].notify()
