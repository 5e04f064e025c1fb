"""Increments of a journal: files of its newest rows, from which it is built again elsewhere.

An increment is a SQLite file with the rows that no earlier increment has, and the tables that change as a whole
(totals, leases, counters, ...) as they were at its end. SQLite's own backup would begin again whenever another process
writes, or hold a read transaction for the whole copy. Rows are only ever added, so that here every read is short: some
rows at a time, and at the end one transaction over what arrived meanwhile.

Invariant: the increments of one sequence, in their order, are the journal as it was at one moment, the end of the last.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from tba.replay.database import Database
from tba.replay.recovery import open_journal
from tba.replay.schema import LOST_TABLE, STAGED_TABLE

_ADDED = {  # tables whose rows are only added and deleted, each with the key that grows
    "trajectories": "seq",
    "bodies": "seq",
    "prompt_copies": "place",
    "scores": "place",
    "outcomes": "seq",
    "evaluations": "seq",
    "recoveries": "place",
}
_CHANGED = ("totals", "leases", "jobs", "counters", "unscored")
_MADE_ON_DEMAND = {"staged": STAGED_TABLE, "lost": LOST_TABLE}
_STEP_ROWS = 256  # read in one statement: 10 MB, where answers have 2,048 tokens
_FILLED_PLACES = 2  # of `prompt_copies`, whose first rows are in every new journal


@dataclass(frozen=True)
class IncrementEnd:
    """Says how far the increments of a journal reach."""

    identity: int = 0  # of the journal
    recovery: float = 0.0  # when it was last recovered, or rows of it were given up; 0: never
    mark: int = 0  # of the incarnation that wrote last
    rows: int = 0  # trajectories that were ever put
    tokens: int = 0
    retired_until: int = 0  # position up to which bodies have been deleted
    last_keys: Mapping[str, int] = field(default_factory=dict)  # the largest key of each table

    def is_before(self, later_end: IncrementEnd) -> bool:
        """Returns whether rows were only added between this end and a later one."""
        is_same = (self.identity, self.recovery) == (later_end.identity, later_end.recovery)
        return is_same and self.rows <= later_end.rows


def end_of(journal: Path) -> IncrementEnd:
    """Returns where an increment of the journal would end now."""
    with open_journal(journal, create=False) as database:
        return _read_end(database)


def write_increment(journal: Path, file: Path, previous_end: IncrementEnd) -> IncrementEnd:
    """Write what the journal has beyond `previous_end` to a new file; returns how far it reaches then.

    Both are on local disks. Each read of the journal is short, so that writers and checkpoints of its log go on.
    """
    for leftover in (file, Path(f"{file}-journal")):
        leftover.unlink(missing_ok=True)
    with open_journal(journal, create=False) as database:
        database.rows("ATTACH ? AS increment", str(file))
        database.rows("PRAGMA increment.journal_mode = MEMORY")  # a part of a file is of no use
        for table in _ADDED:
            database.rows(f"CREATE TABLE increment.{table} AS SELECT * FROM main.{table} WHERE 0")  # noqa: S608 - our own names
        last_keys, present_places = dict(previous_end.last_keys), _read_end(database).last_keys
        for table in _ADDED:
            while last_keys.get(table, 0) < present_places[table]:
                _copy_step(database, table, last_keys)
        database.rows("BEGIN")  # over what has arrived since
        for table in _ADDED:
            while _copy_step(database, table, last_keys):
                pass
        present_tables = {name for (name,) in database.rows("SELECT name FROM main.sqlite_master")}
        for table in (*_CHANGED, *(present_tables & _MADE_ON_DEMAND.keys())):
            database.rows(f"CREATE TABLE increment.{table} AS SELECT * FROM main.{table}")  # noqa: S608 - our own names
        end = _read_end(database)
        database.rows("COMMIT")
    return end


def _copy_step(database: Database, table: str, last_keys: dict[str, int]) -> bool:
    """Copy some rows of a table, and note the last of them; returns whether there were any."""
    key, place = _ADDED[table], last_keys.get(table, 0)
    database.rows(
        f"INSERT INTO increment.{table} SELECT * FROM main.{table} WHERE {key} > ? ORDER BY {key} LIMIT ?",  # noqa: S608 - our own names
        *(place, _STEP_ROWS),
    )
    ((count, last_place),) = database.rows(
        f"SELECT count(*), coalesce(max({key}), ?1) FROM increment.{table} WHERE {key} > ?1",  # noqa: S608 - our own names
        place,
    )
    last_keys[table] = last_place
    return bool(count)


def _read_end(database: Database) -> IncrementEnd:
    totals = dict(database.rows("SELECT name, value FROM main.totals"))
    ((recovery,),) = database.rows("SELECT coalesce(max(time), 0.0) FROM main.recoveries")
    last_keys = {
        table: int(database.rows(f"SELECT coalesce(max({key}), 0) FROM main.{table}")[0][0])  # noqa: S608 - our own names
        for table, key in _ADDED.items()
    }
    names = ("identity", "mark", "rows", "tokens", "retired_until")
    return IncrementEnd(recovery=recovery, last_keys=last_keys, **{name: totals.get(name, 0) for name in names})


def restore_journal(journal: Path, increments: Iterable[Path]) -> None:
    """Build a journal from its increments, in their order. All files are on local disks, and no journal is there."""
    open_journal(journal).close()
    with closing(sqlite3.connect(journal, isolation_level=None)) as connection:
        connection.execute("PRAGMA trusted_schema = OFF")
        for increment in increments:
            connection.execute("ATTACH ? AS increment", (str(increment),))
            connection.execute("BEGIN IMMEDIATE")
            _add_increment(connection)
            connection.execute("COMMIT")
            connection.execute("DETACH increment")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _add_increment(connection: sqlite3.Connection) -> None:
    for table, key in _ADDED.items():
        first_place = _FILLED_PLACES if table == "prompt_copies" else 0
        connection.execute(
            f"INSERT INTO main.{table} SELECT * FROM increment.{table} WHERE {key} > ?",  # noqa: S608 - our own names
            (first_place,),
        )
    connection.execute(
        "INSERT OR IGNORE INTO main.prompts SELECT id, body FROM increment.prompt_copies WHERE place > ?",
        (_FILLED_PLACES,),
    )
    names = {name for (name,) in connection.execute("SELECT name FROM increment.sqlite_master")}
    for table in names & _MADE_ON_DEMAND.keys():
        connection.execute(_MADE_ON_DEMAND[table])
    for table in (*_CHANGED, *(names & _MADE_ON_DEMAND.keys())):
        connection.execute(f"DELETE FROM main.{table}")  # noqa: S608 - our own names
        connection.execute(f"INSERT INTO main.{table} SELECT * FROM increment.{table}")  # noqa: S608 - our own names
    # deleted since the increment that has them was written
    connection.execute("DELETE FROM main.bodies WHERE seq <= (SELECT value FROM totals WHERE name = 'retired_until')")
    if "lost" in names:
        connection.execute("DELETE FROM main.bodies WHERE seq IN (SELECT seq FROM main.lost)")
