"""Environments in processes of their own: an episode that raises, hangs or dies costs itself and nothing else.

Each episode has a process to itself as long as it lasts, and a process plays one episode after another. All are forked
from one that this process has forked before (the *nursery*), which has little memory of its own to copy and no other
threads; it ends what takes too long. Questions and answers are JSON, one to a line.

Invariant: every question gets exactly one answer, in time: the environment's, or that its episode has failed. No
process outlives the one that asks, however that ends: its nursery sees its input close and kills all of them, and they
are killed with their nursery (Linux's parent-death signal).
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import platform
import resource
import selectors
import signal
import socket
import sys
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tba.environments.episode import Episode, EpisodeFailed, Observation, begun
from tba.errors import PartFailed, UserError
from tba.fields import as_declared
from tba.protocols import Acted
from tba.types import Json, Judgement
from tba.user_code import print_error

CAN_FORK = platform.system() == "Linux"
_START_SECONDS = 60.0  # that a process may take until it is ready
_BLOCK = 1 << 16
_LONGEST_LINE = 1 << 20  # bytes of an answer
_MOMENT = 0.5  # seconds that waiting for an answer takes at most
_END_SECONDS = 10.0  # that the nursery has to end by itself
_POLL = 0.01  # seconds between two looks whether it has
_FAILED_STARTS = 3  # processes that end before they are ready, one after another: then it is not their episodes
_PARENT_DEATH_SIGNAL = 1  # of prctl


@dataclass(frozen=True)
@as_declared
class EpisodeLimits:
    """How episodes are played at once, and what each may take. Raises `UserError` when a field makes no sense."""

    processes: int = 64  # episodes at once, each in a process of its own; 0: in the searcher's, one turn after another
    seconds: float = 60.0  # that one turn may take, with the reset before the first and the reward after the last
    memory_gb: float = 1.0  # 10^9 bytes of address space that an environment may add to its process

    def __post_init__(self) -> None:
        if self.processes < 0:
            raise UserError(f"--task.limits.processes is {self.processes}: give a number of processes, or 0")
        for name in ("seconds", "memory_gb"):
            if not getattr(self, name) > 0:
                raise UserError(f"--task.limits.{name.replace('_', '-')} is {getattr(self, name)}, it must be above 0")

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect where there are no processes."""
        return {} if self.processes else dict.fromkeys(("seconds", "memory_gb"), "processes 64")


@dataclass(frozen=True)
class Beginning:
    """How an episode begins."""

    fields: Mapping[str, Json]  # the problem's
    seed: int
    prompt: str  # what the policy was told first
    said: Sequence[str] = ()  # turns that it goes on after


@dataclass(frozen=True)
class Question:
    """The next thing that happens to an episode: a turn, or its end where it was cut off."""

    begin: Beginning | None  # the episode begins with it
    turn: str | None  # what the policy has said; None: it says nothing more, and is judged as it stands
    cut: str | None = None  # a last turn that had no room left to end


@dataclass(frozen=True)
class Answer:
    """An environment's reply to a turn."""

    said: Observation | None = None  # None: it is over
    judgement: Judgement | None = None  # given when it is over
    failed: str = ""  # why there is no answer


class Stage:
    """Plays one episode after another, in whatever process it is."""

    def __init__(self, task: Acted) -> None:
        self._task = task
        self._episode: Episode | None = None

    def answer(self, question: Question) -> Answer:
        """Plays on. Raises `UserError` for an environment that is none."""
        try:
            if (new := question.begin) is not None:
                self.leave()
                self._episode = begun(self._task.environment, new.fields, new.seed, self._task.turns, new.prompt)
                self._episode.play_on(new.said)
            assert self._episode is not None
            if question.cut is not None:
                self._episode.cut(question.cut)
            said = None if question.turn is None else self._episode.say(question.turn)
            return Answer(said, self._episode.judgement() if said is None else None)
        except EpisodeFailed as error:
            return Answer(failed=str(error))

    def leave(self) -> None:
        """Let go of the episode."""
        if self._episode is not None:
            self._episode.close()
        self._episode = None


@dataclass
class Here:
    """Plays all episodes in this process: each question is answered at once, for as long as that takes."""

    task: Acted
    _stages: dict[int, Stage] = field(default_factory=dict)
    _answers: dict[int, Answer] = field(default_factory=dict)

    def ask(self, number: int, question: Question) -> None:
        """Asks what becomes of an episode."""
        if question.begin is not None:
            self._stages[number] = Stage(self.task)
        self._answers[number] = self._stages[number].answer(question)

    def answers(self, wait: bool) -> Mapping[int, Answer]:
        """Returns the answers since the last call, by episode."""
        answers, self._answers = self._answers, {}
        return answers

    def leave(self, number: int) -> None:
        """Lets go of an episode, whatever it is doing."""
        self._answers.pop(number, None)
        if (stage := self._stages.pop(number, None)) is not None:
            stage.leave()

    def close(self) -> None:
        """Lets go of all of them."""
        for number in list(self._stages):
            self.leave(number)


