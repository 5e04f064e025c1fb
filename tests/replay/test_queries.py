"""A journal as people read it: counted, asked in SQL, written out; never changed by it."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trajectory_cases import same, trajectory

from tba.__main__ import main
from tba.command.replay import uses_of
from tba.errors import DeadlineExceeded, TbaError, UserError
from tba.replay.codec import pack_uses
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.replay.queries import JournalQueries, Share
from tba.runtime.run_directory import RunDirectory
from tba.tables import read_table
from tba.types import ELSEWHERE

ROWS = 60


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a journal: two searchers, versions 0 to 29, rewards 0, 0.5 and 1, some of it used."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.json").write_text("{}")
    rows = [
        replace(
            trajectory(i % 3, (i, 5), version=i // 2, reward=(i % 3) / 2, uid=f"t{i:02}"),
            provenance={"searcher": f"searcher-{i % 2}"},
        )
        for i in range(ROWS)
    ]
    for n in range(2):
        with JournalWriter(folder / "journal.sqlite", f"searcher-{n}") as writer:
            writer.put([t for t in rows if t.provenance["searcher"] == f"searcher-{n}"])
    with JournalWriter(folder / "journal.sqlite", "import") as writer:
        writer.put([trajectory(0, (99,), version=ELSEWHERE, reward=1.0, uid="imported")])
    used = np.zeros(ROWS + 2, dtype=np.int32)
    used[[1, 2, 31]] = 5, 1, 5  # t00, t02 and, the first of the other searcher, t01
    step = folder / "checkpoints" / "step-1"
    step.mkdir(parents=True)
    state = {"replay": {"uses": pack_uses(used)}}
    (step / "run.json").write_text(json.dumps({"version": "0.1", "state": state, "files": {}}))
    return folder


@pytest.fixture
def reader(run: Path) -> Iterator[JournalQueries]:
    with JournalQueries(run / "journal.sqlite", uses_of(RunDirectory.open(run)), deadline_s=20.0) as reader:
        yield reader


def test_each_count_has_all_trajectories_in_it_once(reader: JournalQueries) -> None:
    assert reader.by_owner() == [
        Share("import", 1, 1, 1.0),
        Share("searcher-0", 30, 60, 0.5),
        Share("searcher-1", 30, 60, 0.5),
    ]
    assert reader.by_reward() == [Share("0", 20, 40, 0.0), Share("0.5", 20, 40, 0.5), Share("1", 21, 41, 1.0)]
    assert [(s.name, s.trajectories) for s in reader.by_uses()] == [("never", 58), ("1", 1), ("4 to 7", 2)]
    versions = reader.by_version()
    assert versions[0] == Share("none", 1, 1, 1.0)
    assert [s.name for s in versions[1:3]] == ["0.0 to 0.3", "0.4 to 0.7"]
    for shares in (versions, reader.by_owner(), reader.by_reward(), reader.by_uses()):
        assert sum(s.trajectories for s in shares) == ROWS + 1
        assert sum(s.tokens for s in shares) == 2 * ROWS + 1


def test_many_rewards_are_counted_in_ten_ranges(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with JournalWriter(path, "a") as writer:
        writer.put([trajectory(tokens=(i,), reward=i / 10 - 2) for i in range(101)])
    with JournalQueries(path) as reader:
        shares = reader.by_reward()
    assert [s.trajectories for s in shares] == [10] * 9 + [11]
    assert (shares[0].name, shares[-1].name) == ("-2 to -1", "7 to 8")


def test_a_query_sees_facts_uses_and_what_is_written_in_bodies(reader: JournalQueries) -> None:
    names, rows = reader.query(
        "SELECT uid, uses, json_extract(facts(body), '$.provenance.searcher') AS who "
        "FROM trajectories JOIN uses USING (uid) JOIN bodies USING (seq) ORDER BY uid"
    )
    assert names == ["uid", "uses", "who"]
    assert list(rows) == [("t00", 5, "searcher-0"), ("t01", 5, "searcher-1"), ("t02", 1, "searcher-0")]


@pytest.mark.parametrize(
    "sql",
    [
        *("DELETE FROM trajectories", "UPDATE bodies SET body = x''", "INSERT INTO uses VALUES ('x', 1)"),
        *("DROP TABLE prompts", "CREATE TABLE more (x)", "CREATE TEMP TABLE more (x)", "VACUUM", "BEGIN", ""),
        *("ATTACH DATABASE '{folder}/other.sqlite' AS other", "VACUUM INTO '{folder}/other.sqlite'"),
        *("PRAGMA journal_mode = DELETE", "PRAGMA query_only = OFF", "SELECT load_extension('x')", "REINDEX"),
        *("SELECT 1; DELETE FROM trajectories", "EXPLAIN DELETE FROM trajectories", "SELECT * FROM nothing"),
    ],
)
def test_what_is_no_select_is_refused_in_a_sentence_and_changes_nothing(run: Path, sql: str) -> None:
    journal = run / "journal.sqlite"
    with JournalQueries(journal) as reader, pytest.raises(UserError, match="SELECT"):
        list(reader.query(sql.format(folder=run))[1])
    assert not (run / "other.sqlite").exists()
    with JournalFollower(journal) as follower:
        assert len(follower.drain()) == ROWS + 1


def test_a_query_that_takes_too_long_is_ended(run: Path) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"
    with JournalQueries(run / "journal.sqlite", deadline_s=0.05) as reader:
        for what in ("max(i)", "i"):
            with pytest.raises(DeadlineExceeded, match=r"took longer than 0\.05 s"):
                for _ in reader.query(endless.format(what))[1]:
                    pass
        reader.deadline_s = 60  # what ends by itself may take its time on a busy machine
        assert reader.by_owner()


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(max_size=40)
    | st.lists(
        st.sampled_from(
            ["SELECT", "*", "FROM", "bodies", "uses", "WHERE", "facts(body)", "1", ";", "ATTACH", "'", "(", ")"]
        ),
        max_size=8,
    ).map(" ".join)
)
def test_any_text_as_a_query_ends_in_rows_or_in_a_sentence(reader: JournalQueries, sql: str) -> None:
    try:
        names, rows = reader.query(sql)
    except TbaError:
        return
    assert all(len(row) == len(names) for row in rows)


def test_what_is_written_out_is_what_an_import_reads(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    assert main(["replay", str(run), "--export", str(file)]) == 0
    lines = [values for _, values in read_table(file)]
    assert len(lines) == ROWS + 1
    assert isinstance(lines[0], dict)
    kept = {name: lines[0][name] for name in ("prompt", "reward", "uid", "version", "source", "uses", "tokens")}
    assert kept == {
        "prompt": "question 0",
        "reward": 0.0,
        "uid": "t00",
        "version": "0.0",
        "source": "searcher-0",
        "uses": 5,
        "tokens": [0, 5],
    }
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".all")] == []


def test_an_episode_of_several_segments_goes_through_the_journal_and_into_an_export(run: Path, tmp_path: Path) -> None:
    t = trajectory(tokens=(1, 2, 3), uid="episode")
    mask, begins = np.array([True, False, True]), np.array([1], np.int32)
    original = replace(t, completion=replace(t.completion, mask=mask, begins=begins))
    with JournalWriter(run / "journal.sqlite", "serve") as writer:
        writer.put([original])
    with JournalFollower(run / "journal.sqlite") as follower:
        assert same(follower.drain()[-1], original)
    file = tmp_path / "all.jsonl"
    assert main(["replay", str(run), "--export", str(file)]) == 0
    first, *_, last = [values for _, values in read_table(file)]
    assert (first["mask"], first["begins"]) == (None, None)
    assert (last["mask"], last["begins"]) == ([True, False, True], [1])


def test_an_export_that_cannot_be_is_said_in_a_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, said in (
        (tmp_path / "all.csv", "give a name that ends in .jsonl or .parquet"),
        (tmp_path / "no such folder" / "all.jsonl", "cannot be written"),
    ):
        assert main(["replay", str(run), "--export", str(file)]) == 2
        assert said in capsys.readouterr().err
    assert main(["replay", str(run), "--export", "a.jsonl", "--sql", "SELECT 1"]) == 2
    assert main(["replay", str(tmp_path / "nothing")]) == 2
    assert main(["replay", str(run), "runs/OTHER"]) == 2


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_pyarrow_is_one_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--export", str(run / "all.parquet")]) == 2
    assert "needs the package pyarrow" in capsys.readouterr().err


def test_a_parquet_file_has_the_same_rows(run: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert main(["replay", str(run), "--export", str(run / "all.parquet")]) == 0
    rows = parquet.read_table(run / "all.parquet").to_pylist()
    assert [row["tokens"] for row in rows[:2]] == [[0, 5], [2, 5]]
    assert json.loads(rows[0]["provenance"]) == {"searcher": "searcher-0"}


def test_tba_replay_prints_all_counts_and_a_query_prints_columns_between_tabs(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "61 trajectories, 121 tokens" in said
    for line in ("searcher-1 30 60 0.5", "0.5 20 40 0.5", "none 1 1 1", "4 to 7 2 4 0.25"):
        assert line in said
    assert main(["replay", str(run), "--sql", "SELECT uid, reward, NULL, x'00' FROM trajectories LIMIT 1"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "t00\t0.0\t\t<1 bytes>"


def test_reading_leaves_a_journal_of_the_present_version_byte_for_byte(run: Path) -> None:
    journal = run / "journal.sqlite"
    with JournalFollower(journal):  # moves what is in the log into the file
        pass
    before = journal.read_bytes()
    assert main(["replay", str(run), "--sql", "SELECT count(*) FROM trajectories"]) == 0
    assert journal.read_bytes() == before
    with sqlite3.connect(journal) as connection:
        assert connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]
    connection.close()


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT hex(zeroblob(1000000000))", "string or blob too big"),
        ("SELECT " + ",".join(["zeroblob(60000000) || ''"] * 300), "needs more than 512 MB of memory"),
        (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 9) SELECT zeroblob(60000000) FROM n",
            "the answer is longer than 256 MB",
        ),
    ],
)
def test_a_query_has_bounded_memory_and_a_bounded_answer(
    run: Path, sql: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(run), "--sql", sql]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert complaint.count("\n") == 1
