"""Grades answers in a process whose main thread calls the reward: signals work there, and it can be killed.

A *nursery* (any command that ends in `serve_grading`) loads what the reward is made of, once, and forks a process for
each grader, so that one that was killed is replaced in milliseconds. Where a process cannot be forked safely once it
has loaded its libraries (all but Linux), each grader is the command itself.

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
from tba.types import Json, quote
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


class _ChannelBroken(Exception):
    """Says that the other end of a channel has closed, or wrote what was not asked for."""


class _JsonChannel:
    """A socket that carries JSON values, one to a line, with a deadline for each."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._unread = connection, b""

    def send(self, value: Json, deadline: float) -> None:
        """Send a value. Raises `TimeoutError` at the deadline, `_ChannelBroken` where nobody reads."""
        self._wait_until(deadline)
        try:
            self._connection.sendall(json.dumps(value).encode() + b"\n")
        except TimeoutError:
            raise
        except OSError:
            raise _ChannelBroken from None

    def next(self, deadline: float) -> Json:
        """Returns the next value. Raises `TimeoutError` at the deadline, `_ChannelBroken` at the end."""
        while b"\n" not in self._unread:
            self._wait_until(deadline)
            try:
                block = self._connection.recv(_BLOCK)
            except TimeoutError:
                raise
            except OSError:
                block = b""
            if not block or len(self._unread) > _LONGEST_LINE:
                raise _ChannelBroken
            self._unread += block
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise _ChannelBroken from None

    def has_news(self) -> bool:
        """Returns whether the other end has written something, or has closed."""
        self._connection.settimeout(0.0)
        try:
            return bool(self._unread) or self._connection.recv(1, socket.MSG_PEEK) is not None
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _wait_until(self, deadline: float) -> None:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self._connection.settimeout(seconds)


@dataclass
class Graders:
    """Starts the processes that grade by one reward. Every method may be called from any thread."""

    command: Sequence[str]
    name: str = "the reward"  # for messages
    start_seconds: float = _START_SECONDS
    forks: bool = CAN_FORK
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _nurseries: list[_GraderNursery] = field(default_factory=list)  # at most one
    _loading_error: str = ""  # what loading the reward raised: it would again

    def __post_init__(self) -> None:
        self._finalizer = weakref.finalize(self, _end_all, self._nurseries)

    def grader(self, seconds: float) -> IsolatedGrader:
        """Returns a grader with a process of its own; a call of it may take so many seconds."""
        return IsolatedGrader(self, seconds)

    def close(self) -> None:
        """End all processes; grading again starts new ones."""
        with self._lock:
            _end_all(self._nurseries)

    def start(self) -> _RewardProcess:
        """Start a process that grades. Raises `PartFailed` when none can be started."""
        deadline = time.monotonic() + self.start_seconds
        try:
            process = self._fork_grader(deadline) if self.forks else _start_alone(self.command)
            reply = process.read_first_message(deadline)
        except TimeoutError:
            raise PartFailed(
                f"waited {self.start_seconds:g} s for a process to load {self.name}, which has to run in one of its "
                "own: let the modules of its recipe do less when they are imported"
            ) from None
        except (_ChannelBroken, OSError) as error:
            raise PartFailed(
                f"no process can be started in which {self.name} runs, as it has to ({error}): look at what such a "
                "process wrote last, here or in the log of its searcher"
            ) from None
        if reply != "ready":
            process.end()
            raise PartFailed(self._refusal_message(reply))
        return process

    def _fork_grader(self, deadline: float) -> _RewardProcess:
        with self._lock:
            if self._loading_error:
                raise PartFailed(self._loading_error)
            if self._nurseries and self._nurseries[0].is_alive:
                with suppress(OSError):  # it dies at this moment
                    return self._nurseries[0].start()
            _end_all(self._nurseries)
            self._nurseries.append(_GraderNursery(self.command))
            try:
                reply = self._nurseries[0].read_first_message(deadline)
            except BaseException:
                _end_all(self._nurseries)
                raise
            if reply != "ready":
                _end_all(self._nurseries)
                self._loading_error = self._refusal_message(reply)
                raise PartFailed(self._loading_error)
            return self._nurseries[0].start()

    def _refusal_message(self, reply: Json) -> str:
        text = reply.get("error") if isinstance(reply, dict) else reply
        return f"{self.name} cannot run in a process of its own, where it has to: {text}"