class _Host:
    """One process, as the searcher sees it: starting, free, or with an episode."""

    def __init__(self, number: int, channel: socket.socket) -> None:
        self.number, self.channel = number, channel
        channel.settimeout(_START_SECONDS)  # of a question that a process does not read
        self.episode: int | None = None
        self.asked = False
        self.ready = False
        self.deadline = time.monotonic() + _START_SECONDS
        self._read = b""

    def send(self, message: Json) -> None:
        with suppress(OSError):  # it has died, which its output's end tells
            self.channel.sendall(json.dumps(message).encode() + b"\n")

    def lines(self) -> list[bytes] | None:
        """Returns the complete lines that have arrived; None at the end of its output, or when a line is too long."""
        try:
            block = self.channel.recv(_BLOCK)
        except OSError:
            return None
        if not block or len(self._read) > _LONGEST_LINE:
            return None
        *lines, self._read = (self._read + block).split(b"\n")
        return lines


class Hosts:
    """Plays each episode in a process of its own; beyond `limits.processes` they wait until one is free."""

    def __init__(self, task: Acted, limits: EpisodeLimits) -> None:
        self.task, self.limits = task, limits
        self.lost: Counter[str] = Counter()  # processes that had to be replaced, by why
        self._selector = selectors.DefaultSelector()
        self._hosts: dict[int, _Host] = {}  # by number
        self._of: dict[int, _Host] = {}  # by episode, those that have begun
        self._free: list[_Host] = []
        self._waiting: deque[tuple[int, Question]] = deque()  # episodes that have not begun
        self._answers: dict[int, Answer] = {}
        self._count = self._failed_starts = 0
        self._started_by: dict[int, _Nursery] = {}  # of the processes that are not ready yet
        self._nurseries = [_Nursery(task, limits)]  # the last one is in use
        self._finalizer = weakref.finalize(self, _end_all, self._nurseries, self._hosts, self._selector)

    def ask(self, number: int, question: Question) -> None:
        """Asks what becomes of an episode; one question at a time."""
        if question.begin is not None:
            self._waiting.append((number, question))
            self._begin()
        elif (host := self._of.get(number)) is not None:
            self._put(host, question)
        else:  # its process has died between two turns
            self._answers[number] = Answer(failed="its process died")

    def answers(self, wait: bool) -> Mapping[int, Answer]:
        """Returns the answers since the last call, by episode. With `wait` it waits for one, but only for a moment.

        Raises `UserError` for an environment that is none, and `PartFailed` when no process can be started.
        """
        if wait and self._waiting and all(host.ready and not host.asked for host in self._hosts.values()):
            for _ in self._waiting:  # beyond the limit: those that have a process wait for those that have none
                self._start()
        now = time.monotonic()
        first = min((host.deadline for host in self._hosts.values()), default=now + _MOMENT) if wait else now
        for key, _ in self._selector.select(0.0 if self._answers else max(0.0, min(_MOMENT, first - now))):
            self._hear(key.data)
        self._end_late()
        self._begin()
        answers, self._answers = self._answers, {}
        return answers

    def leave(self, number: int) -> None:
        """Lets go of an episode, whatever it is doing."""
        self._answers.pop(number, None)
        if (host := self._of.pop(number, None)) is None:
            self._waiting = deque(one for one in self._waiting if one[0] != number)
        elif host.asked:
            self._lose(host)
        else:
            host.episode = None
            self._put(host, None)

    def close(self) -> None:
        """Lets go of all episodes; the processes stay for others."""
        for number in [*self._of, *(number for number, _ in self._waiting)]:
            self.leave(number)
        self._answers.clear()

    def end(self) -> None:
        """Ends all processes."""
        self._finalizer()

    def __len__(self) -> int:
        return len(self._hosts)

    def _begin(self) -> None:
        """Give processes to the episodes that wait for one; start as many as may be."""
        while self._waiting and self._free:
            number, question = self._waiting.popleft()
            host = self._free.pop()
            host.episode, self._of[number] = number, host
            self._put(host, question)
        starting = sum(not host.ready for host in self._hosts.values()) if self._waiting else 0
        while starting < len(self._waiting) and len(self._hosts) < self.limits.processes:
            self._start()
            starting += 1

    def _start(self) -> None:
        if not self._nurseries[-1].alive:
            self._nurseries.pop().close()
            self._nurseries.append(_Nursery(self.task, self.limits))
        self._count += 1
        host = self._hosts[self._count] = _Host(self._count, self._nurseries[-1].start(self._count))
        self._started_by[self._count] = self._nurseries[-1]
        self._selector.register(host.channel, selectors.EVENT_READ, host)

    def _put(self, host: _Host, question: Question | None) -> None:
        """Ask a process something; its time begins now. None: that it lets go of its episode."""
        host.asked, host.deadline = True, time.monotonic() + self.limits.seconds
        host.send(None if question is None else asdict(question))

    def _hear(self, host: _Host) -> None:
        if (lines := host.lines()) is None:
            if not host.ready and self._is_own_failure(host):
                self._failed_starts += 1
            self._lose(host, "died")
            if self._failed_starts >= _FAILED_STARTS:
                raise PartFailed(f"{_FAILED_STARTS} processes for environments ended before they were ready")
            return
        for line in lines:
            if not host.ready:
                host.ready, self._failed_starts = True, 0
                del self._started_by[host.number]
                self._be_free(host)
            elif not self._told(host, line):
                self._lose(host, "said something else than an answer")
            if host.number not in self._hosts:
                return

    def _is_own_failure(self, host: _Host) -> bool:
        """Returns whether a start has failed of itself. With a nursery die all that are starting: only the first
        counts.
        """
        nursery = self._started_by.pop(host.number)
        if nursery is self._nurseries[-1] and not nursery.has_ended():
            return True
        first, nursery.blamed = not nursery.blamed, True
        return first

    def _told(self, host: _Host, line: bytes) -> bool:
        """Take an answer. Returns False for a line that is none."""
        if not host.asked:
            return False
        try:
            answer, wrong = json.loads(line)
            found = _answer_of(answer)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return False
        if wrong:
            raise UserError(str(wrong))
        host.asked, host.deadline = False, math.inf
        if host.episode is None:
            self._be_free(host)
            return True
        self._answers[host.episode] = found
        if found.failed:  # who knows what is left in it
            del self._of[host.episode]
            self._lose(host)
        elif found.judgement is not None:
            del self._of[host.episode]
            self._be_free(host)
        return True

    def _be_free(self, host: _Host) -> None:
        host.episode, host.asked, host.deadline = None, False, math.inf
        self._free.append(host)
        if len(self._hosts) > self.limits.processes and not self._waiting:
            self._lose(host)

    def _end_late(self) -> None:
        now = time.monotonic()
        for host in [host for host in self._hosts.values() if host.deadline < now]:
            self._lose(host, f"took more than {self.limits.seconds:g} s" if host.ready else "was not ready in time")

    def _lose(self, host: _Host, why: str = "") -> None:
        """End a process. `why`: its episode, if it has one, has failed."""
        self._selector.unregister(host.channel)
        host.channel.close()
        del self._hosts[host.number]
        self._started_by.pop(host.number, None)
        if host in self._free:
            self._free.remove(host)
        self._nurseries[-1].kill(host.number)
        if host.episode is not None and why:
            self.lost[why] += 1
            del self._of[host.episode]
            if host.asked:  # else its next question finds that out
                self._answers[host.episode] = Answer(failed=f"its process {why}")


