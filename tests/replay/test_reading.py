"""Commands that read a journal leave every file as it is; a resume sets a log aside that is not the journal's own."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from trajectory_cases import trajectory

from tba.replay.checks import find_damage, log_belongs, log_of
from tba.replay.codec import MissingCounts
from tba.replay.database import suspect_mark
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.replay.missing_rows import JournalCounts, acknowledged_counts, find_loss
from tba.replay.queries import JournalQueries
from tba.replay.reading import JournalFile

ROUND = 8


@contextmanager
def nobody_moves_the_log(path: Path) -> Iterator[None]:
    """While it is open, SQLite does not move the log into the file, as when a run is killed."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT * FROM totals").fetchone()
        yield


def put(path: Path, rounds: range) -> None:
    with JournalWriter(path, "searcher-0") as writer:
        for i in rounds:
            writer.put([trajectory(i, uid=f"t{i}-{j}") for j in range(ROUND)])


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A journal of ten rounds, six of them in the file, four in the log of a run that was killed."""
    path = tmp_path / "live" / "journal.sqlite"
    put(path, range(6))
    with nobody_moves_the_log(path):
        put(path, range(6, 10))
        return copied(path, tmp_path / "killed")


def copied(path: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in ("", "-wal", "-open", "-in-use"):
        if Path(f"{path}{name}").exists():
            shutil.copy(f"{path}{name}", folder)
    return folder / path.name


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}


def read(path: Path) -> tuple[int, list[str], MissingCounts]:
    """Reads a journal as commands do; gives its total, and the uids and the losses of what can be read."""
    with JournalQueries(path) as queries:
        rows = queries.totals.rows
    with JournalFile(path) as file, JournalFollower(path, file=file) as follower:
        return rows, [t.uid for t in follower.drain()], follower.take_missing_counts()


def test_the_log_of_a_killed_run_is_read_to_its_last_row_and_no_file_changes(killed: Path) -> None:
    before = files(killed)
    rows, uids, gone = read(killed)
    assert (rows, len(uids), gone) == (10 * ROUND, 10 * ROUND, MissingCounts())
    assert files(killed) == before
    with JournalFollower(killed) as follower:  # a resume
        assert len(follower.drain()) == 10 * ROUND
        assert not follower.recoveries()


def test_a_stale_log_is_passed_over_by_readers_and_set_aside_by_a_resume(
    killed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stale = log_of(killed).read_bytes()  # the run's own, of earlier
    put(killed, range(10, 30))
    assert not log_of(killed).exists()
    log_of(killed).write_bytes(stale)
    before = files(killed)
    assert not log_belongs(killed)
    rows, uids, gone = read(killed)
    assert (rows, len(uids), gone) == (30 * ROUND, 30 * ROUND, MissingCounts())
    assert files(killed) == before
    assert f"{log_of(killed)} is not the log of the journal beside it, and is passed over" in caplog.text
    with JournalFollower(killed) as follower:
        assert len(follower.drain()) == 30 * ROUND
        (recovery,) = follower.recoveries()
        assert str(recovery) == (
            "the journal had a log beside it that is not its own, which was set aside as journal.sqlite.other-1-wal: "
            "0 trajectories are missing, 240 are there"
        )
    assert (killed.parent / "journal.sqlite.other-1-wal").read_bytes() == stale


def test_the_log_of_another_journal_is_not_its_own(killed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "journal.sqlite"
    put(other, range(3))
    with nobody_moves_the_log(other):
        put(other, range(3, 4))
        shutil.copy(log_of(other), log_of(killed))
    assert not log_belongs(killed)
    assert read(killed)[0] == 6 * ROUND


def test_the_log_of_a_copy_that_went_another_way_is_not_its_own(killed: Path, tmp_path: Path) -> None:
    copy = copied(killed, tmp_path / "copy")
    put(killed, range(10, 12))
    put(copy, range(10, 12))
    with nobody_moves_the_log(copy):
        put(copy, range(12, 14))
        shutil.copy(log_of(copy), log_of(killed))
    assert not log_belongs(killed)


def test_a_later_log_that_does_not_follow_is_not_its_own(killed: Path, tmp_path: Path) -> None:
    older = copied(killed, tmp_path / "older")
    log_of(older).unlink()
    put(killed, range(10, 12))
    with nobody_moves_the_log(killed):
        put(killed, range(12, 14))
        shutil.copy(log_of(killed), log_of(older))
    assert not log_belongs(older)
    assert read(older)[0] == 6 * ROUND


def test_a_log_of_which_a_part_was_moved_already_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "live" / "journal.sqlite"
    put(path, range(12))
    with closing(sqlite3.connect(path)) as holder:
        with nobody_moves_the_log(path):
            put(path, range(12, 14))
            holder.execute("BEGIN")
            holder.execute("SELECT * FROM totals").fetchone()
        put(path, range(14, 16))
        with closing(sqlite3.connect(path)) as connection:
            _, frames, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        assert 0 < moved < frames
        copy = copied(path, tmp_path / "partly")
    assert log_belongs(copy)
    assert read(copy)[0] == 16 * ROUND


def without_links(path: Path) -> None:
    """Makes a journal one that an earlier program wrote."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM totals WHERE name LIKE 'link%'")


