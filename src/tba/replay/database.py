"""SQLite files as this project opens them: write-ahead log, durable, many processes, every wait with a deadline.

Invariant: a connection opened here never checkpoints by itself, and a transaction is either committed in full or
leaves no trace.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tba.errors import DeadlineExceeded, UserError

T = TypeVar("T")
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_MEND = {
    sqlite3.SQLITE_FULL: "cannot grow, its disk is full: free some space, or move the run",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: choose a place that can be written",
    sqlite3.SQLITE_READONLY: "may not be written: choose a place that can be",
    sqlite3.SQLITE_NOTADB: "is not a SQLite file: choose another place for the run",
}
_PAUSE = 0.005  # seconds between tries where SQLite itself does not wait


class Database:
    """One connection. Safe to share between the threads of one process; never across a fork.

    Raises `UserError` when the file is something else or of another schema version, `DeadlineExceeded` when others
    keep it locked for longer than `deadline_s` seconds.
    """

    def __init__(self, path: Path, kind: int, version: int, schema: str, deadline_s: float = 30.0) -> None:
        self.path = Path(path)
        self.deadline_s = deadline_s
        self.lock = threading.RLock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained():
            self._connection = sqlite3.connect(
                self.path, timeout=deadline_s, isolation_level=None, check_same_thread=False
            )
        try:
            with self._explained():
                self._waiting(lambda: self._prepare(kind, version, schema))
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, kind: int, version: int, schema: str) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")  # may be refused while another process does the same
        self._connection.execute("PRAGMA wal_autocheckpoint = 0")
        self._connection.execute("PRAGMA synchronous = FULL")
        with self.transaction() as connection:
            found_kind = connection.execute("PRAGMA application_id").fetchone()[0]
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
            if empty:
                for statement in schema.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {kind}")
                connection.execute(f"PRAGMA user_version = {version}")
            elif found_kind != kind:
                raise UserError(f"{self.path} is a SQLite file of something else: choose another place for the run")
            elif found != version:
                raise UserError(
                    f"{self.path} has schema version {found}, this program reads version {version}: "
                    f"open it with the program that wrote it, or start a new run"
                )

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """BEGIN IMMEDIATE ... COMMIT; rolled back when the block raises."""
        with self.lock, self._explained():
            self._waiting(lambda: self._connection.execute("BEGIN IMMEDIATE"))
            try:
                yield self._connection
                self._waiting(lambda: self._connection.execute("COMMIT"))
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """A shorter deadline for what is done in the block."""
        with self.lock:
            usual, self.deadline_s = self.deadline_s, seconds
            self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * seconds)}")
            try:
                yield
            finally:
                self.deadline_s = usual
                self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * usual)}")

    def rows(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        """All rows of a query; the read transaction is over when this returns."""
        with self.lock, self._explained():
            return self._waiting(lambda: self._connection.execute(query, parameters).fetchall())

    @property
    def wal_size(self) -> int:
        """Bytes of the write-ahead log on disk."""
        wal = Path(f"{self.path}-wal")
        return wal.stat().st_size if wal.exists() else 0

    def checkpoint(self) -> bool:
        """Move the write-ahead log into the file and truncate it; False when somebody was in the way."""
        self.rows("PRAGMA wal_checkpoint(PASSIVE)")  # most of the work, while writers go on
        ((busy, _, _),) = self.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        return not busy

    def _waiting(self, act: Callable[[], T]) -> T:
        """`act()`, tried again while the file is locked, until the deadline."""
        limit = time.monotonic() + self.deadline_s
        while True:
            try:
                return act()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _BUSY:
                    raise
                if time.monotonic() >= limit:
                    raise DeadlineExceeded(
                        f"waited {self.deadline_s:g} s for the write lock of {self.path}, which another process holds"
                    ) from error
            time.sleep(_PAUSE)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What the user can mend, in one sentence."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            mend = _MEND.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
            if mend is None:
                raise
            raise UserError(f"{self.path} {mend}") from error

    def close(self) -> None:
        """Closed for good; what was committed stays."""
        with self.lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
