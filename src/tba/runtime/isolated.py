"""Grades answers in a process whose main thread calls the reward: signals work there, and it can be killed.

A *nursery* (any command that ends in `be_nursery`) loads what the reward is made of, once, and forks a process for each
grader, so that one that was killed is replaced in milliseconds. Where a process cannot be forked safely once it has
loaded its libraries (all but Linux), each grader is the command itself.

Invariant: a call of `grade` ends: with a value for each answer, with what the reward raised, or, once its time is over,
with `DeadlineExceeded`. A process that took too long, died, or wrote anything but the answer to its question is never
asked again; the next call has another. No process outlives the one that asks, however that ends: its nursery sees its
input close and kills all of them and what they have started, and they are killed with their nursery.

Questions and answers are JSON, one to a line, over a socket that nothing else writes to: what a reward prints goes to
the standard error. A number is drawn for each question, so that nothing written by a process that a reward forked can
pass for its answer.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import io
import json
import os
import platform
import random
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tba.errors import DeadlineExceeded, PartFailed, TbaError, UserError
from tba.protocols import Reward, Separable
from tba.runtime.answers_json import Answered, read_answers, read_values, write_answers, write_values
from tba.types import Json, quoted
from tba.user_code import print_error, user_code_error

CAN_FORK = platform.system() == "Linux"
_START_SECONDS = 300.0  # that loading a recipe may take
_END_SECONDS = 2.0  # that a process has to end by itself
_BLOCK = 1 << 16
_LONGEST_LINE = 1 << 26  # bytes of an answer
_LONGEST_TEXT = 4000  # characters of an error
_PARENT_DEATH_SIGNAL = 1  # of prctl
_ERRORS: dict[str, type[TbaError]] = {"DeadlineExceeded": DeadlineExceeded, "PartFailed": PartFailed}


class Raised(Exception):
    """Stands for what a reward raised in its process: the type's name and the text, as a `UserError`'s cause."""


class _Ended(Exception):
    """Raised when the other end has closed, or wrote what was not asked for."""


class _Line:
    """A socket over which JSON goes, a value to a line, with a deadline for each."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel, self._read = channel, b""

    def send(self, value: Json, deadline: float) -> None:
        """Raises `TimeoutError` at the deadline, `_Ended` where nobody reads."""
        self._wait_until(deadline)
        try:
            self.channel.sendall(json.dumps(value).encode() + b"\n")
        except TimeoutError:
            raise
        except OSError:
            raise _Ended from None

    def next(self, deadline: float) -> Json:
        """Returns the next value. Raises `TimeoutError` at the deadline, `_Ended` at the end."""
        while b"\n" not in self._read:
            self._wait_until(deadline)
            try:
                block = self.channel.recv(_BLOCK)
            except TimeoutError:
                raise
            except OSError:
                block = b""
            if not block or len(self._read) > _LONGEST_LINE:
                raise _Ended
            self._read += block
        line, _, self._read = self._read.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise _Ended from None

    def has_news(self) -> bool:
        """Returns whether anything has arrived, or its end."""
        self.channel.settimeout(0.0)
        try:
            return bool(self._read) or self.channel.recv(1, socket.MSG_PEEK) is not None
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _wait_until(self, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self.channel.settimeout(seconds)


@dataclass
class Graders:
    """Starts the processes that grade by one reward. Every method may be called from any thread."""

    command: Sequence[str]
    name: str = "the reward"  # for messages
    start_seconds: float = _START_SECONDS
    forks: bool = CAN_FORK
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _nurseries: list[_Nursery] = field(default_factory=list)  # at most one
    _refusal: str = ""  # what loading the reward raised: it would again

    def __post_init__(self) -> None:
        self._finalizer = weakref.finalize(self, _end_all, self._nurseries)

    def grader(self, seconds: float) -> Isolated:
        """Returns what grades in a process of its own, within so many seconds a call."""
        return Isolated(self, seconds)

    def close(self) -> None:
        """End all processes; grading again starts new ones."""
        with self._lock:
            _end_all(self._nurseries)

    def start(self) -> _Process:
        """Start a process that grades. Raises `PartFailed` when none can be started."""
        deadline = time.monotonic() + self.start_seconds
        try:
            process = self._forked(deadline) if self.forks else _started_alone(self.command)
            reply = process.first(deadline)
        except TimeoutError:
            raise PartFailed(
                f"waited {self.start_seconds:g} s for a process to load {self.name}, which has to run in one of its "
                "own: let the modules of its recipe do less when they are imported"
            ) from None
        except (_Ended, OSError) as error:
            raise PartFailed(
                f"no process can be started in which {self.name} runs, as it has to ({error}): look at what such a "
                "process wrote last, here or in the log of its searcher"
            ) from None
        if reply != "ready":
            process.end()
            raise PartFailed(self._refused(reply))
        return process

    def _forked(self, deadline: float) -> _Process:
        with self._lock:
            if self._refusal:
                raise PartFailed(self._refusal)
            if self._nurseries and self._nurseries[0].alive:
                with suppress(OSError):  # it dies at this moment
                    return self._nurseries[0].start()
            _end_all(self._nurseries)
            self._nurseries.append(_Nursery(self.command))
            try:
                reply = self._nurseries[0].first(deadline)
            except BaseException:
                _end_all(self._nurseries)
                raise
            if reply != "ready":
                _end_all(self._nurseries)
                self._refusal = self._refused(reply)
                raise PartFailed(self._refusal)
            return self._nurseries[0].start()

    def _refused(self, reply: Json) -> str:
        text = reply.get("error") if isinstance(reply, dict) else reply
        return f"{self.name} cannot run in a process of its own, where it has to: {text}"


@dataclass
class Isolated:
    """Grades answers in a process of its own, which is started with the first call; for one thread at a time."""

    graders: Graders
    seconds: float  # that a call may take
    _process: _Process | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def grade(self, answered: Sequence[Answered], part: int | None = None) -> list[Any]:
        """Returns the value of each answer: what a part of the reward, by its place in `calls`, gives; None: the
        judgement of its `judge`.

        Raises `DeadlineExceeded` when it takes more than `seconds`, `UserError` with the text of what the reward
        raised, or of how its process ended (its cause is `Raised`, except where the input was bad), and `PartFailed`
        when no process can be started.
        """
        if not answered:
            return []
        question = {"part": part, **write_answers(answered)}
        with self._lock:
            if self._process is not None and self._process.line.has_news():  # it has died, or speaks unasked
                self._drop()
            process = self._process = self._process or self.graders.start()
            try:
                reply = self._reply(process, question)
            except TimeoutError:
                self._drop()
                raise DeadlineExceeded(
                    f"waited {self.seconds:g} s for {self.graders.name} to grade {_what(answered)}, in a process of "
                    "its own, which was ended: make it faster, or raise --run.reward-deadline"
                ) from None
            except _Ended:
                how = process.how_it_ended()
                self._drop()
                raise UserError(
                    f"{self.graders.name} ended its process ({how}) while it graded {_what(answered)}: let it return "
                    "a number instead"
                ) from Raised(how)
            except BaseException:
                self._drop()  # its answer would be taken for one to the next question
                raise
        if "error" in reply:
            cause = None if reply["cause"] is None else Raised(reply["cause"])
            raise _ERRORS.get(reply["kind"], UserError)(reply["error"]) from cause
        return read_values(reply["values"])

    def close(self) -> None:
        """End its process; grading again starts another."""
        with self._lock:
            self._drop()

    def _reply(self, process: _Process, question: Json) -> dict[str, Json]:
        number, deadline = secrets.token_hex(8), time.monotonic() + self.seconds
        process.line.send([number, question], deadline)
        reply = process.line.next(deadline)
        if not (isinstance(reply, list) and len(reply) == 2 and reply[0] == number and isinstance(reply[1], dict)):
            process.note_end(reply)
            raise _Ended
        return reply[1]

    def _drop(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None


def _what(answered: Sequence[Answered]) -> str:
    (prompt, completion), count = answered[0], len(answered)
    besides = f" and {count - 1} other{'s' * (count > 2)}" if count > 1 else ""
    return f"the answer {quoted(completion.text)} to prompt {quoted(prompt.text)} of task {prompt.task}{besides}"


class _Process:
    """A process that grades, as its parent sees it. `alone`: it is no nursery's, and nobody else says how it ended."""

    def __init__(
        self, channel: socket.socket, kill: Callable[[], None], alone: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.line, self._alone, self._code = _Line(channel), alone, ""
        self._finalizer = weakref.finalize(self, _let_go, channel, kill)

    def first(self, deadline: float) -> Json:
        """Returns the first that it says. Raises `TimeoutError`, and `_Ended` with how it ended; it is killed then."""
        try:
            message = self.line.next(deadline)
            self.note_end(message)
            if self._code:
                raise _Ended
            return message
        except _Ended:
            how = self.how_it_ended()
            self.end()
            raise _Ended(how) from None
        except TimeoutError:
            self.end()
            raise

    def end(self) -> None:
        """Kill it, with what it has started."""
        self._finalizer()

    def note_end(self, message: Json) -> None:
        """Take what its nursery writes when it has ended; anything else says nothing."""
        if isinstance(message, dict) and isinstance(message.get("ended"), int):
            self._code = _how(message["ended"])

    def how_it_ended(self) -> str:
        """Returns how it ended, as far as that is told within a moment."""
        with suppress(TimeoutError, _Ended, subprocess.TimeoutExpired):
            if not self._code and self._alone is not None:
                self._code = _how(self._alone.wait(_END_SECONDS))
            elif not self._code:
                self.note_end(self.line.next(time.monotonic() + _END_SECONDS))
        return self._code or "how is not known"


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"by signal {-code}"


def _let_go(channel: socket.socket, kill: Callable[[], None]) -> None:
    channel.close()
    kill()


class _Nursery:
    """The parent's side of the process that forks the others."""

    def __init__(self, command: Sequence[str]) -> None:
        self.channel, remote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = _execute(command, "nursery", self.channel, remote_end)
        self._count, self._parent = 0, os.getpid()
        self._sends = threading.Lock()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def first(self, deadline: float) -> Json:
        """Returns the first that it says: that it is ready, or why it cannot be."""
        self.channel.settimeout(max(0.001, deadline - time.monotonic()))
        if not (block := self.channel.recv(_BLOCK)):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_SECONDS)
            raise _Ended("it does not speak" if self.process.returncode is None else _how(self.process.returncode))
        return json.loads(block)

    def start(self) -> _Process:
        self._count += 1
        local_end, remote_end = socket.socketpair()
        number = self._count
        try:
            with remote_end:
                self._send({"start": number}, [remote_end.fileno()])
        except OSError:
            local_end.close()
            raise
        return _Process(local_end, lambda: self.kill(number))

    def kill(self, number: int) -> None:
        with suppress(OSError):  # it is dead, and so are those that it forked
            if os.getpid() == self._parent:  # no copy of the process that has it
                self._send({"kill": number}, [])

    def _send(self, message: Json, descriptors: list[int]) -> None:
        with self._sends:
            socket.send_fds(self.channel, [json.dumps(message).encode()], descriptors)

    def end(self) -> None:
        """Close its input, which makes it kill all that it has forked and exit; kill it when it does not."""
        self.channel.close()
        if os.getpid() != self._parent:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        self.process.kill()
        self.process.wait()


def _end_all(nurseries: list[_Nursery]) -> None:
    while nurseries:
        nurseries.pop().end()


def _execute(
    command: Sequence[str], how: str, local_end: socket.socket, remote_end: socket.socket
) -> subprocess.Popen[bytes]:
    """Start the command with one end of a channel as its input; where that fails, the other end is closed too."""
    try:
        with remote_end:
            return subprocess.Popen(  # noqa: S603 - our own command
                [*command, how],
                stdin=remote_end.fileno(),
                stdout=2,
                start_new_session=True,  # Ctrl-C is the parent's business
            )
    except BaseException:
        local_end.close()
        raise


def _started_alone(command: Sequence[str]) -> _Process:
    """Start the command as a grader itself."""
    local_end, remote_end = socket.socketpair()
    process, parent = _execute(command, "alone", local_end, remote_end), os.getpid()

    def kill() -> None:
        if os.getpid() == parent:
            _kill(process.pid)
            process.wait()

    return _Process(local_end, kill, process)


def _kill(process: int) -> None:
    """Kill a process, the first of its group, with what it has started."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


# What follows runs in the processes.


def be_nursery(load: Callable[[], Callable[[], Reward]], how: str) -> NoReturn:
    """Serve until the parent is gone: as a nursery, or `alone` as what grades. Does not return.

    `load` imports all that the reward is made of; what it returns makes the reward, in each process that grades.
    """

    def serve() -> None:
        channel = _own_channel()
        if how == "alone":
            threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
            _grade(channel, lambda: load()())
        else:
            _serve(channel, load)

    _end_after(serve)


def _end_after(act: Callable[[], None]) -> NoReturn:
    """End this process after an act, with 1 and an error printed where that raised, and run nothing else in it."""
    code = 1
    try:
        act()
        code = 0
    except BaseException as error:  # noqa: BLE001 - the process ends here
        print_error(error)
    finally:
        _exit(code)


def _own_channel() -> socket.socket:
    """Returns the socket that is this process's standard input, which from here on is empty."""
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what is killed writes nothing more
    return channel


def _end_with(channel: socket.socket) -> None:
    """End this process, whatever it is doing, once nobody is there to ask."""
    poll = select.poll()
    poll.register(channel, 0)  # which tells of its end all the same
    poll.poll()
    time.sleep(_END_SECONDS)  # it may end by itself
    _kill(os.getpid())


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _serve(channel: socket.socket, load: Callable[[], Callable[[], Reward]]) -> None:
    """Fork and kill what is asked for, until the parent is gone; then kill all of them."""
    try:
        make = load()
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        channel.send(json.dumps(_error_of(error, "loading it")).encode())
        return
    gc.collect()
    gc.freeze()  # pages that are shared stay shared
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the selector
    wake, wakes = os.pipe()
    for end in (wake, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    graders: dict[int, tuple[int, socket.socket]] = {}  # by number, the process and what it is talked to by
    channel.send(b'"ready"')
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wake:
                    os.read(wake, _BLOCK)
                    _reap(graders)
                    continue
                block, descriptors, _, _ = socket.recv_fds(channel, _BLOCK, 1)
                if not block:
                    for process, _ in graders.values():
                        _kill(process)
                    return
                order = json.loads(block)
                if (number := order.get("kill")) in graders:
                    _kill(graders[number][0])
                elif "start" in order:
                    line = socket.socket(fileno=descriptors[0])
                    line.set_inheritable(False)  # else what the reward starts would hold it open
                    if (process := _fork()) == 0:
                        _be_grader(line, make, [channel.fileno(), wake, wakes, *(each for _, each in graders.values())])
                    graders[order["start"]] = process, line


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: they are a matrix library's
        return os.fork()


def _reap(graders: dict[int, tuple[int, socket.socket]]) -> None:
    """Tell the parent, over the line of each process that has ended, how it ended; kill what it has left behind."""
    for number, (process, line) in list(graders.items()):
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        _kill(process)  # its group, while no other process can have its number
        _, status = os.waitpid(process, 0)
        line.settimeout(0.0)
        with suppress(OSError):
            line.send(json.dumps({"ended": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)  # also for what may hold a copy of it
        line.close()
        del graders[number]


def _be_grader(line: socket.socket, make: Callable[[], Reward], to_close: Sequence[int | socket.socket]) -> NoReturn:
    """Grade, in a forked process. Does not return, and runs nothing of what its nursery has still to do."""
    nursery = os.getppid()

    def grade() -> None:
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != nursery:
            return
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in to_close:
            os.close(end) if isinstance(end, int) else end.close()
        random.seed()
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()
        _grade(line, make)

    _end_after(grade)


def _grade(channel: socket.socket, make: Callable[[], Reward]) -> None:
    """Answer questions, in this process's main thread, until they end."""
    try:
        reward = make()
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        channel.sendall(json.dumps(_error_of(error, "making it")).encode() + b"\n")
        return
    channel.sendall(b'"ready"\n')
    for question in channel.makefile("rb"):
        number, asked_for = json.loads(question)
        reply = _reply_to(reward, asked_for)
        channel.sendall(f'["{number}", {reply}]\n'.encode())


def _reply_to(reward: Reward, question: Json) -> str:
    """Returns the values, or what was raised, as JSON."""
    try:
        try:
            return json.dumps({"values": write_values(_values(reward, question["part"], read_answers(question)))})
        finally:
            if hasattr(signal, "setitimer"):
                signal.setitimer(signal.ITIMER_REAL, 0)  # the call is over, and with it a limit that it forgot
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        return json.dumps(_error_of(error, f"the reward {type(reward).__name__}"))


def _values(reward: Reward, part: int | None, answered: Sequence[Answered]) -> Sequence[Any]:
    if part is None:
        return reward.judge(answered)
    assert isinstance(reward, Separable)
    values = reward.calls()[part].grade(answered)
    return asyncio.run(_awaited(values)) if inspect.isawaitable(values) else values


async def _awaited(values: Any) -> Any:
    return await values


def _error_of(error: BaseException, doing: str) -> dict[str, Json]:
    """Returns what the parent is to raise: the text, and the cause of what is not bad input."""
    meant = isinstance(error, TbaError)
    text = str(error) if meant else str(user_code_error(doing, error))
    cause = error.__cause__ if meant else error
    return {
        "error": text[:_LONGEST_TEXT],
        "kind": type(error).__name__ if meant else "UserError",
        "cause": None if cause is None else f"{type(cause).__name__}: {cause}"[:_LONGEST_TEXT],
    }
