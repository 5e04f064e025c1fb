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

_POLL_SECONDS = 0.004  # between two polls of the journal while there is no batch
_CHECK_SECONDS = 0.02  # between two checks of why there is none
_REASON_NOTES: dict[NotReady, str] = {  # explains a reason that lies in replay itself, not with the searchers
    "paced": "; those that came have been used as often as --replay.pacing.max-mean-uses or samples-per-insert allows"
}


class StopRequested(Exception):
    """Says that a stop was requested while a batch was waited for."""


def pause() -> None:
    """Sleep briefly: there is no batch, and other processes bring one."""
    time.sleep(_POLL_SECONDS)


def raise_out_of_data() -> None:
    """Raise `UserError`: there is no batch, and nobody will bring one."""
    raise UserError(
        "--offline there is no further batch to learn from, and no searcher brings one: set --replay.pacing."
        "max-mean-uses higher, import more, or train with searchers"
    )


class BatchQueue:
    """Batches of B prompts with K trajectories each.

    deadline: seconds that a batch may take. fill: what to do while there is none. prefetch: draw the next batch in the
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
        prefetch: bool = False,
    ) -> None:
        self._replay = replay
        self._groups_per_step = groups_per_step
        self._group_size = group_size
        self._clock = clock
        self._stop = stop
        self._deadline = deadline
        self.fill = fill
        self.on_wait: Callable[[], object] = lambda: None  # called again and again in the trainer's thread meanwhile
        self._thread = ThreadPoolExecutor(1, "batches") if prefetch else None
        self._prefetch: Future[FetchedBatch] | None = None
        self._reason: NotReady | None = "warm_up"
        self._synced_version: Version | None = None
        self._closed = False
        self._is_stop_requested = False  # as the trainer's thread has heard; to ask is a sign of life, which is its own

    def next(self, version: Version, published: Version | None) -> FetchedBatch:
        """Returns the next batch, for a trainer at `version` whose newest published weights are `published`.

        Raises `StopRequested`, or `DeadlineExceeded` when no batch can be drawn for too long.
        """
        if self._thread is None:
            fetched = self._draw(version, published)
        else:
            fetched = self._wait_for_batch(self._thread, version, published)
            if fetched.groups[0].reference != self._replay.reference:  # sampled before a reset
                self._replay.take_back(fetched.groups)
                fetched = self._wait_for_batch(self._thread, version, published)
            self._prefetch = self._thread.submit(self._draw, version, published)
        self._clock.end_warm_up()
        return fetched

    @property
    def prefetched_batch(self) -> FetchedBatch | None:
        """Returns the batch that was drawn ahead, if there is one."""
        prefetch = self._prefetch
        if prefetch is None or not prefetch.done() or prefetch.cancelled() or prefetch.exception() is not None:
            return None
        return prefetch.result()

    def wait_for_prefetch(self) -> None:
        """Wait until the next batch has been drawn in the background."""
        if self._prefetch is not None:
            wait([self._prefetch], self._deadline)

    def close(self) -> None:
        """End the thread and give the batch that was drawn ahead back to replay.

        Raises `DeadlineExceeded` when replay hangs.
        """
        self._closed = True
        if self._thread is None:
            return
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._prefetch is not None and not self._prefetch.cancelled():
            if wait([self._prefetch], self._deadline).not_done:
                raise DeadlineExceeded(f"replay did not release a batch in {self._deadline:g} s")
            if self.prefetched_batch is not None:
                self._replay.take_back(self.prefetched_batch.groups)

    def _wait_for_batch(self, thread: ThreadPoolExecutor, version: Version, published: Version | None) -> FetchedBatch:
        """Returns the batch that was drawn ahead, or draws one now; the clock counts the wait."""
        batch, self._prefetch = self._prefetch or thread.submit(self._draw, version, published), None
        if not batch.done():
            began, received = time.monotonic(), self._replay.buffer.received
            with self._clock.state("idle"):
                while wait([batch], _CHECK_SECONDS).not_done:
                    self._is_stop_requested = self._stop()
                    self.on_wait()
                    self._clock.reclassify("paced" if self._reason == "paced" else "idle")
                    if self._replay.buffer.received > received:
                        began, received = time.monotonic(), self._replay.buffer.received
                    if time.monotonic() - began > 2 * self._deadline:  # the thread's own deadline comes earlier
                        raise DeadlineExceeded(f"replay gave no batch and no reason in {2 * self._deadline:g} s")
        return batch.result()

    def _draw(self, version: Version, published: Version | None) -> FetchedBatch:
        """Draw a batch as soon as replay allows it."""
        began, received = time.monotonic(), self._replay.buffer.received
        if self._synced_version != published:
            self._synced_version = published
            self._replay.drain()  # with `ingest = "sync"` this is when new data comes in
        self._replay.now = version
        while True:
            groups = self._replay.sample_if_ready(self._groups_per_step, self._group_size)
            if not isinstance(groups, str):
                self._reason = None
                return FetchedBatch(groups, collate(groups))
            self._reason = groups
            if self._replay.buffer.received > received:  # searchers bring trajectories, however slowly
                began, received = time.monotonic(), self._replay.buffer.received
            if self._closed or (self._stop() if self._thread is None else self._is_stop_requested):
                raise StopRequested
            if time.monotonic() - began > self._deadline:
                raise DeadlineExceeded(
                    f"the trainer waited {self._deadline:g} s for a batch ({self._reason}): "
                    f"look at logs/searcher-*.log for why no trajectories come{_REASON_NOTES.get(self._reason, '')}"
                )
            if self._thread is None:
                self.on_wait()
            self.fill()
