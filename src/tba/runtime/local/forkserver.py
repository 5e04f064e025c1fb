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
_WAIT_SECONDS = 60.0  # seconds for a killed worker to be gone: the forkserver may still be importing
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
    """The program of a process: `python -m MODULE ARGUMENTS`, by the module's `run(arguments)` with its exit code."""

    name: str  # what `top` shows
    module: str
    arguments: tuple[str, ...]
    loads: tuple[str, ...] = ()  # modules that it imports, which a forkserver has loaded by the next time
    cwd: str = field(default_factory=os.getcwd)  # its working directory


def start(program: Program, environment: Mapping[str, str], log: int, descriptors: Sequence[int] = ()) -> Child:
    """Start a process whose output goes to the descriptor `log`, and which keeps the other descriptors open for life.

    The process has a session of its own: Ctrl-C reaches only its driver. The end of its input tells it that the driver
    is gone.
    """
    if _CAN_FORK:
        return _running_forkserver().start(program, environment, log, descriptors)
    return subprocess.Popen(  # noqa: S603 - our own module, our own arguments
        [sys.executable, "-m", program.module, *program.arguments],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=dict(environment),
        cwd=program.cwd,
        pass_fds=descriptors,
        start_new_session=True,
    )


def prepare_forkserver() -> None:
    """Fork this process's forkserver now, which costs nothing: for a command that still has only one thread.

    Otherwise the first worker starts an interpreter as the forkserver, which imports everything once more. So does the
    first worker of a process that has started CUDA, which no fork of the process could use.
    """
    global _forkserver
    torch = sys.modules.get("torch")
    has_cuda = torch is not None and torch.cuda.is_initialized()
    if _CAN_FORK and _forkserver is None and threading.active_count() == 1 and not has_cuda:
        _forkserver = Forkserver.fork()


@dataclass
class _Forked:
    """A child of the forkserver, as its driver sees it."""

    forkserver: Forkserver
    number: int
    stdin: IO[bytes]
    pid: int = 0  # 0: the forkserver has not started it yet
    code: int | None = None

    def poll(self) -> int | None:
        self.forkserver.poll()
        return self.code

    def kill(self) -> None:
        if self.poll() is None:
            self.forkserver.send({"kill": self.number})

    def wait(self) -> int:
        """Wait until the child has ended; returns its exit code. Raises `PartFailed` after a minute."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise PartFailed(f"waited {_WAIT_SECONDS:g} s for process {self.pid} to end, which was killed")
            self.forkserver.poll(0.05)
        assert self.code is not None
        return self.code


@dataclass
class Forkserver:
    """The driver's side of the forkserver."""

    channel: socket.socket
    process: int
    is_alive: bool = True
    _children: dict[int, _Forked] = field(default_factory=dict)
    _count: int = 0
    _loaded_modules: set[str] = field(default_factory=set)
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)  # a study starts its runs from threads

    @classmethod
    def fork(cls) -> Forkserver:
        """Fork a forkserver from this process, with all that it has loaded."""
        driver_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()  # otherwise buffered text would be written twice
        sys.stderr.flush()
        with warnings.catch_warnings():
            # about threads: they are a matrix library's, which survives a fork
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            driver_end.close()
            run_forkserver(server_end)
        server_end.close()
        return cls(driver_end, process)

    @classmethod
    def execute(cls) -> Forkserver:
        """Start a forkserver as an interpreter of its own, which loads what its workers need."""
        driver_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            popen = subprocess.Popen(
                [sys.executable, "-m", "tba.runtime.local.forkserver"],
                stdin=server_end.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        popen.returncode = 0  # we wait for it ourselves
        return cls(driver_end, popen.pid)

    def __post_init__(self) -> None:
        atexit.register(self._end, os.getpid())

    def start(self, program: Program, environment: Mapping[str, str], log: int, descriptors: Sequence[int]) -> _Forked:
        worker_end, driver_end = os.pipe()
        with self.one_at_a_time:
            self._count += 1
            stdin = os.fdopen(driver_end, "wb", buffering=0)
            child = self._children[self._count] = _Forked(self, self._count, stdin)
        if modules := {*_LIBRARIES, *program.loads} - self._loaded_modules:
            self._loaded_modules |= modules
            self.send({"import": sorted(modules)})
        order = {"number": child.number, **asdict(program), "env": dict(environment)}
        try:
            self.send(order, (worker_end, log, *descriptors))
        finally:
            os.close(worker_end)
        return child

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send an order to the forkserver. If the forkserver has died, the next `poll` notices."""
        with self.one_at_a_time, suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.channel, [json.dumps(message).encode()], descriptors)

    def poll(self, seconds: float = 0.0) -> None:
        """Read the forkserver's answers, waiting for them for at most `seconds`."""
        with self.one_at_a_time:
            self.channel.settimeout(seconds)
            while self.is_alive:
                try:
                    block = self.channel.recv(MESSAGE)
                except (BlockingIOError, TimeoutError):
                    break
                except ConnectionResetError:
                    block = b""
                if not block:
                    self._note_death()
                    break
                self._note_child(**json.loads(block))
                self.channel.settimeout(0.0)
            self.channel.settimeout(_WAIT_SECONDS)

    def _note_child(self, number: int, pid: int, code: int | None) -> None:
        child = self._children[number]
        child.pid, child.code = pid, code
        if code is not None:
            del self._children[number]

    def _end(self, driver: int) -> None:
        """End the forkserver with its driver: remaining workers find that out by themselves."""
        if os.getpid() == driver:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.process, signal.SIGKILL)
                os.waitpid(self.process, 0)
            self.channel.close()

    def _note_death(self) -> None:
        """End the workers of a forkserver that was killed, and treat them as killed: nobody can say how they end."""
        self.is_alive = False
        for child in self._children.values():
            with suppress(ProcessLookupError):
                if child.pid:
                    os.kill(child.pid, signal.SIGKILL)
            child.code = _KILLED
        self._children.clear()


