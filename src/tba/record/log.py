"""`logs/PART.log`: the log of each part of a run, in plain text.

Invariant: a part's file holds everything it logged, the traceback of the error it ended with, and the stack of a crash
outside Python. A restarted part continues the same file; a line is never written twice.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("tba.record.log")

LINE = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s"
TAIL_BYTES = 1 << 16


def log_path(run: Path, part: str) -> Path:
    """Returns where `part` of the run in directory `run` logs."""
    return run / "logs" / f"{part}.log"


def set_up_log(run: Path, part: str) -> logging.FileHandler:
    """From here on everything logged in this process, and every warning, goes to the part's log (times in UTC).

    A second call for the same file changes nothing. Returns the handler, so that it can be removed.
    """
    path = log_path(run, part).absolute()
    root = logging.getLogger()
    for there in root.handlers:
        if isinstance(there, logging.FileHandler) and there.baseFilename == str(path):
            return there
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    formatter = logging.Formatter(LINE, datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    if not faulthandler.is_enabled() and handler.stream is not None:
        faulthandler.enable(handler.stream)
    log.info("%s starts as process %d", part, os.getpid())
    return handler


class _LogFile(logging.FileHandler):
    """Writes a log and ignores errors of a full disk, which the run itself reports, once."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def log_to(run: Path, part: str) -> Iterator[Path]:
    """Logs to the part's file inside the block; an exception that leaves it is logged with its traceback, and
    re-raised.
    """
    root = logging.getLogger()
    level_before, crashes_elsewhere = root.level, faulthandler.is_enabled()
    handler = set_up_log(run, part)
    try:
        yield log_path(run, part)
        log.info("%s ends", part)
    except KeyboardInterrupt:
        log.info("%s was interrupted", part)
        raise
    except BaseException:
        log.exception("%s ends with an error", part)
        raise
    finally:
        if not crashes_elsewhere:
            faulthandler.disable()
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(level_before)
        handler.close()


def tail(path: Path, lines: int = 30) -> str:
    """Returns the last lines of a log; empty when there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
