"""A journal end that writes while the next round is made: the same is written, nothing is lost or hidden."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.replay.trajectory_cases import trajectory
from tests.runtime.runs import made

from tba.clock import ShareClock
from tba.errors import DeadlineExceeded
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.runtime.background_journal import BackgroundJournal
from tba.runtime.searcher_loop import start_searching

QUICK = ("--evaluation.problems", "1", "--replay.pacing.warm-up", "64", "--group-size", "8")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def beside(path: Path) -> Iterator[BackgroundJournal]:
    with ExitStack() as closers:
        journal = BackgroundJournal(JournalWriter(path, "searcher-0"), 60.0, ShareClock())
        closers.callback(journal.close)
        yield journal


def uids(path: Path) -> list[str]:
    with JournalFollower(path) as follower:
        return [t.uid for t in follower.drain()]


def test_a_run_written_beside_its_rounds_is_the_one_written_between_them(tmp_path: Path) -> None:
    results = []
    for background in (False, True):
        recipe, run = made(
            tmp_path / f"run-{background}", *QUICK, "--run.synchronous-rounds"
        )  # what flows is sent by the clock
        search = start_searching(recipe, run, 0, background=background)
        for _ in range(7):
            search.round()
        search.close()
        with JournalFollower(run.path / "journal.sqlite") as journal:
            rows = [(t.uid, t.prompt.key, t.completion.tokens.tolist(), t.reward) for t in journal.drain()]
            counters = {k: v for k, v in journal.counters()["searcher-0"].items() if not k.endswith("_milliseconds")}
            positions, leases = journal.totals().positions, journal.leases()
        results.append((rows, counters))
        assert leases == list(range(7 * recipe.prompts_per_round, positions))  # those leased ahead
    assert results[0] == results[1]
    assert len(results[0][0]) == 7 * 64


def test_what_is_put_is_on_its_way_while_another_process_holds_the_file_and_there_once_it_is_closed(path: Path) -> None:
    clock = ShareClock()
    beside = BackgroundJournal(JournalWriter(path, "searcher-0"), 60.0, clock)
    with JournalFollower(path) as follower, closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        beside.put([trajectory(uid="a")])  # returns although nothing can be written
        assert follower.drain() == []
        assert "journal" not in clock.seconds()
        holder.execute("ROLLBACK")
    beside.put([trajectory(uid="b")])
    beside.close()
    assert uids(path) == ["a", "b"]


def test_what_cannot_be_written_is_raised_by_the_next_put_or_by_closing_and_the_rest_is_written(path: Path) -> None:
    wrong = replace(trajectory(uid="wrong"), log_reference=np.zeros(9, dtype=np.float32))
    beside = BackgroundJournal(JournalWriter(path, "searcher-0"), 60.0, ShareClock())
    beside.put([trajectory(uid="a")])
    beside.put([wrong])
    with pytest.raises(ValueError, match=r"array of shape \(9,\)"):
        beside.put([trajectory(uid="b")])
    beside.put([wrong])
    with pytest.raises(ValueError, match=r"array of shape \(9,\)"):
        beside.close()
    assert uids(path) == ["a"]


def test_a_wait_for_the_journal_has_a_deadline_and_counts_as_such(path: Path) -> None:
    clock = ShareClock()
    beside = BackgroundJournal(JournalWriter(path, "searcher-0"), 0.2, clock)
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        beside.put([trajectory(uid="a")])
        with pytest.raises(DeadlineExceeded, match=r"had not written a searcher's trajectories after 0\.2 s"):
            beside.put([trajectory(uid="b")])
        assert clock.seconds()["journal"] >= 0.2
        holder.execute("ROLLBACK")
    beside.close()
    assert uids(path) == ["a"]


def test_questions_are_answered_with_what_was_put_before_them(beside: BackgroundJournal) -> None:
    for n in range(1, 6):
        assert beside.lease_first(range(10), 1, 60.0) == [0]  # given back by the round before
        beside.put([trajectory(uid=f"t{n}")], [0], {"rounds": 1}, [(0, 1.0, 0.0)])
        assert beside.rows() == 2 * n - 1
        beside.put([trajectory(uid=f"u{n}")])
        assert beside.known([f"u{n}", "x"]) == {f"u{n}"}
        beside.put([], outcomes=[(n, 0.0, 1.0)])
        assert len(beside.outcomes(0)) == 2 * n


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_positions_come_in_order_each_once_however_many_are_asked_for(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int]
) -> None:
    journal = BackgroundJournal(
        JournalWriter(tmp_path_factory.mktemp("leases") / "journal.sqlite", "searcher-0"), 60.0, ShareClock()
    )
    positions = [position for count in counts for position in journal.lease(count, 600.0)]
    journal.close()
    assert positions == list(range(sum(counts)))


def test_what_was_leased_ahead_is_for_others_once_it_is_given_up_and_leased_anew_when_it_may_have_run_out(
    path: Path, beside: BackgroundJournal
) -> None:
    assert beside.lease(3, 600.0) == [0, 1, 2]  # and 3, 4, 5 ahead
    beside.put([trajectory()], [0, 1, 2])
    beside.resume()
    with JournalWriter(path, "searcher-1") as journal_of_another:
        assert journal_of_another.lease(4, 600.0) == [3, 4, 5, 6]
    assert beside.lease(2, 1e-9) == [7, 8]
    assert set(beside.lease(2, 1e-9)) <= {7, 8, 9, 10}  # they ran out at once, and come first
