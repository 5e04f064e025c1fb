"""The journal: one file, many writers, one follower."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_cases import same, trajectory

import tba.replay.recovery
from tba.errors import DeadlineExceeded, UserError
from tba.replay.codec import MissingCounts
from tba.replay.database import network_filesystem
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.replay.missing_rows import acknowledged_counts
from tba.types import LEFT_OUT, Evaluation, Score, Trajectory, Version


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def writer(path: Path) -> Iterator[JournalWriter]:
    with JournalWriter(path, "searcher-0") as writer:
        yield writer


@pytest.fixture
def follower(path: Path) -> Iterator[JournalFollower]:
    with JournalFollower(path) as follower:
        yield follower


def uids(trajectories: list[Trajectory]) -> list[str]:
    return [t.uid for t in trajectories]


def totals(follower: JournalFollower) -> dict[str, int]:
    """What the journal has held."""
    found = follower.totals()
    return {name: getattr(found, name) for name in ("rows", "tokens", "retired_rows", "retired_tokens")}


class Clock:
    """A wall clock that can be set."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def test_what_is_put_is_drained_once_in_order_and_equal(writer: JournalWriter, follower: JournalFollower) -> None:
    rows = [trajectory(i % 3, (i, 5), version=i) for i in range(10)]
    writer.put(rows[:4])
    writer.put(rows[4:])
    assert follower.undrained() == {"trajectories": 10, "tokens": 20}
    drained = follower.drain(limit=3) + follower.drain()
    assert all(map(same, drained, rows))
    assert len(drained) == 10
    assert follower.drain() == []
    assert follower.undrained() == {"trajectories": 0, "tokens": 0}
    assert totals(follower) == {"rows": 10, "tokens": 20, "retired_rows": 0, "retired_tokens": 0}


def test_a_follower_set_back_to_a_position_sees_what_came_after_it(
    writer: JournalWriter, follower: JournalFollower
) -> None:
    rows = [trajectory(tokens=(i,)) for i in range(6)]
    writer.put(rows)
    follower.drain(limit=2)
    position = follower.position
    follower.drain()
    follower.position = position
    assert uids(follower.drain(until=position + 3)) == uids(rows[2:5])


def test_trajectories_of_one_prompt_share_one_prompt_in_memory(
    writer: JournalWriter, follower: JournalFollower
) -> None:
    writer.put([trajectory(0, (i,)) for i in range(3)])
    writer.put([trajectory(0, (9,))])
    assert len({id(t.prompt) for t in follower.drain()}) == 1


def test_prompts_with_the_same_tokens_keep_their_own_text(writer: JournalWriter, follower: JournalFollower) -> None:
    one = trajectory()
    other = replace(trajectory(tokens=(3,)), prompt=replace(one.prompt, text="asked otherwise"))
    assert one.prompt.key == other.prompt.key
    writer.put([one, other])
    assert [t.prompt.text for t in follower.drain()] == [one.prompt.text, "asked otherwise"]


def test_staged_answers_are_on_the_disk_and_given_to_nobody_before_their_group_is_put(
    path: Path, writer: JournalWriter, follower: JournalFollower
) -> None:
    rows = [trajectory(0, (i, 5)) for i in range(4)]
    writer.put([], [], {"grading_trajectories": 4}, [], rows[:2], [7, 7], 4)
    writer.put([], [], {"grading_trajectories": -1}, [], rows[2:3], [7], 4)
    writer.put([], [], {"grading_trajectories": -1}, [], rows[2:3], [7], 4)  # repeated: it changes nothing
    assert follower.counters()["searcher-0"]["grading_trajectories"] == 3
    assert follower.drain() == []
    assert writer.rows() == 0
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM staged").fetchone() == (3,)
    writer.put(rows, [7])
    assert uids(follower.drain()) == uids(rows)
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM staged").fetchone() == (0,)
    writer.resume()
    assert follower.drain() == []


