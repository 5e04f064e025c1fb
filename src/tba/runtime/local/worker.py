"""One worker of a run in its own process: `python -m tba.runtime.local.worker searcher-0 RUN`. The driver starts it.

Invariant: a worker ends when its driver is gone. The driver holds the other end of this process's standard input: a
byte from it is a request to stop (which is not lost, however early it comes), and end of file means that the driver has
died, for whatever reason.

Exit codes: 0 done or asked to stop, 1 an error of its own (left in logs/WORKER.error.json), 2 input it cannot use, 3
its driver is gone, 4 the disk is full (nothing more can be left).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tba.runtime.local.heartbeat import Heartbeat, heartbeat_file

if TYPE_CHECKING:
    from tba.runtime.run_directory import RunDirectory

ORPHANED = 3  # exit code: its driver is gone
NO_SPACE = 4  # exit code: the disk is full
_GRACE_SECONDS = 5.0  # that an orphan has to end by itself


class StopListener:
    """Says whether the driver or SIGTERM has requested a stop, or the driver is gone. A call is also a heartbeat."""

    def __init__(self, heartbeat: Path) -> None:
        self._event = threading.Event()
        self._heartbeat = Heartbeat(heartbeat)

    def __call__(self) -> bool:
        self._heartbeat.beat()
        return self._event.is_set()

    def listen(self) -> None:
        """Install the signal handler and a thread that reads standard input. SIGINT is handled by the driver."""
        signal.signal(signal.SIGTERM, lambda *_: self._event.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._read_driver_pipe, name="driver-watch", daemon=True).start()

    def _read_driver_pipe(self) -> None:
        while os.read(0, 4096):
            self._event.set()
        self._event.set()
        threading.Event().wait(_GRACE_SECONDS)
        os._exit(ORPHANED)


def run(arguments: Sequence[str]) -> int:
    """Run a worker (`trainer`, `trainer-N` or `searcher-N`) of the run at a path until it is done.

    Returns its exit code.
    """
    worker, path = arguments[0], Path(arguments[1])
    stop = StopListener(heartbeat_file(path, worker))
    stop.listen()
    faulthandler.register(signal.SIGUSR1)  # writes a stack trace to its log
    from tba.record.log import set_up_log
    from tba.runtime.run_directory import RunDirectory

    directory = RunDirectory.open(path)
    set_up_log(path, worker)
    try:
        _run_part(worker, directory, stop)
    except BaseException as error:  # noqa: BLE001 - the process ends here; the driver shows the error as its own
        return _leave_error(directory, worker, error)
    return 0


def _leave_error(run: RunDirectory, worker: str, error: BaseException) -> int:
    """Leave the error for the driver, as far as the disk takes it; returns the exit code."""
    from tba.errors import UserError
    from tba.record.jsonl import write_json
    from tba.record.text import printable
    from tba.runtime.disk import disk_full, outside_cause

    stack = traceback.format_exc()
    is_disk_full = disk_full(error, run.path) is not None
    with suppress(OSError):
        report = f"{worker} ends: {error}" if isinstance(error, UserError) else stack  # a sentence needs no traceback
        print(printable(report, sys.maxsize), file=sys.stderr)  # noqa: T201 - standard error is the worker's log
    error = outside_cause(error, run.path) or error
    try:
        if not is_disk_full and (run.path / "recipe.json").exists():  # else it was moved, and is not made anew
            write_json(run.error(worker), {"kind": type(error).__name__, "message": str(error), "traceback": stack})
    except OSError as write_error:
        is_disk_full = disk_full(write_error, run.path) is not None
    if is_disk_full:
        return NO_SPACE
    return 2 if isinstance(error, UserError) else 1


def _run_part(worker: str, run: RunDirectory, stop: StopListener) -> None:
    """Run the trainer, one of its further ranks, or a searcher that works on this disk, until it is done."""
    from tba.runtime.devices import extend_segments, limit_gpu_memory

    number, recipe = int(worker.partition("-")[2] or 0), run.recipe()
    extend_segments(recipe, worker)
    limit_gpu_memory()
    if worker == "trainer":
        from tba.runtime.trainer_loop import run_trainer

        run_trainer(recipe, run, stop)
    elif worker.startswith("trainer-"):
        from tba.runtime.ranks.start import follow

        follow(run, number)
    else:
        from tba.runtime.searcher_loop import NICENESS, run_searcher, start_searching

        attempt = int(os.environ.get("TBA_ATTEMPT", "0"))
        os.nice(NICENESS)
        run_searcher(recipe, lambda: start_searching(recipe, run, number, attempt, stop, background=True), stop)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
