"""Opening a journal to read it, by a command that leaves every file of the run as it is.

What is opened, by what lies there:

    nobody has it open, no log    the file itself, without locks and without an index beside it
    a log that is not its own     the same; the log is passed over, and the command says so
    its own log                   a copy of both, since SQLite makes an index beside a log that it reads
    damaged                       a copy, which is recovered as a resume would recover the file
    a run goes on                 the file itself, as one more reader
"""

from __future__ import annotations

import fcntl
import logging
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from tba.errors import UserError
from tba.replay.checks import copy_to, find_damage, log_belongs, log_of, uri_to_read
from tba.replay.database import FileLock, in_use_mark, suspect_mark
from tba.replay.pages import committed_frames, wal_frames
from tba.replay.recovery import lock_and_check, recovered_name

log = logging.getLogger("tba.journal")


class JournalFile(AbstractContextManager["JournalFile"]):
    """Says by which name to open a journal to read it. Raises `UserError` when there is none, or no room for a copy.

    What the reader should know is logged as a warning.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"there is no journal at {path}: give the folder of a run that has one")
        self.path = path
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        lock = None
        try:
            lock = FileLock(in_use_mark(path), create=False)
            in_use = not lock.take(fcntl.LOCK_EX)  # until a copy is made, for which writers wait
        except OSError:  # nobody ever had it open here, or it may not be opened
            in_use = False
        try:
            self.uri = uri_to_read(path) if in_use else self._prepare_unopened()
        except BaseException:
            self.close()
            raise
        finally:
            if lock is not None:
                lock.close()

    def _prepare_unopened(self) -> str:
        """Returns the name of a journal that nobody has open."""
        recovered = recovered_name(self.path)
        if recovered.exists():  # a recovery that was killed before it had put the new file in its place
            return uri_to_read(recovered, immutable=True)
        with_log = bool(committed_frames(wal_frames(log_of(self.path))))
        if with_log and not log_belongs(self.path):
            log.warning("%s is not the log of the journal beside it, and is passed over", log_of(self.path))
            with_log = False
        if not with_log:
            damage = find_damage(self.path, with_log=False)
            if damage is None and self.path.stat().st_size and not suspect_mark(self.path).exists():
                return uri_to_read(self.path, immutable=True)
        copy = self._make_copy(with_log)
        if suspect_mark(self.path).exists():
            suspect_mark(copy).touch()
        lock_and_check(copy).close()  # which recovers it, and says what is wrong
        return uri_to_read(copy)

    def _make_copy(self, with_log: bool) -> Path:
        self._folder = tempfile.TemporaryDirectory(prefix="tba-journal-")
        try:
            return copy_to(Path(self._folder.name), self.path, with_log)
        except OSError as error:
            raise UserError(
                f"{self.path} must be copied to be read, and {self._folder.name} cannot take the copy "
                f"({error.strerror}): set TMPDIR to a folder with more room, or resume the run first"
            ) from error

    def close(self) -> None:
        """Delete the copy, where there is one."""
        if self._folder is not None:
            self._folder.cleanup()

    def __exit__(self, *failure: object) -> None:
        self.close()