def test_what_a_killed_writer_had_staged_is_put_by_the_next_of_its_name_marked_with_what_each_group_lacks(
    path: Path, writer: JournalWriter, follower: JournalFollower
) -> None:
    rows = [trajectory(0, (i, 5)) for i in range(4)]
    counted = {"grading_trajectories": 5, "grading_tokens": 10, "generated_tokens": 16}
    writer.put([], [], counted, [], rows[:3], [7, 7, 8], 4)
    with JournalWriter(path, "searcher-1") as other:
        other.put([], staged=rows[3:], positions=[9], samples=4)
        other.resume()
        assert uids(follower.drain()) == uids(rows[3:])
    with JournalWriter(path, "searcher-0") as again:
        again.resume()
        again.resume()
        assert again.rows() == 4
    drained = follower.drain()
    assert uids(drained) == uids(rows[:3])
    assert [t.provenance[LEFT_OUT] for t in drained] == [1.0, 1.0, 3.0]  # each group was to have 4
    assert all(same(replace(t, provenance=row.provenance), row) for t, row in zip(drained, rows, strict=False))
    counts = follower.counters()["searcher-0"]
    assert (counts["in_flight_trajectories"], counts["in_flight_tokens"]) == (5, 10)
    assert (counts["grading_trajectories"], counts["grading_tokens"]) == (0, 0)


def test_staged_answers_survive_a_damaged_file(path: Path) -> None:
    rows = [trajectory(0, (i, 5)) for i in range(3)]
    with JournalWriter(path, "searcher-0") as writer:
        writer.put(rows[:1])
        writer.put([], staged=rows[1:], positions=[7, 7], samples=4)
    Path(f"{path}-suspect").touch()  # as after damage that a process met
    with JournalWriter(path, "searcher-0") as again:
        again.resume()
    with JournalFollower(path) as follower:
        assert uids(follower.drain()) == uids(rows)


def test_a_repeated_put_changes_nothing(writer: JournalWriter, follower: JournalFollower) -> None:
    rows = [trajectory(tokens=(i,)) for i in range(3)]
    for _ in range(3):
        writer.put(rows, counters={"generated": 3})
    assert uids(follower.drain()) == uids(rows)
    assert follower.totals().rows == 3
    assert follower.counters() == {"searcher-0": {"generated": 3}}


def test_a_put_that_fails_leaves_no_trace(writer: JournalWriter, follower: JournalFollower) -> None:
    (position,) = writer.lease(1, seconds=0)
    broken = replace(trajectory(), log_reference=np.zeros(99, dtype=np.float32))
    with pytest.raises(ValueError, match="shape"):
        writer.put([trajectory(), broken], leases=[position], counters={"generated": 2})
    assert follower.drain() == []
    assert follower.counters() == {}
    assert writer.lease(1, seconds=9) == [position]


def test_counts_are_kept_by_owner_and_add_up(path: Path, follower: JournalFollower) -> None:
    with JournalWriter(path, "a") as a, JournalWriter(path, "b") as b:
        a.count(generated=2, rejected=1)
        b.count(generated=5)
        a.put([], counters={"generated": 3})
    assert follower.counters() == {"a": {"generated": 5, "rejected": 1}, "b": {"generated": 5}}


def test_one_writer_may_be_shared_by_threads(writer: JournalWriter, follower: JournalFollower) -> None:
    rows = [[trajectory(tokens=(k, i)) for i in range(20)] for k in range(4)]
    threads = [threading.Thread(target=lambda own=own: [writer.put([t]) for t in own]) for own in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    drained = uids(follower.drain())
    assert sorted(drained) == sorted(t.uid for own in rows for t in own)


def test_positions_are_leased_in_order_and_none_twice(path: Path) -> None:
    with JournalWriter(path, "a") as a, JournalWriter(path, "b") as b:
        assert a.lease(3, seconds=1e6) == [0, 1, 2]
        assert b.lease(2, seconds=1e6) == [3, 4]
        a.put([], leases=[0, 1, 2])
        assert a.lease(2, seconds=1e6) == [5, 6]


def test_leases_that_ran_out_are_handed_out_again_first(path: Path) -> None:
    clock = Clock()
    with JournalWriter(path, "a", clock=clock) as a, JournalWriter(path, "b", clock=clock) as b:
        assert a.lease(3, seconds=10) == [0, 1, 2]
        a.put([], leases=[1])
        clock.now += 10
        assert b.lease(3, seconds=10) == [0, 2, 3]
        assert a.lease(1, seconds=10) == [4]


def test_what_a_dead_owner_held_runs_out_when_its_successor_resumes(path: Path) -> None:
    with JournalWriter(path, "a") as a, JournalWriter(path, "b") as b:
        assert a.lease(2, seconds=1e6) == [0, 1]
        assert b.lease(1, seconds=1e6) == [2]
        assert a.claim("evaluate 0.4", seconds=1e6)
        assert b.claim("evaluate 0.6", seconds=1e6)
        a.resume()
        assert b.lease(3, seconds=1e6) == [0, 1, 3]
        assert a.claim("evaluate 0.4", seconds=1e6)
        assert not a.claim("evaluate 0.6", seconds=1e6)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.just("lease"), st.integers(1, 3), st.integers(1, 20))
        | st.tuples(st.just("pass"), st.integers(1, 15), st.just(0))
        | st.tuples(st.just("set_back"), st.integers(1, 100), st.just(0))
        | st.tuples(st.just("give_back"), st.integers(0, 9), st.just(0)),
        max_size=25,
    )
)
def test_no_live_position_is_leased_twice_even_when_the_clock_is_set_back(
    operations: list[tuple[str, int, int]],
) -> None:
    clock, elapsed = Clock(), 0
    ends: dict[int, int] = {}  # position -> when its lease ends, in time that really passed
    done: set[int] = set()
    with TemporaryDirectory() as folder, JournalWriter(Path(folder) / "j", "a", clock=clock) as writer:
        for verb, number, seconds in operations:
            if verb == "pass":
                clock.now += number
                elapsed += number
            elif verb == "set_back":
                clock.now -= number
            elif verb == "give_back":
                writer.put([], leases=[number])
                if number in ends:
                    done.add(number)
            else:
                positions = writer.lease(number, seconds)
                assert len(set(positions)) == number
                assert not done & set(positions)
                assert all(ends.get(p, 0) <= elapsed for p in positions)
                ends |= dict.fromkeys(positions, elapsed + seconds)
        writer.lease(0, 1)  # sees that the clock was set back
        clock.now += 20  # longer than any lease
        assert set(writer.lease(len(ends), 1)) >= set(ends) - done