def test_of_a_journal_without_links_a_log_is_tried_on_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "live" / "journal.sqlite"
    put(path, range(6))
    without_links(path)
    with closing(sqlite3.connect(path)) as connection, nobody_moves_the_log(path), connection:
        connection.execute("UPDATE totals SET value = value + 1, again = again + 1 WHERE name = 'positions'")
        connection.commit()
        genuine = copied(path, tmp_path / "genuine")
    assert log_belongs(genuine)
    stale = log_of(genuine).read_bytes()
    put(path, range(6, 40))
    without_links(path)
    log_of(path).write_bytes(stale)
    before = files(path)
    assert not log_belongs(path)
    assert read(path)[0] == 40 * ROUND
    assert files(path) == before


def test_a_damaged_journal_is_read_from_a_recovered_copy(killed: Path) -> None:
    put(killed, range(10, 11))
    content = bytearray(killed.read_bytes())
    at = content.index(b'"provenance"')
    content[at : at + 4] = b"\0\0\0\0"
    killed.write_bytes(content)
    suspect_mark(killed).touch()
    before = files(killed)
    rows, uids, gone = read(killed)
    assert rows == 11 * ROUND
    assert len(uids) + gone.damaged_trajectories == 11 * ROUND
    assert gone.damaged_trajectories == 1
    assert files(killed) == before


def test_a_run_in_a_folder_that_may_not_be_written_is_read(killed: Path) -> None:
    put(killed, range(10, 11))
    killed.parent.chmod(0o500)
    before = files(killed)
    try:
        assert read(killed)[0] == 11 * ROUND
    finally:
        killed.parent.chmod(0o700)
    assert files(killed) == before  # whoever reads: the mode does not bind an administrator


def test_a_journal_that_others_write_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with JournalWriter(path, "searcher-0") as writer:
        writer.put([trajectory(0)])
        with JournalFile(path) as file, JournalFollower(path, file=file) as follower:
            assert len(follower.drain()) == 1
            writer.put([trajectory(1)])
            assert len(follower.drain()) == 1


def test_rows_that_a_killed_runs_lost_log_held_are_known_by_number(killed: Path) -> None:
    path = killed.parent.parent / "live" / "journal.sqlite"
    shutil.copytree(f"{path}-acknowledged", f"{killed}-acknowledged")
    log_of(killed).unlink()
    held = acknowledged_counts(killed)
    assert held == JournalCounts(
        rows=10 * ROUND, tokens=sum(t.length for i in range(10) for t in [trajectory(i)] * ROUND)
    )
    loss = find_loss(killed, held)
    assert loss is not None
    assert loss.rows == 4 * ROUND
    killed.unlink()
    gone = find_loss(killed, held)
    assert gone is not None
    assert gone.rows == 10 * ROUND
    assert find_damage(killed) is None