@dataclass
class IsolatedGrader:
    """Grades answers in a process of its own, which is started with the first call; for one thread at a time."""

    graders: Graders
    seconds: float  # that a call may take
    _process: _RewardProcess | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def grade(self, answers: Sequence[Answered], part: int | None = None) -> list[Any]:
        """Returns the value that a part of the reward, by its place in `calls`, gives to each answer; without a part,
        the judgement of its `judge`.

        Raises `DeadlineExceeded` when it takes more than `seconds`, `UserError` with the text of what the reward
        raised, or of how its process ended (its cause is `Raised`, except where the input was bad), and `PartFailed`
        when no process can be started.
        """
        if not answers:
            return []
        question = {"part": part, **write_answers(answers)}
        with self._lock:
            if self._process is not None and self._process.channel.has_news():  # it has died, or speaks unasked
                self._end_process()
            process = self._process = self._process or self.graders.start()
            try:
                reply = self._ask(process, question)
            except TimeoutError:
                self._end_process()
                raise DeadlineExceeded(
                    f"waited {self.seconds:g} s for {self.graders.name} to grade {_describe(answers)}, in a process of "
                    "its own, which was ended: make it faster, or raise --run.reward-deadline"
                ) from None
            except _ChannelBroken:
                ending = process.describe_exit()
                self._end_process()
                raise UserError(
                    f"{self.graders.name} ended its process ({ending}) while it graded {_describe(answers)}: let it "
                    "return a number instead"
                ) from Raised(ending)
            except BaseException:
                self._end_process()  # its answer would be taken for one to the next question
                raise
        if "error" in reply:
            cause = None if reply["cause"] is None else Raised(reply["cause"])
            raise _ERRORS.get(reply["kind"], UserError)(reply["error"]) from cause
        return read_values(reply["values"])

    def close(self) -> None:
        """End its process; grading again starts another."""
        with self._lock:
            self._end_process()

    def _ask(self, process: _RewardProcess, question: Json) -> dict[str, Json]:
        number, deadline = secrets.token_hex(8), time.monotonic() + self.seconds
        process.channel.send([number, question], deadline)
        reply = process.channel.next(deadline)
        if not (isinstance(reply, list) and len(reply) == 2 and reply[0] == number and isinstance(reply[1], dict)):
            process.note_exit(reply)
            raise _ChannelBroken
        return reply[1]

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None


def _describe(answers: Sequence[Answered]) -> str:
    (prompt, completion), count = answers[0], len(answers)
    suffix = f" and {count - 1} other{'s' * (count > 2)}" if count > 1 else ""
    return f"the answer {quote(completion.text)} to prompt {quote(prompt.text)} of task {prompt.task}{suffix}"


