"""NVIDIA's Multi-Process Service (MPS) for the workers of a run that share a GPU: their kernels run side by side, where
otherwise the GPU belongs to one process at a time.

The daemon serves one run: its clients find it through a folder that nobody else knows. The folder is in the
temporary directory, because the path of a socket is short; its logs are in the run's.

Invariants: a daemon has taken a kernel of a client before a worker is sent to it; one that cannot be had is a reason in
words. No daemon outlives its run for long: the run's driver holds a lock on the folder, and the next run on a GPU ends
the daemons whose lock nobody holds, because their drivers were killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tba.errors import PartFailed, TbaError
from tba.gpus import VISIBLE_DEVICES
from tba.runtime.local.forkserver import Program, start

CONTROL = "nvidia-cuda-mps-control"
PREFIX = "tba-mps-"  # of the folders of daemons
START_SECONDS = 20.0  # that the daemon may take to start, or to answer
QUIT_SECONDS = 20.0  # that it may take to end: it waits for clients
PROBE_SECONDS = 120.0  # that its first client may take, in which CUDA starts
_PIPES, _LOGS, _PRIORITY = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_CLIENT_PRIORITY"
_PROCESS_NAMES = b"nvidia-cuda-mps"  # how the names of the daemon's processes begin
_OWNER = "owner"  # the file that a daemon's driver has locked
_LONGEST_PATH = 80  # characters of a folder: a socket's path has at most 108
_POLL = 0.02  # seconds between two looks at the probe, whose process has no wait with a deadline, and at a stop
_STOPPED = "a stop was requested before it had started"


class MpsUnavailable(TbaError):
    """MPS cannot be had; the message is the reason in words."""


@dataclass(frozen=True)
class MpsDaemon:
    """A daemon of MPS that serves one GPU."""

    folder: Path  # of its sockets
    logs: Path
    gpu: str  # the GPU's name in CUDA_VISIBLE_DEVICES

    def environment(self, worker: str) -> dict[str, str]:
        """Returns the variables by which a worker is its client. Searchers come after the trainer."""
        priority = {} if worker.startswith("trainer") else {_PRIORITY: "1"}
        return {_PIPES: str(self.folder), _LOGS: str(self.logs), VISIBLE_DEVICES: "0"} | priority

    def start(self, stop: Callable[[], bool]) -> None:
        """Start the daemon. Raises `MpsUnavailable`, also where a stop is requested meanwhile."""
        output = self.folder / "start.log"
        with output.open("wb") as file:
            code = self._call(("-d",), b"", START_SECONDS, file.fileno(), "started", stop)
        if code:
            raise MpsUnavailable(f"{CONTROL} ended with exit code {code}{_last_line(output)}")
        if self._call((), b"get_server_list\n", START_SECONDS, subprocess.DEVNULL, "answered", stop):
            raise MpsUnavailable(f"{CONTROL} has started and is gone{_last_line(self.logs / 'control.log')}")

    def require_client(self, device: str, stop: Callable[[], bool]) -> None:
        """Compute something as a client. Raises `MpsUnavailable` where the GPU does not permit it, by its compute mode
        or because it is divided (MIG), and where a stop is requested meanwhile.
        """
        output = self.folder / "probe.log"
        with output.open("wb") as file:
            program = Program("mps-probe", "tba.runtime.local.mps", (device,))
            process = start(program, {**os.environ, **self.environment("trainer")}, file.fileno())
        limit = time.monotonic() + PROBE_SECONDS
        while process.poll() is None and time.monotonic() < limit and not stop():
            time.sleep(_POLL)
        code = process.poll()
        with suppress(PartFailed):  # one that hangs in the GPU's driver does not end
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
        if code is None and stop():
            raise MpsUnavailable(_STOPPED)
        if code is None:
            raise MpsUnavailable(f"a process that computes under MPS was not done after {PROBE_SECONDS:g} s")
        if code:
            raise MpsUnavailable(f"no process computes under MPS on this GPU{_last_line(output)}")

    def end(self) -> None:
        """End the daemon and what it has started, by force where it does not end by itself, and remove its folder."""
        try:
            if (self.folder / "control").exists():
                with suppress(MpsUnavailable):
                    self._call((), b"quit\n", QUIT_SECONDS, subprocess.DEVNULL, "ended")
        finally:  # also where Ctrl-C ends the wait: without the folder nobody would find the daemon again
            for process in _processes_of(self.folder):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _call(
        self,
        arguments: Sequence[str],
        text: bytes,
        seconds: float,
        output: int,
        deed: str,
        stop: Callable[[], bool] = lambda: False,
    ) -> int:
        """Call the daemon's program; returns its exit code. Raises `MpsUnavailable`. deed: what it does, for that."""
        folders = {_PIPES: str(self.folder), _LOGS: str(self.logs), VISIBLE_DEVICES: self.gpu}
        command, environment = [CONTROL, *arguments], {**os.environ, **folders}
        limit = time.monotonic() + seconds
        try:
            with subprocess.Popen(  # noqa: S603 - a fixed program with fixed arguments
                command, stdin=subprocess.PIPE, env=environment, stdout=output, stderr=subprocess.STDOUT
            ) as process:
                try:
                    assert process.stdin is not None
                    with suppress(BrokenPipeError):  # it has ended; a few bytes never block
                        process.stdin.write(text)
                        process.stdin.close()
                    while True:
                        with suppress(subprocess.TimeoutExpired):
                            return process.wait(_POLL)
                        if stop() or time.monotonic() > limit:
                            reason = _STOPPED if stop() else f"{CONTROL} had not {deed} after {seconds:g} s"
                            raise MpsUnavailable(reason)
                except BaseException:
                    process.kill()
                    raise
        except OSError as error:
            raise MpsUnavailable(f"{CONTROL} cannot be called: {error.strerror}") from error


