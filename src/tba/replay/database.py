"""SQLite files as this project opens them: write-ahead log, durable, many processes, every wait with a deadline.

Invariant: a connection opened here never checkpoints by itself, and a transaction is either committed in full or leaves
no trace. Neither would hold on a network filesystem; `network_filesystem` detects one.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tba.errors import DeadlineExceeded, UserError
from tba.replay.schema import KIND, PAGE_BYTES, ROWS_QUERY, TABLES_SQL, VERSION, draw_link

T = TypeVar("T")
_BUSY_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_REMEDIES = {
    sqlite3.SQLITE_FULL: "cannot grow, its disk is full: free some space, or move the run",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: choose a place that can be written",
    sqlite3.SQLITE_READONLY: "may not be written: choose a place that can be",
    sqlite3.SQLITE_NOTADB: "is not a SQLite file: choose another place for the run",
    sqlite3.SQLITE_CORRUPT: "is damaged: end what uses it; whoever opens it next sets it aside and recovers its rows",
    sqlite3.SQLITE_IOERR: "cannot be read or written, its disk gives errors: move the run to another",
}
_NO_MEMORY_CODES = {sqlite3.SQLITE_IOERR_NOMEM, sqlite3.SQLITE_IOERR_SHMMAP}
# SQLite's WAL needs shared memory and byte-range locks that all writers agree on; these do not promise either.
_NETWORK_FILESYSTEMS = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"),
    *("ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "wekafs", "fuse.ceph", "fuse.davfs"),
    *("fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
}
_BUSY_SECONDS = 0.25  # seconds that SQLite itself waits
_RETRY_SECONDS = 0.005  # seconds between attempts where SQLite itself does not wait


def suspect_mark(path: Path) -> Path:
    """Returns the marker file, next to one of our files, that says that damage was met in it."""
    return Path(f"{path}-suspect")


def in_use_mark(path: Path) -> Path:
    """Returns the file, next to one of our files, that everybody locks who may write it."""
    return Path(f"{path}-in-use")


def acknowledged_folder(path: Path) -> Path:
    """Returns the folder, next to a journal, in which each owner leaves how many rows were in it at its last `put`."""
    return Path(f"{path}-acknowledged")


class FileLock:
    """A lock on a file of its own. It is released when it is closed or garbage-collected, or with its process.

    create: make the file; else `FileNotFoundError` where there is none, and nothing is written.
    """

    _descriptor = -1  # it is not open

    def __init__(self, path: Path, create: bool = True) -> None:
        self._descriptor = os.open(path, (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY) | os.O_CLOEXEC, 0o666)

    def take(self, operation: int) -> bool:
        """Returns whether this process got the lock. operation: `LOCK_SH` or `LOCK_EX`."""
        try:
            fcntl.flock(self._descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Release the lock for good."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    __del__ = close


class Database(AbstractContextManager["Database"]):
    """Holds one connection to a journal. The threads of one process may share it; never use it across a fork.

    Raises `UserError` when the file is something else or of another schema version, `DeadlineExceeded` when others keep
    it locked for longer than `deadline_s` seconds.

    create: whether a file that is not there is made; else `UserError` says that it is gone. locks: closed with the
    connection. on_wait: called now and then while it waits for others, who may hang and hold the file. uri: SQLite's
    name of a file that is only read, by which it is opened in the place of `path`.
    """

    def __init__(
        self,
        path: Path,
        deadline_s: float = 30.0,
        locks: ExitStack | None = None,
        on_wait: Callable[[], object] = lambda: None,
        create: bool = True,
        uri: str | None = None,
    ) -> None:
        self._locks = locks
        self._on_wait = on_wait
        self.path = Path(path)
        self.deadline_s = deadline_s
        self.lock = threading.RLock()
        self._file_identity: tuple[int, int] | None = None  # the file's identity, once it is open
        self._known_bytes = 0  # that it had when it was last looked at: it never shrinks, nothing is vacuumed
        self._known_rows = 0  # that had ever been inserted when it was last looked at: an older copy has fewer
        self._last_modified: int | None = None  # when the file was written last, where nobody else writes it
        if create:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        elif not self.path.is_file():
            raise UserError(f"{self.path} is gone: put it back; what it held is in no other file")
        with self._explain_errors():
            self._connection = sqlite3.connect(
                uri or self.path,
                timeout=min(_BUSY_SECONDS, deadline_s),
                isolation_level=None,
                check_same_thread=False,
                uri=uri is not None,
            )
        try:
            with self._explain_errors():
                self._retry_while_locked(lambda: self._prepare(uri is None))
            if uri is None:
                self._file_identity, self._known_bytes, _ = self._stat_file()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, to_write: bool) -> None:
        self._connection.execute("BEGIN")  # one snapshot: another process may be creating the tables
        try:
            self._check_schema()  # before anything is changed
        finally:
            self._roll_back()
        if not to_write:
            return
        # for a new file; an existing one keeps its own
        self._connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        self._connection.execute("PRAGMA journal_mode = WAL")  # may be refused while another process does the same
        self._connection.execute("PRAGMA wal_autocheckpoint = 0")
        self._connection.execute("PRAGMA synchronous = FULL")
        with self.transaction() as connection:
            if self._check_schema():
                for statement in TABLES_SQL.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {KIND}")
                connection.execute(f"PRAGMA user_version = {VERSION}")

    def _check_schema(self) -> bool:
        """Returns whether the file is empty. Raises `UserError` when it is another program's, or of another version."""
        ((kind,), (version,), (entry_count,)) = (
            self._connection.execute(query).fetchone()
            for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        )
        if entry_count == 0:
            return True
        if kind != KIND:
            raise UserError(f"{self.path} is a SQLite file of something else: choose another place for the run")
        if version != VERSION:
            raise UserError(
                f"{self.path} has schema version {version}, this program reads version {VERSION}: "
                f"open it with the program that wrote it, or start a new run"
            )
        return False

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Runs the block between BEGIN IMMEDIATE and COMMIT; rolls back when it raises."""
        with self.lock, self._explain_errors():
            self._retry_while_locked(lambda: self._connection.execute("BEGIN IMMEDIATE"))
            rows_before, changes_before = self._known_rows, self._connection.total_changes
            try:
                self.require_file()
                rows_before = self._known_rows
                yield self._connection
                if self._connection.total_changes != changes_before:
                    draw_link(self._connection)
                if self._file_identity is not None:
                    self._require_rows()  # which are more now
                self._retry_while_locked(lambda: self._connection.execute("COMMIT"))
            except BaseException:
                self._known_rows = rows_before
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        if self._connection.in_transaction:  # SQLite may have done it, at an error
            self._connection.execute("ROLLBACK")

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Gives waits inside the block a shorter deadline."""
        with self.lock:
            previous, self.deadline_s = self.deadline_s, seconds
            self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * min(_BUSY_SECONDS, seconds))}")
            try:
                yield
            finally:
                self.deadline_s = previous
                self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * min(_BUSY_SECONDS, previous))}")

    def rows(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Returns all rows of a query; the read transaction is over when this returns."""
        with self.lock, self._explain_errors():
            return self._retry_while_locked(lambda: self._connection.execute(query, parameters).fetchall())

    def require_file(self) -> None:
        """Raises `UserError` when the file that was opened was deleted, replaced by another one, cut, written over, or
        set back to an older copy.

        What was written from then on would be lost with it. Checked in every transaction; costs a `stat` and a query.
        """
        with self.lock:
            identity, size, modified = self._stat_file()
            if self._file_identity is None:  # it is being made
                return
            fault = ""
            if identity != self._file_identity:
                self._refuse_replaced_file(identity is None)
            elif size < self._known_bytes:
                fault = f"cut from {self._known_bytes:,} to {size:,} bytes"
            elif self._last_modified not in (None, modified):
                fault = "written over by another program"
            if fault:
                with suppress(OSError):
                    suspect_mark(self.path).touch()
                raise UserError(
                    f"{self.path} was {fault} while it was in use: end what uses it; whoever opens it next sets it "
                    "aside and recovers its rows"
                )
            self._known_bytes = size
            self._require_rows()

    def _refuse_replaced_file(self, is_gone: bool) -> None:
        ((rows,),) = self._connection.execute(ROWS_QUERY).fetchall()
        fault = "was deleted" if is_gone else "was replaced by another file"
        raise UserError(
            f"{self.path} {fault} while it was in use, and with it {rows:,} rows are missing: put it back if there is "
            "a copy, or continue without them (tba resume RUN --accept-lost-rows)"
        )

    def _require_rows(self) -> None:
        """Raises `UserError` when there were more rows before: no program of ours takes any away."""
        ((rows,),) = self.rows(ROWS_QUERY)
        if rows < self._known_rows:
            raise UserError(
                f"{self.path} was set back to an older copy while it was in use: it has {rows:,} rows and had "
                f"{self._known_rows:,}, so at least {self._known_rows - rows:,} are missing: put the newer file back "
                "if there is a copy, or continue without them (tba resume RUN --accept-lost-rows)"
            )
        self._known_rows = rows

    def _stat_file(self) -> tuple[tuple[int, int] | None, int, int]:
        """Returns the file's identity, its bytes, and when it was written last."""
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return None, 0, 0
        return (stat.st_dev, stat.st_ino), stat.st_size, stat.st_mtime_ns

    @property
    def wal_size(self) -> int:
        """Returns the bytes of the write-ahead log on disk."""
        wal = Path(f"{self.path}-wal")
        return wal.stat().st_size if wal.exists() else 0

    def checkpoint(self) -> bool:
        """Move the write-ahead log into the file and truncate it; returns False when another process prevented that.

        From the first one on nobody else may write the file.
        """
        with self.lock:
            self.require_file()  # what is written fills the place of what was cut off
            try:
                self.rows("PRAGMA wal_checkpoint(PASSIVE)")  # most of the work, while writers go on
                ((busy, _, _),) = self.rows("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                self._last_modified = self._stat_file()[2]
            self.require_file()  # which has grown
            return not busy

    def _retry_while_locked(self, action: Callable[[], T]) -> T:
        """Returns `action()`, retried while the file is locked, until the deadline."""
        limit = time.monotonic() + self.deadline_s
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _BUSY_CODES:
                    raise
                if time.monotonic() >= limit:
                    raise DeadlineExceeded(
                        f"waited {self.deadline_s:g} s for the write lock of {self.path}, which another process holds"
                    ) from error
            self._on_wait()
            time.sleep(_RETRY_SECONDS)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Raises errors that the user can remedy as one sentence."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            extended_code = getattr(error, "sqlite_errorcode", 0)
            if extended_code in _NO_MEMORY_CODES:
                raise MemoryError(f"{self.path}: {error}") from error
            code = extended_code & 0xFF
            remedy = _REMEDIES.get(code)
            if remedy is None:
                raise
            if code == sqlite3.SQLITE_CORRUPT:
                with suppress(OSError):
                    suspect_mark(self.path).touch()
            raise UserError(f"{self.path} {remedy}") from error

    def close(self) -> None:
        """Close the connection for good; what was committed stays."""
        with self.lock:
            self._connection.close()
            if self._locks is not None:
                self._locks.close()

    def __exit__(self, *failure: object) -> None:
        self.close()


def network_filesystem(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Returns the type of the network filesystem that holds `path`, or None (local, or there is no mount table).

    The longest mount point above the path decides.
    """
    if not mounts.exists():
        return None
    resolved = path.resolve()
    filesystem, deepest = "", -1
    for line in mounts.read_text().splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount_point = Path(_unescape(fields[1]))
        # A later line hides an earlier one on the same mount point.
        if len(mount_point.parts) >= deepest and resolved.is_relative_to(mount_point):
            filesystem, deepest = fields[2], len(mount_point.parts)
    return filesystem if filesystem in _NETWORK_FILESYSTEMS else None


def _unescape(text: str) -> str:
    """Decodes blanks and backslashes, which the mount table writes in octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
