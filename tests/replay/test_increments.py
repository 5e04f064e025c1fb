"""A journal built from its increments is that journal, and making them keeps nobody waiting."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from trajectory_cases import trajectory

from tba.replay.database import Database
from tba.replay.follower import JournalFollower
from tba.replay.increments import IncrementEnd, end_of, restore_journal, write_increment
from tba.replay.journal import JournalWriter
from tba.types import Score, Version

REFERENCE = Version(0, 3)


def content(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of all tables, but the links, which each transaction draws, and the table of SQLite's own."""
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
        names = [name for (name,) in tables]
        rows = {name: connection.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for name in names}
    rows["totals"] = [row for row in rows["totals"] if not row[0].startswith("link")]
    return rows


def life(journal: Path) -> Iterator[None]:
    """A journal with everything that may be in one; yields after each of its parts."""
    with JournalFollower(journal, keep_bytes=40_000) as follower, JournalWriter(journal, "one") as writer:
        positions = writer.lease(3, 60.0)
        writer.put([trajectory(n % 3, uid=f"a{n}") for n in range(600)], positions[:1], {"generated_tokens": 5})
        yield
        follower.ask(REFERENCE, ["a1", "a2"])
        writer.put_scores([Score("a1", REFERENCE, np.zeros(3, dtype=np.float32))])
        writer.claim("evaluate 0.1", 60.0)
        writer.finish("evaluate 0.2", [])
        yield
        follower.drain()  # deletes the oldest bodies
        writer.put([trajectory(7, uid=f"b{n}") for n in range(3)], (), {"generated_tokens": 2})
        yield


def test_the_increments_of_a_journal_are_the_journal_at_every_moment(tmp_path: Path) -> None:
    journal, end, files = tmp_path / "journal.sqlite", IncrementEnd(), []
    for number, _ in enumerate(life(journal)):
        files.append(tmp_path / f"increment-{number}")
        end = write_increment(journal, files[-1], end)
        assert end == end_of(journal)
        copy = tmp_path / f"copy-{number}.sqlite"
        restore_journal(copy, files)
        assert content(copy) == content(journal)
    assert len(content(copy)["bodies"]) < len(content(copy)["trajectories"]) == 603
    with JournalFollower(copy) as restored_journal, JournalWriter(copy, "two") as writer:
        writer.put([trajectory(9, uid="c")], (), {})
        assert restored_journal.totals().rows == 604
        assert writer.known(["a0", "b0", "c", "d"]) == {"a0", "b0", "c"}


def test_writers_and_checkpoints_go_on_while_an_increment_is_made(tmp_path: Path, monkeypatch: Any) -> None:
    journal, steps = tmp_path / "journal.sqlite", 0
    with JournalFollower(journal) as follower, JournalWriter(journal, "one", deadline_s=0.0) as writer:
        follower.lead(1.0)
        writer.put([trajectory(1, uid=f"a{n}") for n in range(600)], (), {})
        rows = Database.rows

        def interrupted_rows(database: Database, query: str, *parameters: object) -> list[tuple[Any, ...]]:
            nonlocal steps
            query_rows = rows(database, query, *parameters)
            if query.startswith("INSERT INTO increment.bodies") and steps < 3:
                steps += 1
                writer.put([trajectory(1, uid=f"b{steps}")], (), {})
                assert follower.checkpoint()  # nobody reads: the log is emptied
            return query_rows

        monkeypatch.setattr(Database, "rows", interrupted_rows)
        end = write_increment(journal, tmp_path / "increment", IncrementEnd())
    assert (steps, end.rows) == (3, 603)
    restore_journal(tmp_path / "copy.sqlite", [tmp_path / "increment"])
    assert content(tmp_path / "copy.sqlite") == content(journal)
