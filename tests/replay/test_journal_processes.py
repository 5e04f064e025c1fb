"""The journal between processes, which may die at any moment."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tba.replay.follower import JournalFollower

SCRIPT = Path(__file__).parent / "writer_process.py"
ENDLESS = 1_000_000


def start(path: Path, owner: str, puts: int, rows: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, str(SCRIPT), str(path), owner, str(puts), str(rows)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_of_three_writing_processes_nothing_is_lost_and_each_row_is_seen_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    writers = [start(path, f"searcher-{i}", puts=30, rows=5) for i in range(3)]
    seen: list[str] = []
    with JournalFollower(path, wal_bytes=1 << 16) as follower:
        while any(w.poll() is None for w in writers):
            seen += [t.uid for t in follower.drain(limit=50)]
        seen += [t.uid for t in follower.drain()]
        assert follower.counters() == {f"searcher-{i}": {"generated": 150} for i in range(3)}
    acknowledged = [uid for w in writers for uid in w.communicate()[0].split()]
    assert [w.returncode for w in writers] == [0, 0, 0]
    assert Counter(seen) == Counter(acknowledged)
    assert len(seen) == 450
    for i in range(3):  # each writer's own order is kept
        own = [uid for uid in seen if uid.startswith(f"searcher-{i}-")]
        assert own == [f"searcher-{i}-{n}-{k}" for n in range(30) for k in range(5)]


@pytest.mark.parametrize("lines", [1, 30, 31, 77, 120])
def test_what_was_acknowledged_before_a_kill_is_there_and_no_put_is_there_by_half(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "journal.sqlite"
    writer = start(path, "searcher-0", puts=ENDLESS, rows=10)
    assert writer.stdout is not None
    acknowledged = [writer.stdout.readline().strip() for _ in range(lines)]
    writer.send_signal(signal.SIGKILL)
    acknowledged += writer.communicate()[0].split()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]
    connection.close()
    with JournalFollower(path) as follower:
        drained = [t.uid for t in follower.drain()]
        counted = follower.counters()["searcher-0"]["generated"]
        totals = follower.totals()
    assert set(acknowledged) <= set(drained)
    assert len(drained) % 10 == 0
    assert counted == len(drained) == totals.rows == totals.tokens // 2
    assert len(drained) - len(acknowledged) <= 10  # at most the one put whose acknowledgement was on its way


def test_writing_and_reading_trajectories_leaves_torch_unloaded() -> None:
    code = (
        "import sys, tba.replay.replay, tba.replay.journal, tba.replay.follower; "
        "sys.exit(any(name.split('.')[0] == 'torch' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
