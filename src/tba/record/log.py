"""`logs/PART.log`: the log of each part of a run, in plain text.

Invariant: a part's file holds everything it logged, the traceback of the error it ended with, and the stack of a crash
outside Python. A restarted part continues the same file; a line is never written twice. No control character of a text
from outside that a library logs, warns of or raises (a tensor's name) is written as it is, to a file or a terminal.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tba.errors import UserError
from tba.record.text import printable

log = logging.getLogger("tba.record.log")

LINE = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s"
TAIL_BYTES = 1 << 16


def log_path(run: Path, part: str) -> Path:
    """Returns where `part` of the run in directory `run` logs."""
    return run / "logs" / f"{part}.log"


class PrintableRecord(logging.LogRecord):
    """A record of any logger with control characters spelt out, its traceback's too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if isinstance(self.exc_info, tuple) and self.exc_info[0] is not None:
            self.exc_text = _printable_traceback(*self.exc_info).rstrip("\n")

    def getMessage(self) -> str:
        return printable(super().getMessage(), sys.maxsize)


def spell_out_control_characters() -> None:
    """Spell out control characters in what this process logs, warns of, or raises and does not catch from now on."""
    logging.setLogRecordFactory(PrintableRecord)
    warnings.formatwarning = _printable_warning
    sys.excepthook = _print_traceback


_format_warning = warnings.formatwarning


def _printable_warning(*arguments: Any, **options: Any) -> str:
    return printable(_format_warning(*arguments, **options), sys.maxsize)


def _printable_traceback(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> str:
    return printable("".join(traceback.format_exception(kind, error, trace)), sys.maxsize)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(_printable_traceback(kind, error, trace), end="", file=sys.stderr)  # noqa: T201 - where Python prints it


def set_up_log(run: Path, part: str) -> logging.FileHandler:
    """Write everything that this process logs, and every warning, to the part's log from now on (times in UTC).

    A second call for the same file changes nothing. Returns the handler, so that it can be removed.
    """
    path = log_path(run, part).absolute()
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == str(path):
            return handler
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    formatter = logging.Formatter(LINE, datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    spell_out_control_characters()
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
    """Log to the part's file inside the block; an exception that leaves the block is logged with its traceback (bad
    input without one), and re-raised.
    """
    root = logging.getLogger()
    previous_level, had_faulthandler = root.level, faulthandler.is_enabled()
    previous_hooks = logging.getLogRecordFactory(), warnings.formatwarning, sys.excepthook
    handler = set_up_log(run, part)
    try:
        yield log_path(run, part)
        log.info("%s ends", part)
    except KeyboardInterrupt:
        log.info("%s was interrupted", part)
        raise
    except UserError as error:
        log.error("%s ends: %s", part, error)
        raise
    except BaseException:
        log.exception("%s ends with an error", part)
        raise
    finally:
        if not had_faulthandler:
            faulthandler.disable()
        logging.captureWarnings(False)
        logging.setLogRecordFactory(previous_hooks[0])
        warnings.formatwarning, sys.excepthook = previous_hooks[1:]
        root.removeHandler(handler)
        root.setLevel(previous_level)
        handler.close()


def tail(path: Path, lines: int = 30) -> str:
    """Returns the last lines of a log; empty when there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
