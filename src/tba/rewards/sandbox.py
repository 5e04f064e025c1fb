"""Runs programs that nobody trusts, and talks with them: the side that stays outside of the sandbox.

Invariant: nothing that a program sends is evaluated, and every wait for one has a deadline. A program is told its job
and its questions and nothing else; what it writes is a claim, and who asked compares. A reply must name the random
number of its question. When a program has ended or is ended, so have all processes that it started. No program outlives
the process that started it (`rewards/sandbox_worker.py`).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tba.errors import PartFailed, UserError
from tba.rewards.sandbox_kernel import Bounds, Level
from tba.types import Json

LEVELS: tuple[Level, ...] = ("namespaces", "landlock")  # the strongest first
_START_SECONDS = 60.0  # that a worker may take until it is ready
_END_SECONDS = 10.0  # that it may take to end a program
_BLOCK = 1 << 16
_OUTPUT_BYTES = 1 << 20  # of one reply, and of a program's standard output
_BOOTSTRAP = (
    "import sys; paths = list(sys.path); sys.path += {paths!r}; "
    "from tba.rewards.sandbox_worker import main; main(paths)"
)
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Failure = Literal["timeout", "ended", "output", "unreadable"]


class ProgramFailed(Exception):
    """Raised when a program does not reply: too late, at its end, with too much, or with what cannot be read."""

    def __init__(self, reason: Failure) -> None:
        super().__init__(reason)
        self.reason: Failure = reason


@dataclass(frozen=True)
class Ending:
    """What is known about a program that has ended."""

    confinement: str  # "confined" where it was; else why not, or nothing where it was ended before
    status: int  # its exit code; below 0: the signal that ended it
    cpu_seconds: float
    memory_bytes: int  # at its peak
    too_many_threads: bool


class Sandbox:
    """A pool of workers, each of which runs one program at a time. Any thread may start programs.

    level: how programs are isolated. imports: packages beside the standard library that programs may import.
    runs_commands: programs of other languages are compiled and run.
    """

    def __init__(self, level: Level, imports: Sequence[str] = (), runs_commands: bool = False) -> None:
        self.level = level
        self._settings = {
            "level": level,
            "imports": list(imports),
            "packages": [path for name in imports for path in _package_paths(name)],
            "runs_commands": runs_commands,
        }
        self._idle: list[_SandboxWorker] = []
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end_workers, self._idle)

    def start(self, job: Json, bounds: Bounds, deadline: float, has_output: bool = False) -> SandboxedProgram:
        """Starts a program. Raises `PartFailed` where none can be started, `ProgramFailed` where it does not take its
        job until the deadline (of `time.monotonic`).

        has_output: its standard output can be read.
        """
        worker = self._take_worker()
        try:
            program = SandboxedProgram(worker, self, bounds, has_output)
        except OSError as error:
            self.give_back(worker)
            raise PartFailed(f"a program could not be started: {error}") from error
        try:
            program.send(job, deadline)
        except ProgramFailed:
            program.end()
            raise
        return program

    def close(self) -> None:
        """Ends the workers that have no program."""
        with self._lock:
            _end_workers(self._idle)

    def _take_worker(self) -> _SandboxWorker:
        with self._lock:
            if self._process != os.getpid():  # this process was forked: the workers are its parent's
                self._idle.clear()
                self._process = os.getpid()
            while self._idle:
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                worker.end()
        try:
            return _SandboxWorker(self._settings)
        except OSError as error:
            raise PartFailed(f"a sandbox of the level {self.level!r} could not be started: {error}") from error

    def give_back(self, worker: _SandboxWorker) -> None:
        """Takes a worker whose program has ended."""
        with self._lock:
            self._idle.append(worker)


class _SandboxWorker:
    """The process that starts programs, and the socket to it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.socket, its_side = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_side, ExitStack() as opened:  # closes the socket where no process can be started
            opened.enter_context(self.socket)
            folders = [str(Path(__file__).parents[2]), *(str(Path(path).parent) for path in settings["packages"])]
            bootstrap = _BOOTSTRAP.format(paths=folders)
            self.process = subprocess.Popen(  # noqa: S603 - this program
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-X",
                    "utf8",
                    "-c",
                    bootstrap,
                    str(its_side.fileno()),
                    json.dumps(settings),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[its_side.fileno()],
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,  # Ctrl-C is the parent's business
            )
            opened.pop_all()
        answer = self.receive(_START_SECONDS)
        if answer is None or "error" in answer:
            self.end()
            reason = "it ended, or did not answer" if answer is None else answer["error"]
            raise PartFailed(f"a sandbox of the level {settings['level']!r} could not be started: {reason}")

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        with suppress(OSError):  # it has died, which its answer tells
            socket.send_fds(self.socket, [message], descriptors)

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next message; None where the worker has died or takes longer."""
        self.socket.settimeout(seconds)
        with suppress(OSError):
            if message := self.socket.recv(_BLOCK):
                answer: dict[str, Any] = json.loads(message)
                return answer
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()


class SandboxedProgram:
    """A program that runs, and the channel to it."""

    def __init__(self, worker: _SandboxWorker, sandbox: Sandbox, bounds: Bounds, has_output: bool) -> None:
        self._worker, self._sandbox = worker, sandbox
        with ExitStack() as opened:  # closes the sockets where the rest cannot be opened
            self._channel, its_channel = map(opened.enter_context, socket.socketpair())
            self._output, its_output = os.pipe() if has_output else (-1, os.open(os.devnull, os.O_WRONLY))
            opened.pop_all()
        self._worker.send(json.dumps(asdict(bounds)).encode(), [its_channel.fileno(), its_output])
        its_channel.close()
        os.close(its_output)
        self._buffer = bytearray()
        self._number = ""  # of the last question

    def ask(self, *question: Json, deadline: float) -> list[Json]:
        """Returns the reply to a question. Raises `ProgramFailed` where there is none."""
        self._number = secrets.token_hex(8)
        return self.go_on([self._number, *question], deadline)

    def go_on(self, value: Json, deadline: float) -> list[Json]:
        """Returns the next reply to the last question, after a further line. Raises as `ask` does."""
        self.send(value, deadline)
        reply = self._receive(deadline)
        if not isinstance(reply, list) or reply[:1] != [self._number]:
            raise ProgramFailed("unreadable")
        return reply[1:]

    def send(self, value: Json, deadline: float) -> None:
        """Sends a line. Raises `ProgramFailed` where the program does not take it."""
        try:
            self._channel.settimeout(_seconds_until(deadline))
            self._channel.sendall(json.dumps(value).encode() + b"\n")
        except TimeoutError:
            raise ProgramFailed("timeout") from None
        except OSError:
            raise ProgramFailed("ended") from None

    def _receive(self, deadline: float) -> Json:
        """Returns the next line. Raises `ProgramFailed` where there is none."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > _OUTPUT_BYTES:
                raise ProgramFailed("output")
            try:
                self._channel.settimeout(_seconds_until(deadline))
                data = self._channel.recv(_BLOCK)
            except TimeoutError:
                raise ProgramFailed("timeout") from None
            except OSError:
                data = b""
            if not data:
                raise ProgramFailed("ended")
            self._buffer += data
        _seconds_until(deadline)  # a line that came too late is no reply
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise ProgramFailed("unreadable") from None

    def output(self, deadline: float) -> bytes:
        """Returns all that the program writes to its standard output, once it ends. Raises `ProgramFailed` when that
        takes too long or is too much.
        """
        output = bytearray()
        while len(output) <= _OUTPUT_BYTES:
            if not select.select([self._output], [], [], _seconds_until(deadline))[0]:
                raise ProgramFailed("timeout")
            data = os.read(self._output, _BLOCK)
            if not data:
                return bytes(output)
            output += data
        raise ProgramFailed("output")

    def end(self, wait: float = 0.0) -> Ending:
        """Ends the program, which may go on for `wait` seconds, and all processes that it has started.

        Raises `PartFailed` where it was not isolated, or its worker has died: then it says nothing about the program.
        """
        answer = self._worker.receive(wait) if wait > 0 else None
        if answer is None:
            self._worker.send(b"end")
            answer = self._worker.receive(_END_SECONDS)
        self._channel.close()
        if self._output >= 0:
            os.close(self._output)
        if answer is None:
            self._worker.end()
            raise PartFailed("a sandbox's worker has died, or did not end its program in time")
        ending = Ending(**answer)
        self._sandbox.give_back(self._worker)
        if ending.confinement != "confined" and (ending.confinement or ending.status != -signal.SIGKILL):
            reason = ending.confinement or f"its process ended with status {ending.status}"
            raise PartFailed(f"a program could not be isolated ({reason}), so it did not run")
        return ending


