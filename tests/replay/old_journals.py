"""Journals as earlier versions of the program made them: their SQL, as it was, and rows in their format."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tba.replay.codec import encode_prompt
from tba.replay.schema import prompt_id
from tba.types import Trajectory

_COMMON = """
CREATE TABLE prompts (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE trajectories (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, prompt INTEGER NOT NULL, tokens INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE TABLE leases (position INTEGER PRIMARY KEY, owner TEXT NOT NULL, issued REAL NOT NULL, seconds REAL NOT NULL);
CREATE TABLE jobs (
    job TEXT PRIMARY KEY, owner TEXT NOT NULL, issued REAL NOT NULL, seconds REAL NOT NULL, done INTEGER NOT NULL
);
CREATE TABLE evaluations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, version TEXT NOT NULL, wall_seconds REAL NOT NULL,
    metric TEXT NOT NULL, value REAL NOT NULL, n INTEGER NOT NULL, seconds REAL NOT NULL, tokens INTEGER NOT NULL
);
CREATE TABLE counters (owner TEXT, name TEXT, value INTEGER NOT NULL, PRIMARY KEY (owner, name)) WITHOUT ROWID;
CREATE TABLE totals (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO totals VALUES ('rows', 0), ('tokens', 0), ('retired_rows', 0), ('retired_tokens', 0), ('positions', 0);
"""
_UIDS = {
    1: "CREATE TABLE uids (uid TEXT PRIMARY KEY) WITHOUT ROWID;",
    2: "CREATE TABLE uids (uid TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID;",
}
_SCORES = """
CREATE TABLE unscored (
    seq INTEGER PRIMARY KEY, reference TEXT NOT NULL, owner TEXT NOT NULL, issued REAL NOT NULL, seconds REAL NOT NULL
);
CREATE TABLE scores (
    place INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT NOT NULL, reference TEXT NOT NULL, body BLOB NOT NULL,
    UNIQUE (uid, reference)
);
"""
_OUTCOMES = """
CREATE TABLE outcomes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, position INTEGER NOT NULL, successes REAL NOT NULL, failures REAL NOT NULL
);
"""
SCHEMAS = {1: _COMMON + _UIDS[1], 2: _COMMON + _UIDS[2] + _SCORES, 3: _COMMON + _UIDS[2] + _SCORES + _OUTCOMES}


def make(path: Path, version: int, trajectories: Sequence[Trajectory], retired: int = 0) -> None:
    """A journal of an earlier version: `trajectories`, of which the first `retired` have been deleted again."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(SCHEMAS[version])
    connection.execute(f"PRAGMA application_id = {0x54424131}")
    connection.execute(f"PRAGMA user_version = {version}")
    for t in trajectories:
        prompt = encode_prompt(t.prompt)
        connection.execute("INSERT OR IGNORE INTO prompts VALUES (?, ?)", (prompt_id(prompt), prompt))
        row = (prompt_id(prompt), t.length, body_of(t))
        seq = connection.execute("INSERT INTO trajectories (prompt, tokens, body) VALUES (?, ?, ?)", row).lastrowid
        uid = (t.uid,) if version == 1 else (t.uid, seq)
        connection.execute(f"INSERT INTO uids VALUES ({','.join('?' * len(uid))})", uid)
    tokens = [t.length for t in trajectories]
    totals = {
        "rows": len(tokens),
        "tokens": sum(tokens),
        "positions": 7,
        "retired_rows": retired,
        "retired_tokens": sum(tokens[:retired]),
    }
    connection.executemany("UPDATE totals SET value = ? WHERE name = ?", [(v, k) for k, v in totals.items()])
    connection.execute("DELETE FROM trajectories WHERE seq <= ?", (retired,))
    connection.execute("INSERT INTO counters VALUES ('searcher-0', 'generated_trajectories', ?)", (len(tokens),))
    connection.execute("INSERT INTO leases VALUES (5, 'searcher-0', 1.0, 0.5)")
    connection.commit()
    connection.close()


def body_of(t: Trajectory) -> bytes:
    """A body that is not sealed."""
    first, last = t.completion.versions
    header = {
        "uid": t.uid,
        "length": t.length,
        "log_behavior": False,
        "mask": False,
        "arrays": [],
        "text": t.completion.text,
        "stop_reason": t.completion.stop_reason.value,
        "versions": [first.incarnation, first.step, last.incarnation, last.step],
        "sampling": None,
        "reward": t.reward,
        "reward_parts": {},
        "reference": [t.reference.incarnation, t.reference.step],
        "provenance": dict(t.provenance),
        "created": t.created,
    }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    pieces = [len(text).to_bytes(4, "little") + text]
    pieces += [t.completion.tokens.astype("<i4").tobytes(), t.log_reference.astype(np.dtype("<f4")).tobytes()]
    return b"".join(piece + bytes(-len(piece) % 8) for piece in pieces)
