"""Makes a worker of a run, or a run of a study, a process: forked from a *forkserver*, which has loaded the libraries.

Importing torch and transformers takes seconds of a core. A forkserver does it once for all workers of a run, including
those that are restarted after they died; each worker then begins in milliseconds. On systems where a process cannot be
forked safely once it has loaded its libraries (all but Linux) each worker is an interpreter of its own.

The first half of this file is the driver's side; the second is what the forkserver itself runs, in one thread: it reaps
its workers and tells its driver how they ended. It ends when its driver is gone, which its workers then find out by
themselves. Orders and answers are JSON, one to a message:

    {"import": [names]}
    {"number", "name", "module", "arguments", "env", "cwd"}, with descriptors: input, log, those held for life
    {"kill": number}
    {"number", "pid", "code"}: an answer; the code is null while that process lives
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import platform
import selectors
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
from pathlib import Path
from typing import IO, Any, Protocol

from tba.errors import PartFailed

_LIBRARIES = ("tba.runtime.trainer_loop", "tba.runtime.searcher_loop", "tba.record.log")  # what every worker imports
_CAN_FORK = platform.system() == "Linux"
_WAIT = 60.0  # seconds for a killed worker to be gone: the forkserver may still be importing
_KILLED = -int(signal.SIGKILL)


class Child(Protocol):
    """A worker as a process, with the interface of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


@dataclass(frozen=True)
class Program:
    """Says what a process is to run: `python -m MODULE ARGUMENTS`, by the module's `run(arguments)`, which returns its
    exit code.
    """

    name: str  # what `top` shows
    module: str
    arguments: tuple[str, ...]
    loads: tuple[str, ...] = ()  # modules that it imports, which a forkserver has loaded by the next time
    cwd: str = field(default_factory=os.getcwd)  # its working directory


def start(program: Program, environment: Mapping[str, str], log: int, held: Sequence[int] = ()) -> Child:
    """Start a process whose output goes to descriptor `log`, and which keeps the descriptors `held` for life.

    It is in a session of its own: Ctrl-C reaches only this process. The end of its input tells it that this process is
    gone.
    """
    if _CAN_FORK:
        return _the_forkserver().start(program, environment, log, held)
    return subprocess.Popen(  # noqa: S603 - our own module, our own arguments
        [sys.executable, "-m", program.module, *program.arguments],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=dict(environment),
        cwd=program.cwd,
        pass_fds=held,
        start_new_session=True,
    )


def prepare() -> None:
    """Fork this process's forkserver now, which costs nothing: for a command that still has only one thread.

    Without it, starting the first worker starts an interpreter as the forkserver, which imports everything once more.
    So it is where this process has started CUDA, which what is forked from it could not use.
    """
    global _forkserver
    torch = sys.modules.get("torch")
    started = torch is not None and torch.cuda.is_initialized()
    if _CAN_FORK and _forkserver is None and threading.active_count() == 1 and not started:
        _forkserver = Forkserver.forked()


@dataclass
class _Forked:
    """A child of the forkserver, as its driver sees it."""

    forkserver: Forkserver
    number: int
    stdin: IO[bytes]
    pid: int = 0  # 0: not begun yet
    code: int | None = None

    def poll(self) -> int | None:
        self.forkserver.look()
        return self.code

    def kill(self) -> None:
        if self.poll() is None:
            self.forkserver.send({"kill": self.number})

    def wait(self) -> int:
        """Wait until it has ended; returns its exit code. Raises `PartFailed` when it has not ended within a minute."""
        deadline = time.monotonic() + _WAIT
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise PartFailed(f"waited {_WAIT:g} s for process {self.pid} to end, which was killed")
            self.forkserver.look(0.05)
        assert self.code is not None
        return self.code


