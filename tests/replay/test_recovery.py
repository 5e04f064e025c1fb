"""A damaged journal: found, set aside, and what is in it brought into a new one and counted."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trajectory_cases import same, trajectory

import tba.replay.recovery
from tba.errors import UserError
from tba.replay.checks import find_damage
from tba.replay.codec import MissingCounts
from tba.replay.database import suspect_mark
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.replay.pages import LogFrame, is_torn, wal_frames
from tba.replay.recovery import lock_and_check
from tba.types import Trajectory

ROWS = 120


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trajectory]]:
    """A journal that has been closed, and what is in it: a few long answers among short ones."""
    path = tmp_path_factory.mktemp("whole") / "journal.sqlite"
    rows = [trajectory(i % 5, range(6000 if i % 40 == 3 else 60), version=i, uid=f"t{i}") for i in range(ROWS)]
    with JournalFollower(path), JournalWriter(path, "searcher-0") as writer:
        for i in range(0, ROWS, 8):
            put = rows[i : i + 8]
            tokens = sum(t.length for t in put)
            writer.put(put, counters={"generated_trajectories": 9, "generated_tokens": tokens + 1})
            writer.count(rejected_trajectories=1, rejected_tokens=1)
        writer.lease(11, 1e6)
    return path, rows


def copied(whole: Path, folder: Path) -> Path:
    return Path(shutil.copy(whole, folder / "journal.sqlite"))


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def opened(path: Path) -> tuple[list[Trajectory], MissingCounts, JournalFollower]:
    follower = JournalFollower(path)
    return follower.drain(), follower.take_missing_counts(), follower


def assert_accounted(path: Path, rows: Sequence[Trajectory]) -> list[Trajectory]:
    """What is there is as it was written, and what is not is counted; gives what is there."""
    found, gone, follower = opened(path)
    with follower:
        by_uid = {t.uid: t for t in rows}
        assert all(same(t, by_uid[t.uid]) for t in found)
        assert len({t.uid for t in found}) == len(found)
        assert len(found) + gone.damaged_trajectories == len(rows)
        assert sum(t.length for t in found) + gone.damaged_tokens == sum(t.length for t in rows)
        counts = follower.counters()["searcher-0"]
        rejected = counts.get("rejected_trajectories", 0)
        assert counts["generated_trajectories"] == len(rows) + rejected
        for recovery in follower.recoveries():
            assert (path.parent / recovery.damaged).exists()
    return found


def test_a_whole_journal_is_not_touched(whole: tuple[Path, list[Trajectory]], tmp_path: Path) -> None:
    path = copied(whole[0], tmp_path)
    before = path.read_bytes()
    assert find_damage(path) is None
    lock_and_check(path).close()
    assert path.read_bytes() == before
    assert len(assert_accounted(path, whole[1])) == ROWS
    assert {p.name for p in tmp_path.iterdir()} <= {
        *("journal.sqlite", "journal.sqlite-open", "journal.sqlite-in-use", "journal.sqlite-follower"),
        *("journal.sqlite-wal", "journal.sqlite-shm"),
    }


def pages_of(path: Path, table: str) -> list[int]:
    """Leaf pages of a table, by what is on them: a test may ask what the program may not."""
    data, found = path.read_bytes(), []
    mark = {"bodies": b'"provenance"', "uids": b"t11"}[table]
    for at in range(0, len(data), 8192):
        page = data[at : at + 8192]
        if page[0] == (13 if table == "bodies" else 10) and mark in page:
            found.append(at)
    return found


def test_of_a_page_that_is_destroyed_only_its_own_rows_are_lost_and_all_is_counted(
    whole: tuple[Path, list[Trajectory]], tmp_path: Path
) -> None:
    path = copied(whole[0], tmp_path)
    at = pages_of(path, "bodies")[2]
    original = path.read_bytes()
    on_the_page = original[at : at + 8192].count(b'"provenance"')
    overwrite(path, at, bytes(8192))
    damaged = path.read_bytes()
    found = assert_accounted(path, whole[1])
    assert ROWS - on_the_page - 1 <= len(found) <= ROWS - on_the_page + 1
    with JournalFollower(path) as follower, JournalWriter(path, "searcher-1") as writer:
        (recovery,) = follower.recoveries()
        assert (recovery.rows, recovery.lost_rows) == (len(found), ROWS - len(found))
        assert recovery.damaged == "journal.sqlite.damaged-1"
        assert str(recovery).endswith(
            f"{len(found)} trajectories were recovered, {ROWS - len(found)} could not be read"
        )
        assert writer.lease(1, 9.0) == [11]  # positions go on
        writer.put([trajectory(uid="later")])
        assert [t.uid for t in follower.drain()][-1] == "later"
        assert follower.position == ROWS + 1
    assert (tmp_path / recovery.damaged).read_bytes() == damaged


def test_without_the_page_of_the_prompts_nothing_is_lost(whole: tuple[Path, list[Trajectory]], tmp_path: Path) -> None:
    path = copied(whole[0], tmp_path)
    data = path.read_bytes()
    pages = [at for at in range(8192, len(data), 8192) if data[at] == 13 and b"question 3" in data[at : at + 8192]]
    assert len(pages) == 2
    overwrite(path, pages[0], bytes(8192))
    assert len(assert_accounted(path, whole[1])) == ROWS


def test_an_index_that_is_damaged_loses_nothing(whole: tuple[Path, list[Trajectory]], tmp_path: Path) -> None:
    path = copied(whole[0], tmp_path)
    overwrite(path, pages_of(path, "uids")[0], b"\xff" * 4000)
    assert len(assert_accounted(path, whole[1])) == ROWS


def test_one_bit_of_an_index_is_found_before_anything_is_built_on_it(
    whole: tuple[Path, list[Trajectory]], tmp_path: Path
) -> None:
    path = copied(whole[0], tmp_path)
    at = pages_of(path, "uids")[0]
    at += path.read_bytes()[at : at + 8192].index(b"t11")
    overwrite(path, at, b"u")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]  # SQLite's shorter look sees nothing
    assert find_damage(path) is not None
    assert len(assert_accounted(path, whole[1])) == ROWS


def test_what_was_met_in_use_is_recovered_by_the_next_to_open_and_only_once(
    whole: tuple[Path, list[Trajectory]], tmp_path: Path
) -> None:
    path = copied(whole[0], tmp_path)
    with JournalWriter(path, "searcher-0") as writer:
        overwrite(path, pages_of(path, "bodies")[0], b"\xff" * 2000)
        with pytest.raises(UserError, match="is damaged: end what uses it; whoever opens it next"):
            writer._database.rows("SELECT sum(length(body)) FROM bodies")
    assert suspect_mark(path).exists()
    overwrite(path, 0, whole[0].read_bytes())  # however it looks now
    assert find_damage(path) is None
    for _ in range(2):
        with JournalFollower(path) as follower:
            (recovery,) = follower.recoveries()
            assert (recovery.why, recovery.rows) == ("SQLite met damage while it was in use", ROWS)
    assert not suspect_mark(path).exists()


@pytest.mark.parametrize("size", [100, 5000, 8192])
def test_a_file_whose_beginning_is_destroyed_gives_its_trajectories_and_their_counts(
    whole: tuple[Path, list[Trajectory]], tmp_path: Path, size: int
) -> None:
    path = copied(whole[0], tmp_path)
    overwrite(path, 0, b"\x55" * size)
    assert len(assert_accounted(path, whole[1])) == ROWS


def test_a_file_that_was_cut_off_gives_what_is_left(whole: tuple[Path, list[Trajectory]], tmp_path: Path) -> None:
    path = copied(whole[0], tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 3 // 4)
    found, _, follower = opened(path)
    follower.close()
    assert 0.3 * ROWS < len(found) < 0.7 * ROWS
    by_uid = {t.uid: t for t in whole[1]}
    assert all(same(t, by_uid[t.uid]) for t in found)


@pytest.mark.parametrize("at", [8000, -16], ids=["page", "header"])
def test_what_was_acknowledged_is_found_in_a_log_whose_beginning_is_damaged(tmp_path: Path, at: int) -> None:
    path, rows = tmp_path / "journal.sqlite", [trajectory(i, range(50), uid=f"t{i}") for i in range(30)]
    with JournalWriter(path, "searcher-0") as writer:
        for t in rows:
            writer.put([t], counters={"generated_trajectories": 1, "generated_tokens": 50})
        copy = tmp_path / "copy"
        copy.mkdir()
        for part in ("", "-wal"):
            shutil.copy(f"{path}{part}", copy / f"journal.sqlite{part}")
    path, wal = copy / "journal.sqlite", copy / "journal.sqlite-wal"
    commits = [frame for frame in wal_frames(wal) if frame.committed_pages]
    assert len(commits) > 30
    overwrite(wal, commits[20].start + at, b"\xff" * min(100, abs(at)))
    assert find_damage(path) == "its log is damaged"
    found = assert_accounted(path, rows)
    assert {t.uid for t in found} == {t.uid for t in rows}
    assert Path(f"{copy}/journal.sqlite.damaged-1-wal").exists()


@pytest.fixture(scope="module")
def of_many_prompts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trajectory]]:
    """A closed journal in which each of 150 prompts has 20 short answers."""
    path = tmp_path_factory.mktemp("many") / "journal.sqlite"
    rows = [trajectory(i // 20, range(40), version=i, uid=f"t{i}") for i in range(3000)]
    with JournalFollower(path), JournalWriter(path, "searcher-0") as writer:
        for i in range(0, len(rows), 140):
            put = rows[i : i + 140]
            tokens = sum(t.length for t in put)
            writer.put(put, counters={"generated_trajectories": len(put), "generated_tokens": tokens})
    return path, rows


@pytest.mark.parametrize("share", [0.15, 0.2, 0.4, 0.6, 0.8, 0.95])
def test_of_a_file_that_was_cut_off_its_share_is_kept_and_as_many_are_counted_as_are_lost(
    of_many_prompts: tuple[Path, list[Trajectory]], share: float, tmp_path: Path
) -> None:
    """Though SQLite refuses it, and the prompts that are ordered by digest have moved behind what needs them."""
    whole, rows = of_many_prompts
    path = copied(whole, tmp_path)
    size = path.stat().st_size
    assert size > 2_000_000
    with path.open("r+b") as file:
        file.truncate(int(size * share))
    found = assert_accounted(path, rows)
    empty = 24 * 8192 / size  # pages that a journal without rows has
    assert share - empty - 0.01 < len(found) / len(rows) < share
    with JournalFollower(path) as follower:
        (recovery,) = follower.recoveries()
        assert (recovery.rows, recovery.lost_rows) == (len(found), len(rows) - len(found))


@pytest.mark.parametrize("pages", [2, 3, 10])
def test_two_pages_tell_how_many_trajectories_are_lost(
    of_many_prompts: tuple[Path, list[Trajectory]], pages: int, tmp_path: Path
) -> None:
    path, rows = copied(of_many_prompts[0], tmp_path), of_many_prompts[1]
    with JournalFollower(path) as follower:
        before = follower.totals()
    os.truncate(path, pages * 8192)
    _, _, follower = opened(path)
    with follower:
        (recovery,) = follower.recoveries()
        assert (recovery.rows, recovery.lost_rows, recovery.lost_tokens) == (0, 3000, before.tokens)
        assert follower.totals() == before
        assert sum(t.length for t in rows) == before.tokens


def test_the_second_page_alone_tells_how_many_trajectories_are_lost(
    whole: tuple[Path, list[Trajectory]], tmp_path: Path
) -> None:
    path = copied(whole[0], tmp_path)
    size = path.stat().st_size
    overwrite(path, 0, bytes(8192))
    overwrite(path, 2 * 8192, bytes(size - 2 * 8192))
    _, gone, follower = opened(path)
    follower.close()
    assert gone == MissingCounts(damaged_trajectories=ROWS, damaged_tokens=sum(t.length for t in whole[1]))


@pytest.mark.parametrize("size", [1, 99, 100, 511, 512, 8192, 12000])
def test_of_less_than_two_pages_nothing_is_known_and_the_journal_opens_empty(
    of_many_prompts: tuple[Path, list[Trajectory]], size: int, tmp_path: Path
) -> None:
    path = copied(of_many_prompts[0], tmp_path)
    os.truncate(path, size)
    found, _, follower = opened(path)
    with follower:
        (recovery,) = follower.recoveries()
        assert (found, recovery.rows, recovery.lost_rows, follower.totals().rows) == ([], 0, 0, 0)
    assert (tmp_path / recovery.damaged).stat().st_size == size


def test_rows_that_were_in_the_log_are_counted_when_the_file_before_it_is_cut_off(tmp_path: Path) -> None:
    path, copy = tmp_path / "journal.sqlite", tmp_path / "copy"
    rows = [trajectory(i // 20, range(40), version=i, uid=f"t{i}") for i in range(1000)]
    with JournalFollower(path) as follower, JournalWriter(path, "searcher-0") as writer:
        for i in range(0, 1000, 20):
            if i == 900:
                follower.checkpoint()
            writer.put(rows[i : i + 20], counters={"generated_trajectories": 20, "generated_tokens": 800})
        copy.mkdir()
        for part in ("", "-wal"):
            shutil.copy(f"{path}{part}", copy / f"journal.sqlite{part}")
    os.truncate(copy / "journal.sqlite", 5 * 8192)
    found = assert_accounted(copy / "journal.sqlite", rows)
    assert {t.uid for t in found} >= {t.uid for t in rows[905:]}
    assert {t.uid for t in found}.isdisjoint({t.uid for t in rows[:890]})


def test_totals_that_have_changed_are_found_and_made_again(
    whole: tuple[Path, list[Trajectory]], tmp_path: Path
) -> None:
    path = copied(whole[0], tmp_path)
    for change in ("'rows'", "'retired_until'"):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"UPDATE totals SET value = value + 64 WHERE name = {change}")
            connection.commit()
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert find_damage(path) == "its totals are not what was written"
        assert len(assert_accounted(path, whole[1])) == ROWS
    with JournalFollower(path) as follower:
        assert follower.totals().rows == ROWS
        assert [r.lost_rows for r in follower.recoveries()] == [0, 0]


def test_what_the_log_has_is_kept_though_most_of_the_file_before_it_is_cut_off(tmp_path: Path) -> None:
    path, rows = tmp_path / "journal.sqlite", [trajectory(0, range(900), uid=f"t{i}") for i in range(405)]
    with JournalFollower(path) as follower, JournalWriter(path, "searcher-0") as writer:
        writer.put(rows[:400])
        follower.checkpoint()
        for t in rows[400:]:
            writer.put([t])
        (tmp_path / "copy").mkdir()
        for part in ("", "-wal"):
            shutil.copy(f"{path}{part}", tmp_path / "copy" / f"journal.sqlite{part}")
    path = tmp_path / "copy" / "journal.sqlite"
    first, *_ = wal_frames(Path(f"{path}-wal"))
    overwrite(Path(f"{path}-wal"), first.start - 24, b"\x7f")  # the number of one page, now far behind all others
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 6)
    found, _, follower = opened(path)
    follower.close()
    assert {t.uid for t in rows[401:]} <= {t.uid for t in found}


def test_what_a_power_cut_left_of_the_last_transaction_is_no_damage() -> None:
    sound = [LogFrame(n, 0, n % 3 == 0) for n in range(1, 10)]
    rest = [LogFrame(10, 0, False), LogFrame(11, 0, True)]
    assert not is_torn(sound, read_count=9)
    assert not is_torn(sound + rest, read_count=9)
    assert is_torn(sound + rest + rest, read_count=9)


def test_recovery_that_is_killed_at_any_of_its_steps_is_ended_by_the_next_to_open(
    whole: tuple[Path, list[Trajectory]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = 0
    for step in range(99):
        folder = tmp_path / str(step)
        folder.mkdir()
        path = copied(whole[0], folder)
        overwrite(path, pages_of(path, "bodies")[1], bytes(8192))
        calls = 0

        def counted(act: str, step: int = step) -> None:
            nonlocal calls
            calls += 1
            if calls > step:
                raise KeyboardInterrupt(act)

        with monkeypatch.context() as patch:
            for name in ("replace", "rename", "link", "fsync"):
                real = getattr(tba.replay.recovery.os, name)
                patch.setattr(
                    tba.replay.recovery.os, name, lambda *a, real=real, name=name: (counted(name), real(*a))[1]
                )
            try:
                lock_and_check(path).close()
                done = True
            except KeyboardInterrupt:
                done = False
        found = assert_accounted(path, whole[1])
        assert len(found) >= ROWS - 4
        assert any(p.name.startswith("journal.sqlite.damaged-") for p in folder.iterdir())
        if done:
            break
        reached += 1
    assert reached >= 4


def test_while_somebody_has_it_open_nobody_looks_it_over(
    whole: tuple[Path, list[Trajectory]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, looks = copied(whole[0], tmp_path), []
    real = tba.replay.recovery.find_damage
    monkeypatch.setattr(tba.replay.recovery, "find_damage", lambda p: (looks.append(p), real(p))[1])
    with JournalFollower(path), JournalWriter(path, "a"):
        assert len(looks) == 1
    with JournalWriter(path, "a"):
        assert len(looks) == 2


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=300)), min_size=1, max_size=6),
    st.none() | st.floats(0, 1),
)
@example([(0.0, b"SQLite format 3\0" + bytes(84))], None)
@example([(0.01953125, b"\x80")], None)  # a column's name in the schema
@example([(0.015625, b"\x80")], None)
def test_whatever_happened_to_the_bytes_a_journal_opens_or_says_in_a_sentence_why_not_and_nothing_is_lost(
    whole: tuple[Path, list[Trajectory]], changes: list[tuple[float, bytes]], cut: float | None
) -> None:
    with TemporaryDirectory() as folder:
        path = copied(whole[0], Path(folder))
        size = path.stat().st_size
        for place, data in changes:
            overwrite(path, int(place * (size - 1)), data)
        if cut is not None:
            with path.open("r+b") as file:
                file.truncate(int(cut * size))
        changed = path.read_bytes()
        try:
            found, _, follower = opened(path)
        except UserError:
            assert path.read_bytes() == changed  # left as it was
            return
        with follower:
            by_uid = {t.uid: t for t in whole[1]}
            assert all(same(t, by_uid[t.uid]) for t in found)
            recoveries = follower.recoveries()
        if recoveries:
            assert (Path(folder) / recoveries[0].damaged).read_bytes() == changed


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=3000) | st.binary(max_size=500).map(lambda rest: b"SQLite format 3\0" + rest))
def test_any_bytes_in_the_journals_place_end_in_a_sentence_and_stay(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        path.write_bytes(data)
        try:
            JournalFollower(path).close()
        except UserError:
            assert path.read_bytes() == data
        else:
            assert not data or any(p.name.startswith("journal.sqlite.damaged") for p in Path(folder).iterdir())


def test_a_sqlite_file_of_somebody_elses_is_never_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.executemany("INSERT INTO recipes VALUES (?)", [(f"{i:0500}",) for i in range(100)])
        connection.commit()
    rng = np.random.default_rng(0)
    overwrite(path, 9000, rng.bytes(5000))
    before = path.read_bytes()
    with pytest.raises(UserError, match="something else"):
        JournalFollower(path)
    assert path.read_bytes() == before


@pytest.fixture
def six(tmp_path: Path) -> tuple[Path, list[Trajectory]]:
    """A journal of six trajectories, and these."""
    path, rows = tmp_path / "journal.sqlite", [trajectory(i, range(4), uid=f"t{i}") for i in range(6)]
    with JournalWriter(path, "searcher-0") as writer:
        writer.put(rows, counters={"generated_trajectories": 6, "generated_tokens": 24})
    return path, rows


def changed_by_sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


COPIED = "UPDATE bodies SET body = (SELECT body FROM bodies WHERE seq = 2) WHERE seq = 3"
SWAPPED = (
    "CREATE TEMP TABLE two AS SELECT seq, body FROM bodies WHERE seq IN (5, 6)",
    "UPDATE bodies SET body = (SELECT body FROM two WHERE two.seq = 11 - bodies.seq) WHERE seq IN (5, 6)",
)


def test_a_body_in_another_trajectorys_place_is_damage_and_is_never_read(six: tuple[Path, list[Trajectory]]) -> None:
    path, _ = six
    changed_by_sql(path, COPIED, *SWAPPED)
    reports: list[str] = []
    with JournalFollower(path, on_damaged=reports.append) as follower:
        assert [t.uid for t in follower.drain()] == ["t0", "t1", "t3"]
        assert follower.take_missing_counts().damaged_trajectories == 3
    assert len(reports) == 3
    assert reports[0] == f"trajectory 3 of {path} is damaged and left out (its content is that of trajectory 't1')"
    with JournalFollower(path) as follower:  # they are taken out, once and for all
        assert [t.uid for t in follower.drain()] == ["t0", "t1", "t3"]


def test_recovery_drops_a_body_that_is_in_another_trajectorys_place(six: tuple[Path, list[Trajectory]]) -> None:
    path, _ = six
    changed_by_sql(path, COPIED)
    suspect_mark(path).touch()
    drained, gone, follower = opened(path)
    with follower:
        assert [t.uid for t in drained] == ["t0", "t1", "t3", "t4", "t5"]
        assert gone.damaged_trajectories == 1


def test_a_row_that_sql_has_removed_is_counted_as_lost(six: tuple[Path, list[Trajectory]]) -> None:
    path, rows = six
    changed_by_sql(path, "DELETE FROM trajectories WHERE seq = 6", "DELETE FROM bodies WHERE seq = 6")
    assert find_damage(path) == "it has 5 rows, and 6 were put into it"
    assert len(assert_accounted(path, rows)) == 5
    with JournalFollower(path) as follower:
        (recovery,) = follower.recoveries()
        assert (recovery.lost_rows, follower.totals().rows) == (1, 6)


def test_bodies_that_sql_has_removed_are_reported(six: tuple[Path, list[Trajectory]]) -> None:
    path, _ = six
    changed_by_sql(path, "DELETE FROM bodies WHERE seq IN (3, 4)")
    reports: list[str] = []
    with JournalFollower(path, on_damaged=reports.append) as follower:
        assert [t.uid for t in follower.drain()] == ["t0", "t1", "t4", "t5"]
        assert follower.take_missing_counts() == MissingCounts(damaged_trajectories=2, damaged_tokens=8)
    assert reports == [f"trajectory {seq} of {path} has lost its content and is left out" for seq in (3, 4)]
    with JournalFollower(path, on_damaged=reports.append) as follower:  # a resume
        follower.drain()
        assert follower.take_missing_counts().damaged_trajectories == 2
    assert len(reports) == 2
