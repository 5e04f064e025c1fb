"""Writes a searcher's rounds to the journal while the next ones are made."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tba.clock import ShareClock
from tba.errors import DeadlineExceeded
from tba.protocols import Journal

T = TypeVar("T")

# methods that are independent of what is being written
_INDEPENDENT_METHODS = ("claim", "finish", "count", "unscored", "put_scores")


class BackgroundJournal:
    """A `Journal` in front of another one: a thread writes each round in the background while the next one is made.

    Invariant: what is put is written in order, one round at a time, and counts as acknowledged once the journal has it.
    Until then its prompts stay leased: a searcher that dies loses at most the round that was being written and the one
    that it was making, and their prompts are handed out again. What fails in the thread is raised by the next call that
    has to come after it, at the latest by `close`.

    deadline_s: how long a call may wait for those before it; more than the journal itself waits for its lock.
    clock: counts the time that calls wait as `journal`.
    """

    def __init__(self, journal: Journal, deadline_s: float, clock: ShareClock) -> None:
        self._journal = journal
        self._deadline_s = deadline_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "journal")
        self._pending_write: Future[None] | None = None
        self._pending_lease: Future[list[int]] | None = None
        self._leased_at = 0.0  # by a monotonic clock
        self._spare_positions: list[int] = []  # leased positions that are not handed out yet, oldest first

    def __getattr__(self, name: str) -> Any:
        """Returns the journal's method of this name; most wait for the round that is being written, to see it."""
        method = getattr(self._journal, name)
        return method if name in _INDEPENDENT_METHODS else partial(self._after, method)

    def put(self, *arguments: Any, **keywords: Any) -> None:
        """Write a round in the background, once the round before is on disk. Raises the error of that one."""
        self._await_write()
        self._pending_write = self._thread.submit(self._journal.put, *arguments, **keywords)

    def lease(self, count: int, seconds: float) -> list[int]:
        """Lease prompts as the journal does. As many again are leased in the background, for the next call."""
        if time.monotonic() - self._leased_at > seconds / 2:  # the leases may run out before their prompts are answered
            self._pending_lease, self._spare_positions = None, []
        while len(self._spare_positions) < count:
            positions = self._result_of(self._pending_lease or self._lease(count, seconds))
            self._spare_positions += positions
            self._pending_lease = None
        if self._pending_lease is None:
            self._pending_lease = self._lease(count, seconds)
        positions, self._spare_positions = self._spare_positions[:count], self._spare_positions[count:]
        return positions

    def _lease(self, count: int, seconds: float) -> Future[list[int]]:
        self._leased_at = time.monotonic()
        return self._thread.submit(self._journal.lease, count, seconds)

    def resume(self) -> None:
        """Release all leases, also those taken ahead, once all rounds are written."""
        self._after(self._journal.resume)
        self._pending_lease, self._spare_positions = None, []

    def close(self) -> None:
        """Close once all rounds are on disk. Raises, after closing, the error of a round that could not be written."""
        try:
            self._await_write()
        finally:
            self._thread.shutdown(cancel_futures=True)
            self._journal.close()

    def _after(self, method: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        self._await_write()
        return self._result_of(self._thread.submit(method, *arguments, **keywords))

    def _await_write(self) -> None:
        pending_write, self._pending_write = self._pending_write, None
        if pending_write is not None:
            self._result_of(pending_write)

    def _result_of(self, future: Future[T]) -> T:
        if future.done():
            return future.result()
        with self._clock.state("journal"):
            try:
                return future.result(self._deadline_s)
            except TimeoutError as error:
                if future.done():  # the call's own error, not this wait's
                    raise
                raise DeadlineExceeded(
                    f"the journal had not written a searcher's trajectories after {self._deadline_s:g} s"
                ) from error