@dataclass
class Forkserver:
    """The driver's side of the forkserver."""

    channel: socket.socket
    process: int
    alive: bool = True
    _children: dict[int, _Forked] = field(default_factory=dict)
    _count: int = 0
    _loaded: set[str] = field(default_factory=set)
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)  # a study starts its runs from threads

    @classmethod
    def forked(cls) -> Forkserver:
        """Fork a forkserver from this process, with all that it has loaded."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()  # otherwise buffered text would be written twice
        sys.stderr.flush()
        with warnings.catch_warnings():
            # about threads: they are a matrix library's, which survives a fork
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            ours.close()
            be_a_forkserver(theirs)
        theirs.close()
        return cls(ours, process)

    @classmethod
    def executed(cls) -> Forkserver:
        """Start a forkserver as an interpreter of its own, which loads what its workers need."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            executed = subprocess.Popen(
                [sys.executable, "-m", "tba.runtime.local.forkserver"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        executed.returncode = 0  # we wait for it ourselves
        return cls(ours, executed.pid)

    def __post_init__(self) -> None:
        atexit.register(self._end, os.getpid())

    def start(self, program: Program, environment: Mapping[str, str], log: int, held: Sequence[int]) -> _Forked:
        theirs, ours = os.pipe()
        with self.one_at_a_time:
            self._count += 1
            child = self._children[self._count] = _Forked(self, self._count, os.fdopen(ours, "wb", buffering=0))
        if wanted := {*_LIBRARIES, *program.loads} - self._loaded:
            self._loaded |= wanted
            self.send({"import": sorted(wanted)})
        order = {"number": child.number, **asdict(program), "env": dict(environment)}
        try:
            self.send(order, (theirs, log, *held))
        finally:
            os.close(theirs)
        return child

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send an order to the forkserver. If it has died, the next `look` notices."""
        with self.one_at_a_time, suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.channel, [json.dumps(message).encode()], descriptors)

    def look(self, seconds: float = 0.0) -> None:
        """Take in its answers, waiting for them for at most `seconds`."""
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
                self._note_child(**json.loads(block))
                self.channel.settimeout(0.0)
            self.channel.settimeout(_WAIT)

    def _note_child(self, number: int, pid: int, code: int | None) -> None:
        child = self._children[number]
        child.pid, child.code = pid, code
        if code is not None:
            del self._children[number]

    def _end(self, driver: int) -> None:
        """End with a driver that ends: remaining workers find that out by themselves."""
        if os.getpid() == driver:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.process, signal.SIGKILL)
                os.waitpid(self.process, 0)
            self.channel.close()

    def _gone(self) -> None:
        """The forkserver was killed, so nobody can say how its workers end: they are ended, and treated as killed."""
        self.alive = False
        for child in self._children.values():
            with suppress(ProcessLookupError):
                if child.pid:
                    os.kill(child.pid, signal.SIGKILL)
            child.code = _KILLED
        self._children.clear()


_forkserver: Forkserver | None = None


_making = threading.Lock()


def _the_forkserver() -> Forkserver:
    global _forkserver  # one for all runs of a process: it is what it has loaded
    with _making:
        if _forkserver is not None:
            _forkserver.look()
        if _forkserver is None or not _forkserver.alive:
            _forkserver = Forkserver.executed()
        return _forkserver


MESSAGE = 1 << 20  # bytes at most
_DESCRIPTORS = 16  # that may come with a message


def be_a_forkserver(channel: socket.socket) -> None:
    """Serve, in a forked process. Does not return, and runs nothing of what the driver has still to do."""
    os.setsid()
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # the driver may have replaced them
    _end_with(channel)


def _end_with(channel: socket.socket) -> None:
    code = 1
    try:
        code = _serve(channel)
    except BaseException as error:  # noqa: BLE001 - the process ends here
        from tba.user_code import print_error  # which loads libraries

        print_error(error)
    finally:
        with suppress(OSError):  # a full disk: a log without room must not keep this process alive
            sys.stdout.flush()
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _serve(channel: socket.socket) -> int:
    """Fork what is asked for, until the driver is gone. Returns, in a forked process, the exit code of its worker."""
    Path("/proc/self/comm").write_text("tba-forge")
    for one in (signal.SIGINT, signal.SIGTERM):  # the driver shuts down in order, and needs this process for that
        signal.signal(one, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the selector
    wake, wakes = os.pipe()
    for end in (wake, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    children: dict[int, int] = {}  # number -> process
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wake:
                    os.read(wake, 4096)
                    _reap(channel, children)
                    continue
                block, descriptors, _, _ = socket.recv_fds(channel, MESSAGE, _DESCRIPTORS)
                if not block:
                    return 0
                order = json.loads(block)
                if "module" not in order:
                    _obey(order, children)
                    continue
                process = os.fork()
                if process == 0:
                    signal.set_wakeup_fd(-1)
                    for end in (wake, wakes, channel.detach()):
                        os.close(end)
                    return _be_one(order, descriptors)
                children[order["number"]] = process
                _tell(channel, order["number"], process, None)
                for descriptor in descriptors:
                    os.close(descriptor)


def _obey(order: dict[str, Any], children: dict[int, int]) -> None:
    if (number := order.get("kill")) in children:
        os.kill(children[number], signal.SIGKILL)
    for name in order.get("import", ()):
        with suppress(ImportError):  # a worker that needs it reports the error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pages that are shared stay shared


def _reap(channel: socket.socket, children: dict[int, int]) -> None:
    for number, process in list(children.items()):
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            del children[number]
            _tell(channel, number, process, os.waitstatus_to_exitcode(status))


def _tell(channel: socket.socket, number: int, process: int, code: int | None) -> None:
    with suppress(BrokenPipeError):
        channel.send(json.dumps({"number": number, "pid": process, "code": code}).encode())


def _be_one(order: dict[str, Any], descriptors: Sequence[int]) -> int:
    """Run a worker, in the forked process: as `python -m MODULE ARGUMENTS`, with the environment and descriptors of the
    order.
    """
    os.setsid()  # Ctrl-C reaches only the driver, which ends the workers in order
    for one in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(one, signal.SIG_DFL)
    stdin, log, *_ = descriptors
    for descriptor, place in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, place)
    os.close(stdin)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    Path("/proc/self/comm").write_text(f"tba-{order['name']}"[:15])  # what `top` and `ps` show
    code: int = importlib.import_module(order["module"]).run(order["arguments"])
    return code


if __name__ == "__main__":
    _end_with(socket.socket(fileno=os.dup(0)))
