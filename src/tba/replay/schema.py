"""The journal's tables.

    totals          how much was ever appended and deleted; the file's random identifier, drawn when it was made; and
                    the mark of the incarnation that wrote last, drawn when that began (0: of a run without marks);
                    the links of the last transaction and of the one before, by which a log is known to be its own.
                    The first table, on the file's second page: whatever else is lost, it says how much that was.
                    Each value is there twice, since no index and no checksum would show that it has changed
    prompts         each prompt, under the digest of its body
    prompt_copies   the same once more, in the order of their arrival: few bytes, without which no trajectory is worth
                    anything. A tree that is ordered by digest is rebuilt at the file's end as it grows; of these each
                    is before the first trajectory that needs it, so that a file that is cut off keeps both
    trajectories    what is known of each: who put it, which weights sampled it, its reward; these rows stay, so that no
                    number is given twice
    bodies          the trajectories without their prompts. Retention deletes the oldest, up to `retired_until`; after
                    that position a trajectory without a body has been damaged
    recoveries      each time that a damaged file was set aside, and what could not be read in it
    scores          log-probabilities of trajectories under later references, kept apart from the trajectory's own; each
                    is written once and never changed
    unscored        the scores that the trainer requests, all under one reference, the newest; leased newest first, so
                    that no two searchers score the same, and removed in the transaction that writes the score
    leases, outcomes, jobs, evaluations, counters
    staged          graded answers to prompts whose other answers are not graded yet; only where there ever were any, so
                    that files of earlier programs are as they were

    lost            numbers of trajectories whose content is lost, and whose loss is on record; only where there are any

Invariant: a file with this version's number in its header has exactly these tables. One of another version is refused
by `Database`, and nothing in it is changed.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable, Mapping

KIND = 0x54424131  # "TBA1" in the file's header, which tells it from other programs' files
VERSION = 7
PAGE_BYTES = 8192  # a body of 128 tokens is a bit over 2 kB: a page of 4096 would hold only one
TOTALS_PAGE = 2
ROWS_QUERY = "SELECT value FROM totals WHERE name = 'rows'"  # how many trajectories were ever put
AMOUNTS_QUERY = """SELECT
    (SELECT value FROM totals WHERE name = 'rows'), (SELECT value FROM totals WHERE name = 'tokens')
