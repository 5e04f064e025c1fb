"""`logs/PART.log`: what each part of a run said, in plain text.

Invariant: a part's file holds everything it logged, the traceback of the error it ended with, and the stack of a
crash outside Python. A restarted part goes on in the same file.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("tba.record.log")

LINE = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s"
TAIL_BYTES = 1 << 16


def log_path(run: Path, part: str) -> Path:
    """Where `part` of the run in directory `run` logs."""
    return run / "logs" / f"{part}.log"


@contextmanager
def log_to(path: Path, level: int = logging.INFO) -> Iterator[Path]:
    """Inside, everything logged in this process goes to `path`; an exception that leaves is logged, then goes on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    handler = logging.StreamHandler(stream)
    formatter = logging.Formatter(LINE, datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    level_before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)
    crashes_here = not faulthandler.is_enabled()
    if crashes_here:
        faulthandler.enable(stream)
    log.info("%s starts as process %d", path.stem, os.getpid())
    try:
        yield path
        log.info("%s ends", path.stem)
    except KeyboardInterrupt:
        log.info("%s was interrupted", path.stem)
        raise
    except BaseException:
        log.exception("%s ends with an error", path.stem)
        raise
    finally:
        if crashes_here:
            faulthandler.disable()
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(level_before)
        stream.close()


def tail(path: Path, lines: int = 30) -> str:
    """The last lines of a log; empty when there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
