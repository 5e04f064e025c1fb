"""Ends what is left of a Ray cluster of our own once its driver is gone, for whatever reason: a process that outlives
it.

    python -m tba.runtime.cluster.reaper FOLDER     the driver holds the other end of its standard input

Ray has the kernel end its servers with the driver, but its agents stay for a minute, and a worker that hangs stays for
ever. All of them were given FOLDER on their command line, or write their logs below it. Where there is no /proc nothing
is found.

Invariant: no other process is killed, such as one that reads those logs; FOLDER is deleted at the end unless the driver
says that somebody will want to look into it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_KEEP = b"keep"
_DEADLINE_SECONDS = 30.0  # seconds for all of them to be gone
_POLL_SECONDS = 0.1


@contextmanager
def folder_for_ray() -> Iterator[Path]:
    """Yields a folder for Ray's sockets and logs; when the block or this process ends, all processes that use it are
    ended.
    """
    # short: the paths of sockets begin with it, and are limited in length
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=os.environ.get("RAY_TMPDIR"))).resolve()
    reaper = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", "tba.runtime.cluster.reaper", str(folder)], stdin=subprocess.PIPE, start_new_session=True
    )
    assert reaper.stdin is not None
    try:
        yield folder
    except Exception:
        with suppress(BrokenPipeError):
            reaper.stdin.write(_KEEP)
            reaper.stdin.flush()
        raise
    finally:
        reaper.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            reaper.wait(_DEADLINE_SECONDS + 1.0)


def reap(folder: Path, spared_pid: int) -> None:
    """Kill all processes that use the folder except the process `spared`, until two scans in a row find none."""
    quiet_scans, deadline = 0, time.monotonic() + _DEADLINE_SECONDS
    while quiet_scans < 2 and time.monotonic() < deadline:
        pids = [pid for pid in _users(folder) if pid not in (spared_pid, os.getpid())]
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) == pid:  # a worker, with the processes that it has started
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGKILL)
        quiet_scans = 0 if pids else quiet_scans + 1
        time.sleep(_POLL_SECONDS)


def _users(folder: Path) -> list[int]:
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if _was_given(p, folder) or _writes_into(p, folder)]


def _was_given(process: Path, folder: Path) -> bool:
    """Returns whether its command line has `--SOME-OPTION=FOLDER...`, as that of Ray's own processes."""
    with suppress(OSError):
        return f"={folder}".encode() in (process / "cmdline").read_bytes()
    return False


def _writes_into(process: Path, folder: Path) -> bool:
    """Returns whether it has a file there open for writing: workers and agents rewrite their command lines."""
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                if os.readlink(descriptor).startswith(f"{folder}/"):
                    flags = (process / "fdinfo" / descriptor.name).read_text().partition("flags:")[2].split()[0]
                    if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                        return True
    return False


if __name__ == "__main__":
    driver_pid = os.getppid()
    driver_message = sys.stdin.buffer.read()  # until the driver closes it, or is gone
    reap(Path(sys.argv[1]), driver_pid)
    if driver_message != _KEEP:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