"""
# The two rows without content in `prompt_copies` do not fit on one page. As long as a table does, its only page is its
# root, and what is on it moves to the file's end when it is full.
TABLES_SQL = """
CREATE TABLE totals (name TEXT NOT NULL, value INTEGER NOT NULL, again INTEGER NOT NULL);
CREATE TABLE prompts (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE prompt_copies (place INTEGER PRIMARY KEY, id INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE trajectories (
    seq INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, prompt INTEGER NOT NULL,
    tokens INTEGER NOT NULL, incarnation INTEGER NOT NULL, step INTEGER NOT NULL, reward REAL, created REAL
);
CREATE TABLE bodies (seq INTEGER PRIMARY KEY, prompt INTEGER NOT NULL, tokens INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE leases (position INTEGER PRIMARY KEY, owner TEXT NOT NULL, issued REAL NOT NULL, seconds REAL NOT NULL);
CREATE TABLE outcomes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, position INTEGER NOT NULL, successes REAL NOT NULL, failures REAL NOT NULL
);
CREATE TABLE jobs (
    job TEXT PRIMARY KEY, owner TEXT NOT NULL, issued REAL NOT NULL, seconds REAL NOT NULL, done INTEGER NOT NULL
);
CREATE TABLE evaluations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, version TEXT NOT NULL, wall_seconds REAL NOT NULL,
    metric TEXT NOT NULL, value REAL NOT NULL, n INTEGER NOT NULL, seconds REAL NOT NULL, tokens INTEGER NOT NULL
);
CREATE TABLE counters (owner TEXT, name TEXT, value INTEGER NOT NULL, PRIMARY KEY (owner, name)) WITHOUT ROWID;
CREATE TABLE recoveries (
    place INTEGER PRIMARY KEY, time REAL NOT NULL, damaged TEXT NOT NULL, why TEXT NOT NULL, rows INTEGER NOT NULL,
    lost_rows INTEGER NOT NULL, lost_tokens INTEGER NOT NULL
);
INSERT INTO totals VALUES ('rows', 0, 0), ('tokens', 0, 0), ('positions', 0, 0), ('retired_rows', 0, 0),
    ('retired_tokens', 0, 0), ('retired_until', 0, 0), ('identity', random() & 0x7fffffffffffffff, 0), ('mark', 0, 0),
    ('link', 0, 0), ('link_before', 0, 0);
UPDATE totals SET again = value;
INSERT INTO prompt_copies (id, body) VALUES (0, zeroblob(8000)), (0, zeroblob(200));
CREATE TABLE unscored (
    seq INTEGER PRIMARY KEY, reference TEXT NOT NULL, owner TEXT NOT NULL, issued REAL NOT NULL, seconds REAL NOT NULL
);
CREATE TABLE scores (
    place INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT NOT NULL, reference TEXT NOT NULL, body BLOB NOT NULL,
    UNIQUE (uid, reference)
)
"""

STAGED_TABLE = """
CREATE TABLE IF NOT EXISTS staged (
    uid TEXT PRIMARY KEY, owner TEXT NOT NULL, position INTEGER NOT NULL, samples INTEGER NOT NULL,
    prompt INTEGER NOT NULL, body BLOB NOT NULL
)
"""


LOST_TABLE = "CREATE TABLE IF NOT EXISTS lost (seq INTEGER PRIMARY KEY)"


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    """Returns whether the file has a table of those that are made when they are needed."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone() is not None


def record_lost(connection: sqlite3.Connection) -> list[int]:
    """Record each trajectory that has lost its content, unless it is recorded; returns the numbers of the new ones."""
    connection.execute(LOST_TABLE)
    lost_rows = connection.execute(
        "SELECT seq FROM trajectories t WHERE seq > (SELECT value FROM totals WHERE name = 'retired_until') "
        "AND NOT EXISTS (SELECT 1 FROM bodies b WHERE b.seq = t.seq) "
        "AND NOT EXISTS (SELECT 1 FROM lost l WHERE l.seq = t.seq)"
    ).fetchall()
    connection.executemany("INSERT INTO lost VALUES (?)", lost_rows)
    return [seq for (seq,) in lost_rows]


def keep_prompts(connection: sqlite3.Connection, prompts: Iterable[tuple[int, bytes]]) -> None:
    """Insert the prompts that the journal does not have yet."""
    for prompt in prompts:
        if connection.execute("INSERT OR IGNORE INTO prompts VALUES (?, ?)", prompt).rowcount:
            connection.execute("INSERT INTO prompt_copies (id, body) VALUES (?, ?)", prompt)


def add_to_totals(connection: sqlite3.Connection, increments: Mapping[str, int]) -> None:
    """Add to the totals, in the transaction of what they count."""
    connection.executemany(
        "UPDATE totals SET value = value + ?1, again = again + ?1 WHERE name = ?2",
        [(increment, name) for name, increment in increments.items()],
    )


def set_totals(connection: sqlite3.Connection, values: Mapping[str, int]) -> None:
    """Set the totals of these names to these values."""
    connection.executemany(
        "UPDATE totals SET value = ?1, again = ?1 WHERE name = ?2", [(value, name) for name, value in values.items()]
    )


def set_mark(connection: sqlite3.Connection, mark: int) -> None:
    """Set the mark of the incarnation that begins; files of earlier programs have no place for it."""
    _add_total_names(connection, "mark")
    set_totals(connection, {"mark": mark})


def draw_link(connection: sqlite3.Connection) -> None:
    """Draw the link of a transaction, at its end."""
    last_link = connection.execute("SELECT value FROM totals WHERE name = 'link'").fetchone()
    if last_link is None:  # a file of an earlier program
        _add_total_names(connection, "link", "link_before")
    set_totals(connection, {"link_before": last_link[0] if last_link else 0, "link": 1 + secrets.randbits(62)})


def _add_total_names(connection: sqlite3.Connection, *names: str) -> None:
    connection.executemany(
        "INSERT INTO totals SELECT ?1, 0, 0 WHERE NOT EXISTS (SELECT 1 FROM totals WHERE name = ?1)",
        [(name,) for name in names],
    )