def _end_all(nurseries: list[_Nursery], hosts: dict[int, _Host], selector: selectors.BaseSelector) -> None:
    for nursery in nurseries:
        nursery.close()
    for host in hosts.values():
        host.channel.close()
    selector.close()


def _json_of(answer: Answer) -> Json:
    said, judgement = answer.said, answer.judgement
    return [
        None if said is None else [said.text, said.results, said.calls],
        None if judgement is None else [judgement.reward, dict(judgement.parts)],
        answer.failed,
    ]


def _answer_of(value: Json) -> Answer:
    """Returns an answer that came as JSON. Raises `ValueError`, `TypeError` or `LookupError` for anything else."""
    said, judgement, failed = value
    return Answer(
        None
        if said is None
        else Observation(str(said[0]), tuple((str(a), str(b)) for a, b in said[1]), tuple(map(str, said[2]))),
        None if judgement is None else Judgement(float(judgement[0]), {k: float(v) for k, v in judgement[1].items()}),
        str(failed),
    )


class _Nursery:
    """The searcher's side of the process that forks the others."""

    def __init__(self, task: Acted, limits: EpisodeLimits) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()  # otherwise buffered text would be written twice
        sys.stderr.flush()
        gc.collect()  # here: a destructor that waits for one of our threads would wait for ever in the copy
        with warnings.catch_warnings():
            # about threads: they are a matrix library's or write a journal, and nothing of them is used after the fork
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = os.fork()
        if self.process == 0:
            _be_a_nursery(theirs, task, limits)
        theirs.close()
        self.channel, self.alive, self._parent = ours, True, os.getpid()
        self.blamed = False  # whether its death has been counted as a failed start

    def start(self, number: int) -> socket.socket:
        """Start a process; returns what it is talked to by."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._send({"start": number}, [theirs.fileno()])
        return ours

    def kill(self, number: int) -> None:
        self._send({"kill": number})

    def has_ended(self) -> bool:
        """Returns whether it is dead, which can be seen before the processes are that are killed with it."""
        if self.alive:
            try:
                ended = os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            except ChildProcessError:
                ended = True
            self.alive = not ended
        return not self.alive

    def close(self) -> None:
        """End it, and with it all processes that it has forked."""
        if os.getpid() != self._parent:  # a copy of the one that has it
            return
        self.channel.close()
        with suppress(ProcessLookupError, ChildProcessError):
            limit = time.monotonic() + _END_SECONDS
            while not os.waitpid(self.process, os.WNOHANG)[0]:
                if time.monotonic() > limit:
                    os.kill(self.process, signal.SIGKILL)
                time.sleep(_POLL)

    def _send(self, message: Json, descriptors: list[int] | None = None) -> None:
        try:
            socket.send_fds(self.channel, [json.dumps(message).encode()], descriptors or [])
        except OSError:
            self.alive = False


def _be_a_nursery(channel: socket.socket, task: Acted, limits: EpisodeLimits) -> NoReturn:
    """Serve, in a forked process. Does not return, and runs nothing of what its parent has still to do."""
    code = 1
    try:
        gc.freeze()  # pages that are shared stay shared
        _enter("tba-nursery", channel.fileno())
        _fork_hosts(channel, task, limits)
        code = 0
    except BaseException as error:  # noqa: BLE001 - the process ends here
        print_error(error)
    finally:
        os._exit(code)


def _enter(name: str, kept: int) -> None:
    """Become a process that holds nothing of its parent's: no file but the log, no signal handler."""
    os.setsid()
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(one, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != kept:
            with suppress(OSError):  # the one that lists them
                os.close(descriptor)
    Path("/proc/self/comm").write_text(name)


def _fork_hosts(channel: socket.socket, task: Acted, limits: EpisodeLimits) -> None:
    """Fork and kill what is asked for until the searcher is gone; then kill all of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the selector
    wake, wakes = os.pipe()
    for end in (wake, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    hosts: dict[int, int] = {}  # number -> process
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wake:
                    os.read(wake, 4096)
                    for number, process in list(hosts.items()):
                        if os.waitpid(process, os.WNOHANG)[0]:
                            del hosts[number]
                    continue
                block, descriptors, _, _ = socket.recv_fds(channel, _BLOCK, 1)
                if not block:
                    for process in hosts.values():
                        _kill(process)
                    return
                order = json.loads(block)
                if (number := order.get("kill")) in hosts:
                    _kill(hosts[number])
                elif "start" in order:
                    if (process := os.fork()) == 0:
                        _be_a_host(order["start"], descriptors[0], task, limits)
                    hosts[order["start"]] = process
                    os.close(descriptors[0])


def _kill(process: int) -> None:
    """Kill a process and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _be_a_host(number: int, descriptor: int, task: Acted, limits: EpisodeLimits) -> NoReturn:
    """Play episodes until nobody asks any more. Does not return."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        _enter(f"tba-world-{number}"[:15], descriptor)
        _limit_memory(int(limits.memory_gb * 1e9))
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # being asked does not interrupt who asks
        channel = socket.socket(fileno=descriptor)  # open to the end: once it is closed, this process is killed
        with suppress(ConnectionError):  # nobody may be there any more
            _play(task, channel.makefile("rwb"))
        code = 0
    except BaseException as error:  # noqa: BLE001 - the process ends here
        print_error(error)
    finally:
        os._exit(code)


def _limit_memory(more: int) -> None:
    """Limit this process's address space to what it has and so many bytes more; no dump of it is written."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + more
    bounds = [wanted, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), min(bounds)))


def _play(task: Acted, lines: Any) -> None:
    stage = Stage(task)
    lines.write(b"ready\n")
    lines.flush()
    for line in lines:
        asked, wrong, answer = json.loads(line), "", Answer()
        if asked is not None:
            begin = None if asked["begin"] is None else Beginning(**asked["begin"])
            try:
                answer = stage.answer(Question(begin, asked["turn"], asked["cut"]))
            except UserError as error:
                wrong = str(error)
        if answer.said is None:
            stage.leave()
        lines.write(json.dumps([_json_of(answer), wrong]).encode() + b"\n")
        lines.flush()
