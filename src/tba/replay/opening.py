"""What both ends of the journal begin with: the file, looked over and opened where it is safe."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path

from tba.errors import UserError
from tba.replay.database import Database
from tba.replay.filesystem import network_filesystem
from tba.replay.recovery import look_over
from tba.replay.schema import JOURNAL


def open_journal(path: Path, deadline_s: float, waiting: Callable[[], object], create: bool = True) -> Database:
    """Its tables are there afterwards; `create`: also where there was no file.

    Raises `UserError` on a network filesystem, and as `Database` does.
    """
    kind = network_filesystem(Path(path).absolute().parent)
    if kind is not None:
        raise UserError(
            f"the journal {path} would lie on a network filesystem ({kind}), where SQLite loses data: "
            f"give a folder on a local disk with --run.journal-dir"
        )
    lock = look_over(path)
    try:
        return Database(path, JOURNAL, deadline_s, lock, waiting, create)
    except BaseException:
        lock.close()
        raise


def add_to_totals(connection: sqlite3.Connection, increments: Mapping[str, int]) -> None:
    """In the transaction of what they count."""
    connection.executemany(
        "UPDATE totals SET value = value + ? WHERE name = ?", [(by, name) for name, by in increments.items()]
    )
