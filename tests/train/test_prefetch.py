"""One batch ahead, in order, with errors and deadlines passed on, and a clean end."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
from toys import groups_of

from tba.batch import collate
from tba.errors import DeadlineExceeded, UserError
from tba.train.batches import Fetched
from tba.train.prefetch import Prefetch

LONG = 60.0


@dataclass
class Numbered:
    """Gives batches of 1, 2, 3, ... rows, and says how many were asked for."""

    given: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def next(self) -> Fetched:
        with self.changed:
            self.given += 1
            self.changed.notify_all()
        groups = groups_of([self.given])
        return Fetched(groups, collate(groups))

    def wait_until_given(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.given >= count, LONG)


@dataclass
class Silent:
    """Waits for data that does not come, until it is told to let go."""

    released: threading.Event = field(default_factory=threading.Event)

    def next(self) -> Fetched:
        if not self.released.wait(LONG):
            raise DeadlineExceeded("the test's own limit")
        raise UserError("interrupted")


def closed(prefetch: Prefetch) -> bool:
    return not prefetch._thread.is_alive()


def test_batches_come_in_the_order_of_the_source_and_exactly_one_is_ahead() -> None:
    source = Numbered()
    prefetch = Prefetch(source, LONG)
    for rows in range(1, 6):
        assert prefetch.next().batch.rows == rows
        assert source.wait_until_given(rows + 1)
        assert source.given == rows + 1
    prefetch.close()
    assert closed(prefetch)


def test_whether_a_batch_or_an_error_is_there_can_be_asked_without_taking_it() -> None:
    source = Silent()
    prefetch = Prefetch(source, LONG)
    assert not prefetch.ready(0.001)
    source.released.set()
    assert prefetch.ready(LONG)
    with pytest.raises(UserError, match="interrupted"):
        prefetch.next()
    prefetch.close()


def test_what_the_source_raises_is_raised_to_the_caller_and_stays_raised() -> None:
    source = Silent()
    source.released.set()
    prefetch = Prefetch(source, LONG)
    for _ in range(2):
        with pytest.raises(UserError, match="interrupted"):
            prefetch.next()
    prefetch.close()
    assert closed(prefetch)


def test_a_wait_without_data_ends_in_an_error_that_names_the_source() -> None:
    source = Silent()
    prefetch = Prefetch(source, 0.01, interrupt=source.released.set)
    with pytest.raises(DeadlineExceeded, match=r"no batch came within 0\.01 s from Silent"):
        prefetch.next()
    prefetch.deadline = LONG
    prefetch.close()
    assert closed(prefetch)


def test_a_deadline_of_the_source_is_passed_on_as_it_is() -> None:
    class Late:
        def next(self) -> Fetched:
            raise TimeoutError("the journal's own")

    prefetch = Prefetch(Late(), LONG)
    with pytest.raises(TimeoutError, match="the journal's own"):
        prefetch.next()
    prefetch.close()


def test_closing_while_the_source_waits_interrupts_it() -> None:
    source = Silent()
    prefetch = Prefetch(source, LONG, interrupt=source.released.set)
    prefetch.close()
    assert closed(prefetch)


def test_a_source_that_holds_on_is_named_when_the_deadline_expires() -> None:
    source = Silent()
    prefetch = Prefetch(source, 0.01)
    with pytest.raises(DeadlineExceeded, match="Silent did not let go"):
        prefetch.close()
    source.released.set()
