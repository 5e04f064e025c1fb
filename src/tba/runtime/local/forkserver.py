"""How a part of a run, or a run of a study, becomes a process: forked from one that has the libraries, a *forge*.

To import torch and transformers takes seconds of a core. A forge does it once for all parts of a run, and for those
that are started again after they died; a part of it begins in milliseconds. On systems where a process cannot be
forked safely once it has loaded its libraries (all but Linux) each part is an interpreter of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import IO, Protocol

from tba.errors import PartFailed
from tba.runtime.local.forked import MESSAGE, be_a_forge

_LIBRARIES = ("tba.runtime.loops", "tba.record.log")  # what every part imports
_CAN_FORK = platform.system() == "Linux"
_WAIT = 60.0  # seconds for a killed part to be gone: the forge may still be importing
_KILLED = -int(signal.SIGKILL)


class Child(Protocol):
    """A part as a process, the way `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


@dataclass(frozen=True)
class Program:
    """What a process is to run: `python -m MODULE ARGUMENTS`, by the module's `run(arguments)`, its exit code."""

    name: str  # what `top` shows
    module: str
    arguments: tuple[str, ...]
    loads: tuple[str, ...] = ()  # modules that it imports, which a forge has loaded by the next time


def start(program: Program, environment: Mapping[str, str], log: int, held: Sequence[int] = ()) -> Child:
    """A process whose output goes to descriptor `log`, and which has the descriptors `held` for life.

    It is in a session of its own: Ctrl-C reaches us only. The end of its input tells it that we are gone.
    """
    if _CAN_FORK:
        return _the_forge().start(program, environment, log, held)
    return subprocess.Popen(  # noqa: S603 - our own module, our own arguments
        [sys.executable, "-m", program.module, *program.arguments],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=dict(environment),
        pass_fds=held,
        start_new_session=True,
    )


def prepare() -> None:
    """Make this process's forge now, from itself, which costs nothing: for a command that has one thread yet.

    Without it the first part starts an interpreter for that, which imports all of it once more.
    """
    global _forge
    if _CAN_FORK and _forge is None and threading.active_count() == 1:
        _forge = Forge.forked()


@dataclass
class _Forged:
    """A child of the forge, as its driver sees it."""

    forge: Forge
    number: int
    stdin: IO[bytes]
    pid: int = 0  # 0: not begun yet
    code: int | None = None

    def poll(self) -> int | None:
        self.forge.look()
        return self.code

    def kill(self) -> None:
        if self.poll() is None:
            self.forge.send({"kill": self.number})

    def wait(self) -> int:
        """Until it has ended. Raises `PartFailed` when it has not in a minute."""
        deadline = time.monotonic() + _WAIT
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise PartFailed(f"waited {_WAIT:g} s for process {self.pid} to end, which was killed")
            self.forge.look(0.05)
        assert self.code is not None
        return self.code


@dataclass
class Forge:
    """The driver's end of it."""

    channel: socket.socket
    process: int
    alive: bool = True
    _children: dict[int, _Forged] = field(default_factory=dict)
    _count: int = 0
    _loaded: set[str] = field(default_factory=set)
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)  # a study starts its runs from threads

    @classmethod
    def forked(cls) -> Forge:
        """From this process, with all that it has loaded."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()  # or what waits there would be written twice
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: a matrix library's, which it forks well
            process = os.fork()
        if process == 0:
            ours.close()
            be_a_forge(theirs)
        theirs.close()
        return cls(ours, process)

    @classmethod
    def executed(cls) -> Forge:
        """An interpreter of its own, which loads what its parts want."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            executed = subprocess.Popen(
                [sys.executable, "-m", "tba.runtime.local.forked"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        executed.returncode = 0  # we wait for it ourselves
        return cls(ours, executed.pid)

    def __post_init__(self) -> None:
        atexit.register(self._end, os.getpid())

    def start(self, program: Program, environment: Mapping[str, str], log: int, held: Sequence[int]) -> _Forged:
        theirs, ours = os.pipe()
        with self.one_at_a_time:
            self._count += 1
            child = self._children[self._count] = _Forged(self, self._count, os.fdopen(ours, "wb", buffering=0))
        if wanted := {*_LIBRARIES, *program.loads} - self._loaded:
            self._loaded |= wanted
            self.send({"import": sorted(wanted)})
        order = {"number": child.number, **asdict(program), "env": dict(environment), "cwd": os.getcwd()}
        try:
            self.send(order, (theirs, log, *held))
        finally:
            os.close(theirs)
        return child

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """To the forge. One that has gone is noticed at the next look."""
        with self.one_at_a_time, suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.channel, [json.dumps(message).encode()], descriptors)

    def look(self, seconds: float = 0.0) -> None:
        """Take in what it has told, waiting at most so long for it."""
        with self.one_at_a_time:
            self.channel.settimeout(seconds)
            while self.alive:
                try:
                    block = self.channel.recv(MESSAGE)
                except (BlockingIOError, TimeoutError):
                    break
                except ConnectionResetError:
                    block = b""
                if not block:
                    self._gone()
                    break
                self._told(**json.loads(block))
                self.channel.settimeout(0.0)
            self.channel.settimeout(_WAIT)

    def _told(self, number: int, pid: int, code: int | None) -> None:
        child = self._children[number]
        child.pid, child.code = pid, code
        if code is not None:
            del self._children[number]

    def _end(self, driver: int) -> None:
        """Of a driver that ends: what is left of its parts sees that by itself."""
        if os.getpid() == driver:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.process, signal.SIGKILL)
                os.waitpid(self.process, 0)
            self.channel.close()

    def _gone(self) -> None:
        """It was killed: nobody says any longer how its parts end, so that they are ended, as if killed themselves."""
        self.alive = False
        for child in self._children.values():
            with suppress(ProcessLookupError):
                if child.pid:
                    os.kill(child.pid, signal.SIGKILL)
            child.code = _KILLED
        self._children.clear()


_forge: Forge | None = None


_making = threading.Lock()


def _the_forge() -> Forge:
    global _forge  # one for all runs of a process: it is what it has loaded
    with _making:
        if _forge is not None:
            _forge.look()
        if _forge is None or not _forge.alive:
            _forge = Forge.executed()
        return _forge
