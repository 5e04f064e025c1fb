"""The trainer's one wait: for its next batch.

Invariant: the wait has a deadline, and its reason (warm-up, empty, paced) is known while it lasts. A searcher's round
unblocks it: another process's, or in the inline runtime one that is done meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tba.errors import DeadlineExceeded
from tba.record.clock import ShareClock
from tba.replay.replay import NotReady, Replay
from tba.train.batches import Fetched, Sampled
from tba.train.prefetch import Prefetch
from tba.types import Version

_LOOK = 0.02  # seconds between two looks at why there is no batch
_WHY: dict[NotReady, str] = {  # what is behind a reason that no look at the searchers tells
    "paced": "; those that came have been used as often as --replay.pacing.max-mean-uses or samples-per-insert allows",
}


class Stopped(Exception):
    """Told to stop while waiting for a batch."""


@dataclass
class ReplayWait:
    """A batch source that waits until replay can give a batch. `fill` is what to do meanwhile (inline: a round)."""

    replay: Replay
    source: Sampled
    version: Callable[[], Version]
    stop: Callable[[], bool]
    deadline: float  # seconds
    fill: Callable[[], object]
    published: Callable[[], Version | None]
    reason: NotReady | None = "warm_up"
    closed: bool = False  # no batch is wanted any longer
    _synced: Version | None = None

    def next(self) -> Fetched:
        """Raises `Stopped`, or `DeadlineExceeded` when searchers bring nothing for too long."""
        began = time.monotonic()
        if self._synced != self.published():
            self._synced = self.published()
            self.replay.sync()
        while True:
            self.replay.now = self.version()
            self.reason = self.replay.ready(self.source.groups_per_step, self.source.group_size)
            if self.reason is None:
                return self.source.next()
            if self.closed or self.stop():
                raise Stopped
            if time.monotonic() - began > self.deadline:
                raise DeadlineExceeded(
                    f"the trainer waited {self.deadline:g} s for a batch ({self.reason}): "
                    f"look at logs/searcher-*.log for why no trajectories come{_WHY.get(self.reason, '')}"
                )
            self.fill()

    def close(self) -> None:
        """End the wait."""
        self.closed = True


@dataclass
class Timed:
    """The trainer's end of a batch source: its waiting is accounted as idle or paced, by the reason given."""

    source: Prefetch | ReplayWait
    wait: ReplayWait
    clock: ShareClock

    def next(self) -> Fetched:
        """A batch of the reference of now: one that was fetched ahead of a reset is given back."""
        if isinstance(self.source, Prefetch):
            self._await(self.source)
            ahead = self.source.ahead
            if ahead is not None and ahead.groups[0].reference != self.wait.replay.reference:
                self.wait.replay.take_back(ahead.groups)
                self.source.again()
                self._await(self.source)
        fetched = self.source.next()
        self.clock.end_warm_up()
        return fetched

    def _await(self, source: Prefetch) -> None:
        if source.ready(0.0):
            return
        with self.clock.state("idle"):
            while not source.ready(_LOOK):
                self.clock.reclassify("paced" if self.wait.reason == "paced" else "idle")

    def close(self) -> Fetched | None:
        """End the fetching; the batch that was fetched ahead and is not wanted any longer, if there is one."""
        return self.source.close() if isinstance(self.source, Prefetch) else None
