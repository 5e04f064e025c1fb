"""The journal's tables, and how those of earlier versions become them.

    prompts         each prompt, under the digest of its body
    prompt_copies   the same once more on other pages: few bytes, without which no trajectory is worth anything
    trajectories    what is known of each: who put it, which weights sampled it, its reward; these rows stay, so that no
                    number is given twice
    bodies          all of it but for its prompt. Retention takes away the oldest, up to `retired_until`; beyond that a
                    trajectory without a body has been damaged
    recoveries      each time that a damaged file was set aside, and what could not be read in it
    leases, outcomes, jobs, evaluations, counters, totals (of which `identity` is the file's own number, drawn when it
                    was made), and those of `scores`

Invariant: a file of an earlier version is brought to this one by the same transaction that finds it, one version at a
time, and what was in it is in it afterwards. A step is never changed once files have been made by it.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable

from tba.replay import scores
from tba.replay.codec import Damaged, facts_of
from tba.replay.database import Schema

_TABLES = (
    """
CREATE TABLE prompts (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE prompt_copies (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
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
CREATE TABLE totals (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE recoveries (
    place INTEGER PRIMARY KEY, time REAL NOT NULL, damaged TEXT NOT NULL, why TEXT NOT NULL, rows INTEGER NOT NULL,
    lost_rows INTEGER NOT NULL, lost_tokens INTEGER NOT NULL
);
INSERT INTO totals VALUES ('rows', 0), ('tokens', 0), ('positions', 0), ('retired_rows', 0), ('retired_tokens', 0),
    ('retired_until', 0), ('identity', random() & 0x7fffffffffffffff);
"""
    + scores.SCHEMA
)



def facts_into(rows: int) -> str:
    """A statement that puts the facts of so many trajectories down, one after another (8 parameters each)."""
    columns = "uid, owner, prompt, tokens, incarnation, step, reward, created"
    marks = ",".join(["(?,?,?,?,?,?,?,?)"] * rows)
    return f"INSERT INTO trajectories ({columns}) VALUES {marks}"  # noqa: S608 - question marks


def bodies_into(rows: int) -> str:
    """The same of their bodies (4 parameters each)."""
    marks = ",".join(["(?,?,?,?)"] * rows)
    return f"INSERT INTO bodies VALUES {marks}"  # noqa: S608 - question marks


def _from_1(connection: sqlite3.Connection) -> None:
    """Scores under later references; what a uid names."""
    for statement in (scores.SCHEMA + ";CREATE TABLE named (uid TEXT PRIMARY KEY, seq INTEGER NOT NULL)").split(";"):
        connection.execute(statement)
    for seq, body in connection.execute("SELECT seq, body FROM trajectories ORDER BY seq"):
        connection.execute("INSERT OR IGNORE INTO named VALUES (?, ?)", (_uid(body, seq), seq))
    connection.execute("DROP TABLE uids")
    connection.execute("CREATE TABLE uids (uid TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID")
    connection.execute("INSERT INTO uids SELECT uid, seq FROM named")
    connection.execute("DROP TABLE named")


def _from_2(connection: sqlite3.Connection) -> None:
    """Version 3 keeps the outcomes of prompts."""
    connection.execute(
        "CREATE TABLE outcomes (seq INTEGER PRIMARY KEY AUTOINCREMENT, position INTEGER NOT NULL, "
        "successes REAL NOT NULL, failures REAL NOT NULL)"
    )


_FACTS = """
CREATE TABLE trajectories (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, uid TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, prompt INTEGER NOT NULL,
    tokens INTEGER NOT NULL, incarnation INTEGER NOT NULL, step INTEGER NOT NULL, reward REAL, created REAL
);
CREATE TABLE recoveries (
    place INTEGER PRIMARY KEY, time REAL NOT NULL, damaged TEXT NOT NULL, why TEXT NOT NULL, rows INTEGER NOT NULL,
    lost_rows INTEGER NOT NULL, lost_tokens INTEGER NOT NULL
);
INSERT INTO totals VALUES ('retired_until', coalesce(
    (SELECT min(seq) - 1 FROM bodies), (SELECT seq FROM sqlite_sequence WHERE name = 'bodies'), 0
));
DROP TABLE uids
"""


def _from_3(connection: sqlite3.Connection) -> None:
    """Facts beside the bodies, which stay where they are. What had been retired leaves no facts, but is counted."""
    connection.execute("ALTER TABLE trajectories RENAME TO bodies")
    for statement in _FACTS.split(";"):
        connection.execute(statement)
    for seq, prompt, tokens, body in connection.execute("SELECT seq, prompt, tokens, body FROM bodies ORDER BY seq"):
        connection.execute("INSERT INTO trajectories VALUES (?,?,?,?,?,?,?,?,?)", described(seq, prompt, tokens, body))
    # Numbers are never given twice, also when the newest rows had been retired.
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'trajectories'")
    connection.execute(
        "INSERT INTO sqlite_sequence SELECT 'trajectories', seq FROM sqlite_sequence WHERE name = 'bodies'"
    )


def _from_4(connection: sqlite3.Connection) -> None:
    """Version 5 keeps each prompt twice."""
    connection.execute("CREATE TABLE prompt_copies (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
    connection.execute("INSERT INTO prompt_copies SELECT id, body FROM prompts")


def _from_5(connection: sqlite3.Connection) -> None:
    """A number of its own."""
    connection.execute("INSERT INTO totals VALUES ('identity', random() & 0x7fffffffffffffff)")


JOURNAL = Schema(
    kind=0x54424131,  # "TBA1" in the file's header
    version=6,
    tables=_TABLES,
    migrations={1: _from_1, 2: _from_2, 3: _from_3, 4: _from_4, 5: _from_5},
    rows="SELECT value FROM totals WHERE name = 'rows'",
    page_bytes=8192,  # a body of 128 tokens is a bit over 2 kB: on pages of 4096 it would have one for itself
)


def keep_prompts(connection: sqlite3.Connection, prompts: Iterable[tuple[int, bytes]]) -> None:
    """Those that are not there yet."""
    for prompt in prompts:
        if connection.execute("INSERT OR IGNORE INTO prompts VALUES (?, ?)", prompt).rowcount:
            connection.execute("INSERT OR REPLACE INTO prompt_copies VALUES (?, ?)", prompt)


def described(seq: int, prompt: int, tokens: int, body: bytes, owner: str = "") -> tuple[object, ...]:
    """A row of `trajectories` from a body. Of one that is damaged only its number and size are known."""
    try:
        facts = facts_of(body)
    except Damaged:
        return seq, _unknown(seq), owner, prompt, tokens, 0, 0, None, None
    incarnation, step, *_ = facts.get("versions", (0, 0))
    made_by = owner or str(facts.get("provenance", {}).get("searcher", ""))
    return seq, facts["uid"], made_by, prompt, tokens, incarnation, step, facts.get("reward"), facts.get("created")


def _uid(body: bytes, seq: int) -> str:
    try:
        return str(facts_of(body)["uid"])
    except Damaged:
        return _unknown(seq)


def _unknown(seq: int) -> str:
    return f"unknown-{seq}"


def prompt_id(body: bytes) -> int:
    """64 bits of the content, as SQLite's signed integer."""
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "little", signed=True)