_forkserver: Forkserver | None = None


_creation_lock = threading.Lock()


def _running_forkserver() -> Forkserver:
    global _forkserver  # one for all runs of a process, which share the libraries that it has loaded
    with _creation_lock:
        if _forkserver is not None:
            _forkserver.poll()
        if _forkserver is None or not _forkserver.is_alive:
            _forkserver = Forkserver.execute()
        return _forkserver


MESSAGE = 1 << 20  # bytes at most
_DESCRIPTORS = 16  # that may come with a message


def run_forkserver(channel: socket.socket) -> None:
    """Serve as a forkserver in a forked process. Does not return, and runs nothing that the driver has still to do."""
    os.setsid()
    with open(os.devnull, "r+b") as null_device:
        os.dup2(null_device.fileno(), 0)
        os.dup2(null_device.fileno(), 1)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # the driver may have replaced them
    _serve_and_exit(channel)


def _serve_and_exit(channel: socket.socket) -> None:
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
    """Fork workers as the driver orders, until it is gone. Returns, in a forked process, its worker's exit code."""
    Path("/proc/self/comm").write_text("tba-forge")
    for number in (signal.SIGINT, signal.SIGTERM):  # the driver shuts down in order, and needs this process for that
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the selector
    wake_reader, wake_writer = os.pipe()
    for descriptor in (wake_reader, wake_writer):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    children: dict[int, int] = {}  # number -> process
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake_reader, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wake_reader:
                    os.read(wake_reader, 4096)
                    _reap(channel, children)
                    continue
                try:
                    block, descriptors, _, _ = socket.recv_fds(channel, MESSAGE, _DESCRIPTORS)
                except ConnectionResetError:  # the driver was killed with an answer unread
                    return 0
                if not block:
                    return 0
                order = json.loads(block)
                if "module" not in order:
                    _follow_order(order, children)
                    continue
                process = os.fork()
                if process == 0:
                    signal.set_wakeup_fd(-1)
                    for descriptor in (wake_reader, wake_writer, channel.detach()):
                        os.close(descriptor)
                    return _run_worker(order, descriptors)
                children[order["number"]] = process
                _send_state(channel, order["number"], process, None)
                for descriptor in descriptors:
                    os.close(descriptor)


def _follow_order(order: dict[str, Any], children: dict[int, int]) -> None:
    if (number := order.get("kill")) in children:
        os.kill(children[number], signal.SIGKILL)
    for name in order.get("import", ()):
        with suppress(ImportError):  # a worker that needs it reports the error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pages that are shared stay shared


def _reap(channel: socket.socket, children: dict[int, int]) -> None:
    for number, process in list(children.items()):
        ended_pid, status = os.waitpid(process, os.WNOHANG)
        if ended_pid:
            del children[number]
            _send_state(channel, number, process, os.waitstatus_to_exitcode(status))


def _send_state(channel: socket.socket, number: int, process: int, code: int | None) -> None:
    with suppress(BrokenPipeError):
        channel.send(json.dumps({"number": number, "pid": process, "code": code}).encode())


def _run_worker(order: dict[str, Any], descriptors: Sequence[int]) -> int:
    """Run a worker, in the forked process: as `python -m MODULE ARGUMENTS`, with the environment and descriptors of the
    order.
    """
    os.setsid()  # Ctrl-C reaches only the driver, which ends the workers in order
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    stdin, log, *_ = descriptors
    for descriptor, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.close(stdin)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    Path("/proc/self/comm").write_text(f"tba-{order['name']}"[:15])  # what `top` and `ps` show
    code: int = importlib.import_module(order["module"]).run(order["arguments"])
    return code


if __name__ == "__main__":
    _serve_and_exit(socket.socket(fileno=os.dup(0)))