class _RewardProcess:
    """A process that grades, as its parent sees it. `popen` is given where no nursery tells how the process ended."""

    def __init__(
        self, channel: socket.socket, kill: Callable[[], None], popen: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.channel, self._popen, self._ending = _JsonChannel(channel), popen, ""
        self._finalizer = weakref.finalize(self, _close_and_kill, channel, kill)

    def read_first_message(self, deadline: float) -> Json:
        """Returns the process's first message. Kills it before raising `TimeoutError`, or `_ChannelBroken` with why."""
        try:
            message = self.channel.next(deadline)
            self.note_exit(message)
            if self._ending:
                raise _ChannelBroken
            return message
        except _ChannelBroken:
            ending = self.describe_exit()
            self.end()
            raise _ChannelBroken(ending) from None
        except TimeoutError:
            self.end()
            raise

    def end(self) -> None:
        """Kill the process, with what it has started."""
        self._finalizer()

    def note_exit(self, message: Json) -> None:
        """Read from a message of the nursery how the process ended; ignore any other message."""
        if isinstance(message, dict) and isinstance(message.get("ended"), int):
            self._ending = _describe_exit(message["ended"])

    def describe_exit(self) -> str:
        """Returns how the process ended, as far as that is known within a moment."""
        with suppress(TimeoutError, _ChannelBroken, subprocess.TimeoutExpired):
            if not self._ending and self._popen is not None:
                self._ending = _describe_exit(self._popen.wait(_END_SECONDS))
            elif not self._ending:
                self.note_exit(self.channel.next(time.monotonic() + _END_SECONDS))
        return self._ending or "how is not known"


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"by signal {-code}"


def _close_and_kill(channel: socket.socket, kill: Callable[[], None]) -> None:
    channel.close()
    kill()


class _GraderNursery:
    """The parent's side of the process that forks the graders."""

    def __init__(self, command: Sequence[str]) -> None:
        self.channel, remote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = _execute(command, "nursery", self.channel, remote_end)
        self._count, self._parent_pid = 0, os.getpid()
        self._send_lock = threading.Lock()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def read_first_message(self, deadline: float) -> Json:
        """Returns the nursery's first message: that it is ready, or why it cannot be."""
        self.channel.settimeout(max(0.001, deadline - time.monotonic()))
        if not (block := self.channel.recv(_BLOCK)):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_SECONDS)
            code = self.process.returncode
            raise _ChannelBroken("it does not speak" if code is None else _describe_exit(code))
        return json.loads(block)

    def start(self) -> _RewardProcess:
        self._count += 1
        local_end, remote_end = socket.socketpair()
        number = self._count
        try:
            with remote_end:
                self._send({"start": number}, [remote_end.fileno()])
        except OSError:
            local_end.close()
            raise
        return _RewardProcess(local_end, lambda: self.kill(number))

    def kill(self, number: int) -> None:
        with suppress(OSError):  # it is dead, and so are those that it forked
            if os.getpid() == self._parent_pid:  # no copy of the process that has it
                self._send({"kill": number}, [])

    def _send(self, message: Json, descriptors: list[int]) -> None:
        with self._send_lock:
            socket.send_fds(self.channel, [json.dumps(message).encode()], descriptors)

    def end(self) -> None:
        """Close the nursery's input, so that it kills all that it has forked and exits; kill it when it does not."""
        self.channel.close()
        if os.getpid() != self._parent_pid:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        self.process.kill()
        self.process.wait()


def _end_all(nurseries: list[_GraderNursery]) -> None:
    while nurseries:
        nurseries.pop().end()


def _execute(
    command: Sequence[str], mode: str, local_end: socket.socket, remote_end: socket.socket
) -> subprocess.Popen[bytes]:
    """Start the command with one end of a channel as its input; where that fails, the other end is closed too."""
    try:
        with remote_end:
            return subprocess.Popen(  # noqa: S603 - our own command
                [*command, mode],
                stdin=remote_end.fileno(),
                stdout=2,
                start_new_session=True,  # Ctrl-C is the parent's business
            )
    except BaseException:
        local_end.close()
        raise


def _start_alone(command: Sequence[str]) -> _RewardProcess:
    """Start the command as a grader, without a nursery."""
    local_end, remote_end = socket.socketpair()
    process, parent_pid = _execute(command, "alone", local_end, remote_end), os.getpid()

    def kill() -> None:
        if os.getpid() == parent_pid:
            _kill(process.pid)
            process.wait()

    return _RewardProcess(local_end, kill, process)


def _kill(pid: int) -> None:
    """Kill a process, the first of its group, with what it has started."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


# What follows runs in the processes.


def serve_grading(load: Callable[[], Callable[[], Reward]], mode: str) -> NoReturn:
    """Serve until the parent is gone, as a nursery or, in the mode `alone`, as a grader. Does not return.

    `load` imports all that the reward is made of; what it returns makes the reward, in each process that grades.
    """

    def serve() -> None:
        channel = _channel_from_stdin()
        if mode == "alone":
            threading.Thread(target=_exit_when_closed, args=(channel,), daemon=True).start()
            _grade(channel, lambda: load()())
        else:
            _serve(channel, load)

    _exit_after(serve)


def _exit_after(action: Callable[[], None]) -> NoReturn:
    """End this process after an action, with exit code 1 and a printed error where it raised; run nothing else."""
    code = 1
    try:
        action()
        code = 0
    except BaseException as error:  # noqa: BLE001 - the process ends here
        print_error(error)
    finally:
        _exit(code)


def _channel_from_stdin() -> socket.socket:
    """Returns the socket that is this process's standard input, which from here on is empty."""
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as null_device:
        os.dup2(null_device.fileno(), 0)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what is killed writes nothing more
    return channel


