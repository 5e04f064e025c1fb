"""The lock of a run, held by the driver and by every worker that it started, until the last of them ends.

    lock          the driver's, which child processes inherit
    lock-parts    of workers that cannot inherit it, because they are not its children

Invariant: nobody else can hold a run while its driver or a worker of it lives.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tba.errors import UserError

_LOCK, _PARTS_LOCK = "lock", "lock-parts"
_POLL = 0.05  # seconds between two attempts at the lock
_PROBE = 0.5  # seconds to wait for a process that only probes whether a run is held


@contextmanager
def hold(run: Path, seconds: float) -> Iterator[int]:
    """Hold the run, and yield the lock's descriptor. Raises `UserError` when others hold it for `seconds`."""
    with (run / _LOCK).open("a+") as file:
        deadline = time.monotonic() + max(seconds, _PROBE)
        while not (_try_lock(file.fileno()) and _is_free_of_parts(run)):
            if time.monotonic() >= deadline:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise UserError(
                    f"the run at {run} is still in progress (process {holder} or a worker of it): "
                    "let it end, or end it, before it is resumed"
                )
            time.sleep(_POLL)
        file.truncate(0)
        file.write(f"{os.getpid()}")
        file.flush()
        yield file.fileno()


def hold_shared(run: Path) -> IO[str]:
    """Hold the run for a worker that has not inherited the lock, for as long as the returned file is open."""
    file = (run / _PARTS_LOCK).open("a")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def is_held(run: Path) -> bool:
    """Returns whether the run at `run` is going on: its driver, or a worker of it, lives."""
    try:
        with (run / _LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # a filesystem without locks
        return driver_lives(run)
    return False


def driver_lives(run: Path) -> bool:
    """Returns whether the process that last held the run as its driver is alive on this machine."""
    try:
        os.kill(int((run / _LOCK).read_text()), 0)
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _is_free_of_parts(run: Path) -> bool:
    """Returns whether no worker keeps it any longer."""
    if not (run / _PARTS_LOCK).exists():
        return True
    with (run / _PARTS_LOCK).open("a") as file:
        return _try_lock(file.fileno())


def _try_lock(descriptor: int) -> bool:
    """Returns whether the lock could be taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a filesystem without locks: nobody can be kept out
    return True