def test_a_job_is_claimed_by_exactly_one(path: Path) -> None:
    claims: list[bool] = []

    def claim(owner: str) -> None:
        with JournalWriter(path, owner) as writer:
            claims.append(writer.claim("evaluate 0.4", seconds=1e6))

    threads = [threading.Thread(target=claim, args=(f"searcher-{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(claims) == [False] * 5 + [True]


def test_a_job_can_be_claimed_again_once_its_time_is_over_but_not_once_it_is_done(
    path: Path, follower: JournalFollower
) -> None:
    clock = Clock()
    first = Evaluation(Version(0, 4), 12.5, "pass@1/greedy", 0.5, 100, 1.5, 900)
    late = replace(first, value=0.4)
    with JournalWriter(path, "a", clock=clock) as a, JournalWriter(path, "b", clock=clock) as b:
        assert a.claim("evaluate 0.4", seconds=10)
        assert not b.claim("evaluate 0.4", seconds=10)
        clock.now += 10
        assert b.claim("evaluate 0.4", seconds=10)
        assert not follower.job_done("evaluate 0.4")
        b.finish("evaluate 0.4", [first])
        a.finish("evaluate 0.4", [late])  # took too long: somebody else has done it
        clock.now += 1000
        assert not a.claim("evaluate 0.4", seconds=10)
        assert follower.evaluations() == [first]
        assert follower.evaluations() == []
        assert follower.job_done("evaluate 0.4")
        a.finish("evaluate 0.6", [replace(first, version=Version(0, 6))])
    assert [e.version for e in follower.evaluations()] == [Version(0, 6)]
    assert [follower.job_done(f"evaluate 0.{n}") for n in (4, 5, 6)] == [True, False, True]


def test_retention_deletes_the_oldest_drained_bodies_above_a_size_and_counts_them(
    path: Path, writer: JournalWriter
) -> None:
    rows = [trajectory(tokens=range(2000), uid=f"t{i}") for i in range(100)]  # 16 kB each
    with JournalFollower(path, keep_bytes=800_000) as follower:
        writer.put(rows)
        assert uids(follower.drain(limit=10)) == uids(rows[:10])
        retired = follower.totals().retired_rows
        assert retired == 10  # it is far too large, but what was not drained yet is never deleted
        assert uids(follower.drain()) == uids(rows[10:])
        totals = follower.totals()
        assert totals.rows == 100
        assert 60 <= totals.retired_rows <= 75
        assert totals.retired_tokens == 2000 * totals.retired_rows
        assert follower.undrained() == {"trajectories": 0, "tokens": 0}
        follower.position = 0
        assert uids(follower.drain()) == uids(rows[totals.retired_rows :])
        assert follower.take_missing_counts() == MissingCounts(totals.retired_rows, totals.retired_tokens)
        assert follower.take_missing_counts() == MissingCounts()
        writer.put(rows[:3])  # a repeat is known even when the body has gone
        assert follower.drain() == []


def test_the_file_does_not_grow_beyond_the_size_it_is_kept_to(path: Path, writer: JournalWriter) -> None:
    with JournalFollower(path, keep_bytes=1_000_000, wal_bytes=100_000) as follower:
        for n in range(60):
            writer.put([trajectory(n, range(2000)) for _ in range(5)])
            follower.drain()
        assert follower.totals().rows == 300
    assert path.stat().st_size < 1_300_000


def test_a_trajectory_whose_bytes_have_changed_is_left_out_counted_and_never_learnt_from(
    path: Path, writer: JournalWriter
) -> None:
    rows = [trajectory(tokens=(i, 7, 7), uid=f"t{i}") for i in range(5)]
    writer.put(rows)
    with closing(sqlite3.connect(path)) as connection, connection:
        ((body,),) = connection.execute("SELECT body FROM bodies WHERE seq = 3")
        changed = bytearray(body)
        changed[-20] ^= 1  # one bit of a log-probability
        connection.execute("UPDATE bodies SET body = ? WHERE seq = 3", (bytes(changed),))
    connection.close()
    with JournalFollower(path) as follower:
        assert uids(follower.drain()) == ["t0", "t1", "t3", "t4"]
        assert follower.take_missing_counts() == MissingCounts(damaged_trajectories=1, damaged_tokens=3)
        follower.position = 0
        assert uids(follower.drain()) == ["t0", "t1", "t3", "t4"]
        assert follower.take_missing_counts() == MissingCounts(damaged_trajectories=1, damaged_tokens=3)


def test_the_write_ahead_log_stays_bounded_while_a_follower_drains(path: Path, writer: JournalWriter) -> None:
    bound = 256 << 10
    with JournalFollower(path, wal_bytes=bound) as follower:
        sizes = []
        for n in range(40):
            writer.put([trajectory(n, tuple(range(400))) for _ in range(10)])
            follower.drain()
            sizes.append(follower.wal_size)
        assert max(sizes) <= bound
        assert 0 in sizes  # it was truncated, not just never full
        for n in range(40):
            writer.put([trajectory(n, tuple(range(400))) for _ in range(10)])
        assert follower.wal_size > bound  # writers never checkpoint
        assert len(follower.drain()) == 400
        assert follower.wal_size == 0


def test_only_the_first_follower_checkpoints(path: Path, writer: JournalWriter) -> None:
    with JournalFollower(path) as first, JournalFollower(path) as second:
        writer.put([trajectory()])
        assert first.checkpoint()
        writer.put([trajectory(tokens=(3,))])
        assert not second.checkpoint()
        assert second.wal_size > 0
        assert len(second.drain()) == 2


def test_an_open_reader_elsewhere_holds_up_neither_writers_nor_the_follower(
    path: Path, writer: JournalWriter, follower: JournalFollower
) -> None:
    writer.put([trajectory()])
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM trajectories").fetchone()
    writer.put([trajectory(tokens=(3,))])
    assert len(follower.drain()) == 2
    assert not follower.checkpoint()  # tried again later
    reader.close()
    assert follower.checkpoint()


def test_a_lock_that_is_never_released_ends_in_an_error_that_names_the_file(path: Path) -> None:
    with JournalWriter(path, "a", deadline_s=0.05) as writer:
        hog = sqlite3.connect(path, isolation_level=None)
        hog.execute("BEGIN IMMEDIATE")
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.05 s for the write lock of .*journal\.sqlite"):
            writer.put([trajectory()])
        hog.execute("ROLLBACK")
        hog.close()
        writer.put([trajectory()])  # it can be used as before


def test_a_writer_that_waits_for_the_lock_shows_that_it_lives(path: Path) -> None:
    hog = sqlite3.connect(path, isolation_level=None)
    signs: list[int] = []

    def sign() -> None:
        signs.append(1)
        if len(signs) == 3:
            hog.execute("ROLLBACK")

    with JournalWriter(path, "a", on_wait=sign) as writer:
        hog.execute("BEGIN IMMEDIATE")
        writer.put([trajectory()])
        assert writer.rows() == 1
    assert len(signs) == 3
    hog.close()


def test_a_full_disk_is_said_in_one_sentence_and_leaves_the_journal_usable(
    writer: JournalWriter, follower: JournalFollower
) -> None:
    connection = writer._database._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(UserError, match="its disk is full: free some space"):
        writer.put([trajectory(tokens=tuple(range(20_000)))])
    connection.execute("PRAGMA max_page_count = 100000")
    writer.put([trajectory(uid="kept")])
    assert uids(follower.drain()) == ["kept"]


def test_a_network_filesystem_is_refused_in_one_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tba.replay.recovery, "network_filesystem", lambda folder: "nfs4")
    with pytest.raises(UserError, match=r"network filesystem \(nfs4\).*--run.journal-dir"):
        JournalWriter(path, "a")
    with pytest.raises(UserError, match=r"network filesystem \(nfs4\).*--run.journal-dir"):
        JournalFollower(path)
    assert not path.exists()


def test_the_filesystem_of_a_path_is_that_of_the_longest_mount_point_above_it(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/vda / ext4 rw 0 0\n"
        "server:/home /home nfs4 rw 0 0\n"
        "/dev/vdb /home/me/local ext4 rw 0 0\n"
        "host:/x /mnt/my\\040share fuse.sshfs rw 0 0\n"
        "/dev/vdc /hidden ext4 rw 0 0\n"
        "//server/y /hidden cifs rw 0 0\n"
    )
    kinds = {
        "/tmp/run": None,
        "/home/me/run": "nfs4",
        "/home/me/local/run": None,
        "/homestead": None,
        "/mnt/my share/run": "fuse.sshfs",
        "/hidden/run": "cifs",
    }
    assert {p: network_filesystem(Path(p), mounts) for p in kinds} == kinds
    assert network_filesystem(Path("/home/me/run"), tmp_path / "no mount table") is None


def test_files_that_are_no_journal_of_this_version_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("these are not the bytes of any database" * 40)
    with pytest.raises(UserError, match="not a SQLite file"):
        JournalFollower(text)
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE recipes (name)")
    connection.commit()
    connection.close()
    with pytest.raises(UserError, match="SQLite file of something else"):
        JournalWriter(other, "a")


@pytest.mark.parametrize("version", [6, 99])
def test_a_journal_of_another_version_is_refused_in_a_sentence_that_names_it_and_left_as_it_is(
    path: Path, version: int
) -> None:
    with JournalWriter(path, "a") as writer:
        writer.put([trajectory()])
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    before = path.read_bytes()
    for end in (lambda: JournalWriter(path, "a"), lambda: JournalFollower(path)):
        with pytest.raises(UserError, match=f"schema version {version}, this program reads version 7: open it with"):
            end()
    assert path.read_bytes() == before


def logs(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


LATER, LATEST = Version(0, 50), Version(0, 100)


def test_what_is_asked_for_is_scored_once_newest_first_and_drained_once(
    path: Path, writer: JournalWriter, follower: JournalFollower
) -> None:
    rows = [trajectory(i % 2, (i, 5)) for i in range(6)]
    writer.put(rows)
    follower.ask(LATER, uids(rows[:5]))
    with JournalWriter(path, "searcher-1") as other:
        assert writer.unscored(LATEST, 9, 1e6) == []
        mine, others = writer.unscored(LATER, 2, 1e6), other.unscored(LATER, 9, 1e6)
    assert all(map(same, mine + others, rows[4::-1]))
    scores = [Score(t.uid, LATER, logs(-1.5, -i / 3)) for i, t in enumerate(mine)]
    for _ in range(2):
        writer.put_scores(scores, {"rescored_trajectories": 2})
    assert [same(a, b) for a, b in zip(follower.drain_scores(), scores, strict=True)] == [True, True]
    assert follower.drain_scores() == []
    assert follower.counters() == {"searcher-0": {"rescored_trajectories": 2}}
    follower.score_position = 0
    assert [s.uid for s in follower.drain_scores(limit=1)] == [mine[0].uid]
    assert all(map(same, follower.drain(), rows))  # a trajectory keeps what it came with


def test_what_was_scored_is_not_asked_for_again_and_a_later_reference_takes_the_place_of_an_earlier(
    writer: JournalWriter, follower: JournalFollower
) -> None:
    rows = [trajectory(tokens=(i,)) for i in range(4)]
    writer.put(rows)
    follower.ask(LATER, uids(rows[:3]))
    writer.put_scores([Score(rows[1].uid, LATER, logs(-1.0))])
    follower.ask(LATER, uids(rows))
    assert uids(writer.unscored(LATER, 9, seconds=0)) == uids([rows[3], rows[2], rows[0]])
    follower.ask(LATEST, uids(rows))
    assert writer.unscored(LATER, 9, seconds=0) == []
    writer.put_scores([Score(rows[3].uid, LATER, logs(-2.0))])  # by somebody who was still at it
    assert uids(writer.unscored(LATEST, 9, seconds=0)) == uids(rows[::-1])


def test_what_a_dead_searcher_was_scoring_is_handed_out_again(path: Path, follower: JournalFollower) -> None:
    clock, rows = Clock(), [trajectory(tokens=(i,)) for i in range(3)]
    with JournalWriter(path, "a", clock=clock) as a, JournalWriter(path, "b", clock=clock) as b:
        a.put(rows)
        follower.ask(LATER, uids(rows))
        assert uids(a.unscored(LATER, 2, seconds=10)) == uids(rows[:0:-1])
        assert uids(b.unscored(LATER, 9, seconds=1e6)) == uids(rows[:1])
        clock.now += 10
        assert uids(b.unscored(LATER, 1, seconds=1e6)) == uids(rows[2:])
        b.resume()  # started again
        assert uids(b.unscored(LATER, 9, seconds=1e6)) == uids(rows[::-1])


def test_a_writer_whose_file_was_taken_away_acknowledges_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with JournalWriter(path, "searcher-0") as writer:
        writer.put([trajectory(uid=f"t{i}") for i in range(3)])
        os.rename(path, tmp_path / "elsewhere")
        with pytest.raises(UserError, match="was deleted while it was in use, and with it 3 rows are missing"):
            writer.put([trajectory(uid="t9")])
        os.rename(tmp_path / "elsewhere", path)
        writer.put([trajectory(uid="t9")])
        assert writer.rows() == 4
    os.rename(path, tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is gone: put it back"):
        JournalWriter(path, "searcher-0", create=False)
    assert not path.exists()


def test_a_journal_that_is_set_back_to_an_older_copy_is_refused_by_the_number_of_its_rows(path: Path) -> None:
    follower = JournalFollower(path)
    with JournalWriter(path, "searcher-0") as writer:
        writer.put([trajectory(seed) for seed in range(5)])
        assert len(follower.drain()) == 5
        writer.put([trajectory(seed) for seed in range(5, 12)])
        assert len(follower.drain()) == 7
        with closing(sqlite3.connect(path)) as older, older:  # as readers see it once files and log are old
            older.execute("DELETE FROM trajectories WHERE seq > 5")
            older.execute("DELETE FROM bodies WHERE seq > 5")
            older.execute("UPDATE totals SET value = 5, again = 5 WHERE name = 'rows'")
        said = "was set back to an older copy while it was in use: it has 5 rows and had 12, so at least 7 are missing"
        for act in (follower.drain, follower.totals, lambda: writer.put([trajectory(12)]), follower.close):
            with pytest.raises(UserError, match=said):
                act()
    with JournalFollower(path) as follower:
        assert len(follower.drain()) == 5  # and nothing was added to it
    assert acknowledged_counts(path).rows == 12  # what was put last stays known
    Path(f"{path}-acknowledged", "searcher-0").write_text("twelve")
    assert acknowledged_counts(path).rows == 0


def test_a_journal_that_is_written_over_by_another_program_is_noticed_by_its_follower(path: Path) -> None:
    follower = JournalFollower(path)
    with JournalWriter(path, "searcher-0") as writer:
        writer.put([trajectory(seed) for seed in range(5)])
        assert follower.checkpoint()
        older = path.read_bytes()
        writer.put([trajectory(seed) for seed in range(5, 60)])
        assert follower.checkpoint()
        assert follower.checkpoint()  # its own writing is nobody else's
        assert len(follower.drain()) == 60
        with path.open("r+b") as file:
            file.write(older)
            file.flush()
            os.utime(path)
        for act in (follower.drain, follower.close):
            with pytest.raises(UserError, match="was written over by another program while it was in use"):
                act()


def test_a_second_trainer_is_refused_the_journal_and_gets_it_once_the_first_has_gone(path: Path) -> None:
    with JournalFollower(path) as second:
        with JournalFollower(path) as first:
            first.lead(0.0)
            first.lead(0.0)  # it has it already
            with pytest.raises(UserError, match="another trainer uses"):
                second.lead(0.1)
        second.lead(0.0)


def test_a_transaction_that_is_rolled_back_leaves_no_rows_to_be_missed(path: Path, writer: JournalWriter) -> None:
    writer.put([trajectory(0)])
    database = writer._database

    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE totals SET value = value + 7, again = again + 7 WHERE name = 'rows'")
        database._require_rows()
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"), database.transaction() as connection:
        fail(connection)
    writer.put([trajectory(1)])  # no row has gone
    assert writer.rows() == 2
