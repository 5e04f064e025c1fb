"""Log-probabilities of trajectories under later references: requested by the trainer, computed by searchers.

They are in two tables of the journal. Invariant: (trajectory, reference) -> log-probabilities is written once and never
changed, and kept apart from the trajectory, which keeps its own. All requests are for one reference, the newest; they
are leased newest first, so that no two searchers score the same, and are removed in the transaction that writes the
score.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from tba.replay.codec import decode_logs, encode_logs
from tba.types import Score, Version

SCHEMA = """
CREATE TABLE unscored (
    seq INTEGER PRIMARY KEY, reference TEXT NOT NULL, owner TEXT NOT NULL, issued REAL NOT NULL, seconds REAL NOT NULL
);
CREATE TABLE scores (
    place INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT NOT NULL, reference TEXT NOT NULL, body BLOB NOT NULL,
    UNIQUE (uid, reference)
)
"""
UNSCORED = "SELECT 1 FROM unscored WHERE reference = ? LIMIT 1"
SCORES = "SELECT place, uid, reference, body FROM scores WHERE place > ? AND place <= ? ORDER BY place LIMIT ?"


def score_of(uid: str, reference: str, body: bytes) -> Score:
    """Returns a row of the table as a `Score`."""
    return Score(uid, Version.parse(reference), decode_logs(body))


def ask(connection: sqlite3.Connection, reference: Version, uids: Sequence[str]) -> None:
    """Request the scores of `uids` under `reference` that are not there yet; requests for another reference are
    dropped.
    """
    connection.execute("DELETE FROM unscored WHERE reference != ?", (str(reference),))
    connection.executemany(
        "INSERT OR IGNORE INTO unscored SELECT seq, ?1, '', 0, 0 FROM trajectories WHERE uid = ?2 "
        "AND NOT EXISTS (SELECT 1 FROM scores WHERE uid = ?2 AND reference = ?1)",
        [(str(reference), uid) for uid in uids],
    )


def lease(
    connection: sqlite3.Connection, reference: Version, count: int, owner: str, now: float, seconds: float
) -> list[tuple[int, int, bytes]]:
    """Returns (prompt, seq, body) of the newest requested trajectories that nobody works on; `owner` then does."""
    rows = connection.execute(
        "SELECT prompt, seq, bodies.body FROM unscored JOIN bodies USING (seq) "
        "WHERE reference = ? AND issued + seconds <= ? ORDER BY seq DESC LIMIT ?",
        (str(reference), now, count),
    ).fetchall()
    connection.executemany(
        "UPDATE unscored SET owner = ?, issued = ?, seconds = ? WHERE seq = ?",
        [(owner, now, seconds, seq) for _, seq, _ in rows],
    )
    return rows


def put(connection: sqlite3.Connection, scores: Sequence[Score]) -> int:
    """Write the scores that are not there yet; returns how many these are."""
    new = 0
    for score in scores:
        written = connection.execute(
            "INSERT OR IGNORE INTO scores (uid, reference, body) VALUES (?, ?, ?)",
            (score.uid, str(score.reference), encode_logs(score.log_reference)),
        )
        new += written.rowcount
        connection.execute(
            "DELETE FROM unscored WHERE reference = ? AND seq = (SELECT seq FROM trajectories WHERE uid = ?)",
            (str(score.reference), score.uid),
        )
    return new