@functools.cache
def strongest_level(imports: tuple[str, ...] = (), runs_commands: bool = False) -> tuple[Level | None, str]:
    """Returns the strongest level at which this machine isolates programs, and why not at a stronger one, in words.

    Each level is tried out with a program.
    """
    reasons = []
    for level in LEVELS:
        if sys.platform != "linux":
            return None, "this is not Linux"
        if level == "landlock" and runs_commands:
            reasons.append("landlock: it runs no commands of other languages")
            continue
        sandbox = Sandbox(level, imports, runs_commands)
        try:
            deadline = time.monotonic() + _START_SECONDS
            program = sandbox.start({"kind": "functions", "code": ""}, Bounds(10, 1 << 30), deadline)
            try:
                program.ask("run", None, deadline=deadline)
            finally:
                program.end()
            return level, "; ".join(reasons)
        except (PartFailed, ProgramFailed) as error:
            reasons.append(f"{level}: {error}")
        finally:
            sandbox.close()
    return None, "; ".join(reasons)


def require_level(least: Level, imports: tuple[str, ...] = (), runs_commands: bool = False) -> Level:
    """Returns the strongest level of isolation here. Raises `UserError` where that is below the least one asked for."""
    level, reasons = strongest_level(imports, runs_commands)
    if level is None or LEVELS.index(level) > LEVELS.index(least):
        raise UserError(
            f"this machine isolates programs {'not at all' if level is None else f'at the level {level} only'} "
            f"({reasons}), and the level asked for is {least}: allow what is missing, or run them on a SandboxFusion "
            "server (docs/code_rewards.md)"
        )
    return level


def _seconds_until(deadline: float) -> float:
    """Returns the seconds that are left. Raises `ProgramFailed` where none are."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise ProgramFailed("timeout")
    return seconds


def _package_paths(name: str) -> list[str]:
    """Returns where a package lies, with the libraries that its wheel brings along."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        raise UserError(
            f"programs are to import the package {name!r}, which is not installed: install it, or leave it out"
        )
    paths = list(spec.submodule_search_locations or [spec.origin])
    libraries = Path(paths[0]).parent / f"{name}.libs"
    return [*paths, *([str(libraries)] if libraries.is_dir() else [])]


def _end_workers(workers: list[_SandboxWorker]) -> None:
    while workers:
        workers.pop().end()
