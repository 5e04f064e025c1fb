"""Connects a searcher with the rest of its run: the journal, the weights, and the records of what it did.

Invariant: a searcher has these connections and no others, so it need not know whether they lead to its own disk (here)
or to the gateway on a trainer's machine (`remote`), nor whether a round is written while it makes the next one
(`BackgroundJournal`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tba.clock import ShareClock
from tba.errors import DeadlineExceeded
from tba.protocols import Answered, Journal, Records, WeightSource
from tba.recipe import Recipe
from tba.record.evaluations import EvaluationWriter
from tba.record.faults import record_fault
from tba.record.jsonl import write_json
from tba.replay.journal import JournalWriter
from tba.runtime.run_directory import RunDirectory
from tba.types import Evaluation, Json
from tba.weights.directory import WeightDirectory

T = TypeVar("T")


@dataclass(frozen=True)
class RunRecords:
    """`Records` in the run's own directory."""

    run: RunDirectory
    recipe: Recipe

    def write(self, evaluations: Sequence[Evaluation], answers: Sequence[Answered] = ()) -> None:
        """Write the results of one evaluation of one version."""
        with closing(EvaluationWriter(self.run.path, text=not self.recipe.record.hide_text)) as writer:
            writer.write(evaluations, answers)

    def fault(self, kind: str, what: str) -> None:
        """Record a fault that the run survived."""
        record_fault(self.run.path, kind, what)

    def result(self, worker: str, result: Json) -> None:
        """Leave what the summary needs of the worker."""
        write_json(self.run.result(worker), result)


@dataclass(frozen=True)
class Connections:
    """All connections of one searcher. incarnation: that of the run, when the searcher was started."""

    journal: Journal
    weights: WeightSource
    records: Records
    incarnation: int


def on_disk(recipe: Recipe, run: RunDirectory, name: str, interrupted: Callable[[], bool] | None = None) -> Connections:
    """Returns the connections to the run at `run`, on this machine. Prompts leased under this name earlier are given
    back.
    """
    journal = JournalWriter(
        run.journal(recipe), name, recipe.run.journal_deadline, on_wait=interrupted or (lambda: None), create=False
    )
    journal.resume()
    return Connections(journal, WeightDirectory(run.weights), RunRecords(run, recipe), run.incarnation)


# methods that are independent of what is being written
_AT_ONCE = ("claim", "finish", "count", "unscored", "put_scores")


class BackgroundJournal:
    """A `Journal` in front of another one: a thread writes each round in the background while the next one is made.

    Invariant: what is put is written in order, one round at a time, and counts as acknowledged once the journal has it.
    Until then its prompts stay leased: a searcher that dies loses at most the round that was being written and the one
    that it was making, and their prompts are handed out again. What fails in the thread is raised by the next call that
    has to come after it, at the latest by `close`.

    deadline_s: how long a call may wait for those asked before it; more than the journal itself waits for its lock.
    clock: where the time that is spent waiting all the same counts as `journal`.
    """

    def __init__(self, journal: Journal, deadline_s: float, clock: ShareClock) -> None:
        self._journal = journal
        self._deadline_s = deadline_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "journal")
        self._written: Future[None] | None = None
        self._leased: Future[list[int]] | None = None
        self._leased_at = 0.0  # by a monotonic clock
        self._on_hand: list[int] = []  # leased positions that are not handed out yet, oldest first

    def __getattr__(self, verb: str) -> Any:
        """Forwards a method of the journal; most run once all that was put is written, so that they see it."""
        act = getattr(self._journal, verb)
        return act if verb in _AT_ONCE else partial(self._after, act)

    def put(self, *given: Any, **named: Any) -> None:
        """Returns once the round before this one is on disk, and raises what that raised."""
        self._settle()
        self._written = self._thread.submit(self._journal.put, *given, **named)

    def lease(self, count: int, seconds: float) -> list[int]:
        """Lease prompts as the journal does. As many again are leased in the background, for the next call."""
        if time.monotonic() - self._leased_at > seconds / 2:  # the leases may run out before their prompts are answered
            self._leased, self._on_hand = None, []
        while len(self._on_hand) < count:
            leased = self._waited(self._leased or self._lease(count, seconds))
            self._on_hand += leased
            self._leased = None
        if self._leased is None:
            self._leased = self._lease(count, seconds)
        taken, self._on_hand = self._on_hand[:count], self._on_hand[count:]
        return taken

    def _lease(self, count: int, seconds: float) -> Future[list[int]]:
        self._leased_at = time.monotonic()
        return self._thread.submit(self._journal.lease, count, seconds)

    def resume(self) -> None:
        """Give back what was leased, once what was put is written; what was leased ahead is given up too."""
        self._after(self._journal.resume)
        self._leased, self._on_hand = None, []

    def close(self) -> None:
        """Close once all that was put is on disk. Raises what could not be written, after closing."""
        try:
            self._settle()
        finally:
            self._thread.shutdown(cancel_futures=True)
            self._journal.close()

    def _after(self, act: Callable[..., T], *given: Any, **named: Any) -> T:
        self._settle()
        return self._waited(self._thread.submit(act, *given, **named))

    def _settle(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            self._waited(written)

    def _waited(self, asked: Future[T]) -> T:
        if asked.done():
            return asked.result()
        with self._clock.state("journal"):
            try:
                return asked.result(self._deadline_s)
            except TimeoutError as error:
                if asked.done():  # the call's own error, not this wait's
                    raise
                raise DeadlineExceeded(
                    f"the journal had not written a searcher's trajectories after {self._deadline_s:g} s"
                ) from error