@contextmanager
def mps_daemon(
    gpu: str, logs: Path, device: str = "cuda", stop: Callable[[], bool] = lambda: False
) -> Iterator[MpsDaemon]:
    """Have a daemon of MPS for a GPU while this is entered, once what drivers that were killed have left is ended.

    gpu: its name in CUDA_VISIBLE_DEVICES. device: on which the daemon's first client computes, as torch calls it. stop:
    whether the run shall end; only the daemon's end is waited for then. Raises `MpsUnavailable` where there is none, or
    a file of it cannot be written; nothing of it stays then.
    """
    if shutil.which(CONTROL) is None:
        raise MpsUnavailable(f"there is no {CONTROL} here, which comes with NVIDIA's driver")
    end_left_daemons()
    with ExitStack() as closers:
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_short_folder()))
            closers.callback(shutil.rmtree, folder, ignore_errors=True)
            closers.callback(os.close, _take_lock(folder))
            logs.mkdir(parents=True, exist_ok=True)
            daemon = MpsDaemon(folder, logs, gpu)
            closers.callback(daemon.end)
            daemon.start(stop)
            daemon.require_client(device, stop)
        except OSError as error:
            raise MpsUnavailable(f"its files cannot be written: {error.strerror or error}") from error
        yield daemon


def end_left_daemons() -> None:
    """End this user's daemons whose drivers are gone."""
    for folder in _short_folder().glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another user's, or one that is being made
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_uid == os.getuid():
                MpsDaemon(folder, folder, "").end()
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def run(arguments: Sequence[str]) -> int:
    """Compute something on a device, as a client's process; returns its exit code."""
    import torch

    signal.alarm(int(PROBE_SECONDS))  # ends it although its driver was killed
    torch.ones(1, device=arguments[0]).add_(1).item()
    return 0


def _take_lock(folder: Path) -> int:
    """Returns a descriptor that holds the lock of a new folder. The locked file appears as such."""
    temporary_file = folder / f"{_OWNER}.new"
    lock = os.open(temporary_file, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    temporary_file.rename(folder / _OWNER)
    return lock


def _short_folder() -> Path:
    """Returns the temporary directory, or one whose path a socket's leaves room for."""
    folder = Path(tempfile.gettempdir())
    return folder if len(str(folder)) + len(PREFIX) + 8 <= _LONGEST_PATH else Path("/tmp")  # noqa: S108 - mkdtemp makes a private one in it


def _processes_of(folder: Path) -> Iterator[int]:
    """Yields the processes of the daemon in a folder, which their environments name."""
    variable = f"{_PIPES}={folder}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # not a process, not ours, or gone
            is_named = any(Path(os.fsdecode(word)).name.encode().startswith(_PROCESS_NAMES) for word in _command(entry))
            if is_named and variable in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def _command(process: Path) -> list[bytes]:
    """Returns the program of a process, and its first argument, which is the program of a script's interpreter."""
    return (process / "cmdline").read_bytes().split(b"\0")[:2]


def _last_line(file: Path) -> str:
    """Returns the last line of a log, to end a sentence with; empty where there is none."""
    try:
        lines = file.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f": {lines[-1].strip()[:200]}" if lines else ""