def _exit_when_closed(channel: socket.socket) -> None:
    """End this process, whatever it is doing, once the other end of the channel is closed."""
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
    """Fork and kill graders as the parent orders; kill all of them once the parent is gone."""
    try:
        make_reward = load()
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        channel.send(json.dumps(_error_as_json(error, "loading it")).encode())
        return
    gc.collect()
    gc.freeze()  # pages that are shared stay shared
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the selector
    wake_pipe = wake_reader, wake_writer = os.pipe()
    for descriptor in wake_pipe:
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    graders: dict[int, tuple[int, socket.socket]] = {}  # by number, the process and its channel
    channel.send(b'"ready"')
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake_reader, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wake_reader:
                    os.read(wake_reader, _BLOCK)
                    _reap(graders)
                    continue
                block, descriptors, _, _ = socket.recv_fds(channel, _BLOCK, 1)
                if not block:
                    for pid, _ in graders.values():
                        _kill(pid)
                    return
                order = json.loads(block)
                if (number := order.get("kill")) in graders:
                    _kill(graders[number][0])
                elif "start" in order:
                    grader_channel = socket.socket(fileno=descriptors[0])
                    grader_channel.set_inheritable(False)  # else what the reward starts would hold it open
                    if (pid := _fork_process()) == 0:
                        siblings = [sibling for _, sibling in graders.values()]
                        _run_grader(grader_channel, make_reward, [channel.fileno(), *wake_pipe, *siblings])
                    graders[order["start"]] = pid, grader_channel


def _fork_process() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: they are a matrix library's
        return os.fork()


def _reap(graders: dict[int, tuple[int, socket.socket]]) -> None:
    """Tell the parent, over the channel of each process that has ended, how it ended; kill what it left behind."""
    for number, (pid, channel) in list(graders.items()):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        _kill(pid)  # its group, while no other process can have its number
        _, status = os.waitpid(pid, 0)
        channel.settimeout(0.0)
        with suppress(OSError):
            channel.send(json.dumps({"ended": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
        with suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)  # also for what may hold a copy of it
        channel.close()
        del graders[number]


def _run_grader(
    channel: socket.socket, make_reward: Callable[[], Reward], nursery_sockets: Sequence[int | socket.socket]
) -> NoReturn:
    """Grade in a forked process. Does not return, and runs nothing of what its nursery has still to do."""
    nursery_pid = os.getppid()

    def grade() -> None:
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != nursery_pid:
            return
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for nursery_socket in nursery_sockets:
            os.close(nursery_socket) if isinstance(nursery_socket, int) else nursery_socket.close()
        random.seed()
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()
        _grade(channel, make_reward)

    _exit_after(grade)


def _grade(channel: socket.socket, make_reward: Callable[[], Reward]) -> None:
    """Answer questions, in this process's main thread, until they end."""
    try:
        reward = make_reward()
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        channel.sendall(json.dumps(_error_as_json(error, "making it")).encode() + b"\n")
        return
    channel.sendall(b'"ready"\n')
    for line in channel.makefile("rb"):
        number, question = json.loads(line)
        channel.sendall(f'["{number}", {_reply_to(reward, question)}]\n'.encode())


def _reply_to(reward: Reward, question: Json) -> str:
    """Returns the values, or what was raised, as JSON."""
    try:
        try:
            return json.dumps({"values": write_values(_call_reward(reward, question["part"], read_answers(question)))})
        finally:
            if hasattr(signal, "setitimer"):
                signal.setitimer(signal.ITIMER_REAL, 0)  # the call is over, and with it a limit that it forgot
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        return json.dumps(_error_as_json(error, f"the reward {type(reward).__name__}"))


def _call_reward(reward: Reward, part: int | None, answers: Sequence[Answered]) -> Sequence[Any]:
    if part is None:
        return reward.judge(answers)
    assert isinstance(reward, Separable)
    values = reward.calls()[part].grade(answers)
    return asyncio.run(_await_values(values)) if inspect.isawaitable(values) else values


async def _await_values(values: Any) -> Any:
    return await values


def _error_as_json(error: BaseException, activity: str) -> dict[str, Json]:
    """Returns what the parent is to raise: the text, and the cause of what is not bad input."""
    is_tba_error = isinstance(error, TbaError)
    text = str(error) if is_tba_error else str(user_code_error(activity, error))
    cause = error.__cause__ if is_tba_error else error
    return {
        "error": text[:_LONGEST_TEXT],
        "kind": type(error).__name__ if is_tba_error else "UserError",
        "cause": None if cause is None else f"{type(cause).__name__}: {cause}"[:_LONGEST_TEXT],
    }
