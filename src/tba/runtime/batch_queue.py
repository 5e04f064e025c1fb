"""The queue of batches between replay and the trainer: the one thing that a trainer waits for.

It consumes trajectories, through replay. It waits, with a deadline, until a batch can be drawn from replay
(`Replay.ready` says why not: warm-up, empty, paced, unscored). New trajectories unblock it: those of another process,
or, where searcher and trainer take turns in one process, those of a round that `fill` makes.

Invariant: at most one batch is drawn ahead, in one thread, while the one before it is trained on; so a batch is at most
one update older than one that is drawn on demand. Every batch was scored under the reference that is current when it is
handed out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from tba.batch import FetchedBatch, collate
from tba.clock import ShareClock
from tba.errors import DeadlineExceeded, UserError
from tba.replay.replay import NotReady, Replay
from tba.types import Version

_POLL = 0.004  # seconds between two polls of the journal while there is no batch
_LOOK = 0.02  # seconds between two checks of why there is none
_WHY: dict[NotReady, str] = {  # explains a reason that lies in replay itself, not with the searchers
    "paced": "; those that came have been used as often as --replay.pacing.max-mean-uses or samples-per-insert allows",
}


class Stopped(Exception):
    """Raised when a stop was requested while waiting for a batch."""


def pause() -> None:
    """Sleep briefly: there is no batch, and other processes bring one."""
    time.sleep(_POLL)


def nothing_more() -> None:
    """Raise `UserError`: there is no batch, and nobody will bring one."""
    raise UserError(
        "--offline there is no further batch to learn from, and no searcher brings one: set --replay.pacing."
        "max-mean-uses higher, import more, or train with searchers"
    )


class BatchQueue:
    """Batches of B prompts with K trajectories each.

    deadline: seconds that a batch may take. fill: what to do while there is none. ahead: draw the next batch in the
    background while this one is trained on. clock: the trainer's; waiting counts there as idle or paced.
    """

    def __init__(
        self,
        replay: Replay,
        groups_per_step: int,
        group_size: int,
        *,
        clock: ShareClock,
        stop: Callable[[], bool],
        deadline: float,
        fill: Callable[[], object] = pause,
        ahead: bool = False,
    ) -> None:
        self._replay = replay
        self._groups_per_step = groups_per_step
        self._group_size = group_size
        self._clock = clock
        self._stop = stop
        self._deadline = deadline
        self.fill = fill
        self._thread = ThreadPoolExecutor(1, "batches") if ahead else None
        self._ahead: Future[FetchedBatch] | None = None
        self._reason: NotReady | None = "warm_up"
        self._synced: Version | None = None
        self._closed = False

    def next(self, version: Version, published: Version | None) -> FetchedBatch:
        """Returns the next batch, for a trainer at `version` whose newest published weights are `published`.

        Raises `Stopped`, or `DeadlineExceeded` when no batch can be drawn for too long.
        """
        if self._thread is None:
            fetched = self._sampled(version, published)
        else:
            fetched = self._awaited(self._thread, version, published)
            if fetched.groups[0].reference != self._replay.reference:  # sampled before a reset
                self._replay.take_back(fetched.groups)
                fetched = self._awaited(self._thread, version, published)
            self._ahead = self._thread.submit(self._sampled, version, published)
        self._clock.end_warm_up()
        return fetched

    @property
    def ahead(self) -> FetchedBatch | None:
        """Returns the batch that was drawn ahead, if there is one."""
        ahead = self._ahead
        if ahead is None or not ahead.done() or ahead.cancelled() or ahead.exception() is not None:
            return None
        return ahead.result()

    def settle(self) -> None:
        """Wait until the batch that is being drawn ahead is there."""
        if self._ahead is not None:
            wait([self._ahead], self._deadline)

    def close(self) -> None:
        """End the wait and the thread; the batch drawn ahead is given back.

        Raises `DeadlineExceeded` when that hangs.
        """
        self._closed = True
        if self._thread is None:
            return
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._ahead is not None and not self._ahead.cancelled():
            if wait([self._ahead], self._deadline).not_done:
                raise DeadlineExceeded(f"replay did not release a batch in {self._deadline:g} s")
            if self.ahead is not None:
                self._replay.take_back(self.ahead.groups)

    def _awaited(self, thread: ThreadPoolExecutor, version: Version, published: Version | None) -> FetchedBatch:
        """Returns the batch that was drawn ahead, or draws one now. The wait is put on the clock."""
        asked, self._ahead = self._ahead or thread.submit(self._sampled, version, published), None
        if not asked.done():
            began, received = time.monotonic(), self._replay.buffer.received
            with self._clock.state("idle"):
                while wait([asked], _LOOK).not_done:
                    self._clock.reclassify("paced" if self._reason == "paced" else "idle")
                    if self._replay.buffer.received > received:
                        began, received = time.monotonic(), self._replay.buffer.received
                    if time.monotonic() - began > 2 * self._deadline:  # the thread's own deadline comes earlier
                        raise DeadlineExceeded(f"replay gave no batch and no reason in {2 * self._deadline:g} s")
        return asked.result()

    def _sampled(self, version: Version, published: Version | None) -> FetchedBatch:
        """Draws a batch as soon as replay allows it."""
        began, received = time.monotonic(), self._replay.buffer.received
        if self._synced != published:
            self._synced = published
            self._replay.drain()  # with `take_in = "sync"` this is when new data comes in
        self._replay.now = version
        while True:
            found = self._replay.sample_if_ready(self._groups_per_step, self._group_size)
            if not isinstance(found, str):
                self._reason = None
                return FetchedBatch(found, collate(found))
            self._reason = found
            if self._replay.buffer.received > received:  # searchers bring trajectories, however slowly
                began, received = time.monotonic(), self._replay.buffer.received
            if self._closed or self._stop():
                raise Stopped
            if time.monotonic() - began > self._deadline:
                raise DeadlineExceeded(
                    f"the trainer waited {self._deadline:g} s for a batch ({self._reason}): "
                    f"look at logs/searcher-*.log for why no trajectories come{_WHY.get(self._reason, '')}"
                )
            self.fill()
