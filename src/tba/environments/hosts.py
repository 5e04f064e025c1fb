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

from tba.environments.episode import Episode, EpisodeFailed, Observation, begin
from tba.errors import PartFailed, UserError
from tba.fields import as_declared
from tba.protocols import Acted
from tba.types import Json, Judgement
from tba.user_code import print_error

CAN_FORK = platform.system() == "Linux"
_START_SECONDS = 60.0  # that a process may take until it is ready
_BLOCK_BYTES = 1 << 16
_LONGEST_LINE = 1 << 20  # bytes of an answer
_WAIT_SECONDS = 0.5  # seconds that waiting for an answer takes at most
_END_SECONDS = 10.0  # that the nursery has to end by itself
_POLL_SECONDS = 0.01  # seconds between two looks whether it has
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
    """What an episode needs to begin."""

    fields: Mapping[str, Json]  # the problem's
    seed: int
    prompt: str  # what the policy was told first
    earlier_turns: Sequence[str] = ()  # turns that were played before and are replayed


@dataclass(frozen=True)
class Question:
    """A message to an episode: the policy's next turn, or the end of a completion that was cut off."""

    beginning: Beginning | None  # the episode begins with it
    turn: str | None  # what the policy has said; None: it says nothing more, and is judged as it stands
    cut_turn: str | None = None  # a last turn that had no room left to end


@dataclass(frozen=True)
class EpisodeReply:
    """An environment's reply to a turn."""

    observation: Observation | None = None  # None: it is over
    judgement: Judgement | None = None  # given when it is over
    failure: str = ""  # why there is no answer


class EpisodePlayer:
    """Plays one episode after another, in the process that calls it."""

    def __init__(self, task: Acted) -> None:
        self._task = task
        self._episode: Episode | None = None

    def answer(self, question: Question) -> EpisodeReply:
        """Returns the environment's reply to a question. Raises `UserError` for an object that is no environment."""
        try:
            if (start := question.beginning) is not None:
                self.release()
                self._episode = begin(self._task.environment, start.fields, start.seed, self._task.turns, start.prompt)
                self._episode.replay(start.earlier_turns)
            assert self._episode is not None
            if question.cut_turn is not None:
                self._episode.cut(question.cut_turn)
            observation = None if question.turn is None else self._episode.say(question.turn)
            return EpisodeReply(observation, self._episode.judgement() if observation is None else None)
        except EpisodeFailed as error:
            return EpisodeReply(failure=str(error))

    def release(self) -> None:
        """End the episode, if there is one."""
        if self._episode is not None:
            self._episode.close()
        self._episode = None


@dataclass
class InProcessHost:
    """Plays all episodes in this process: each question is answered at once, for as long as that takes."""

    task: Acted
    _players: dict[int, EpisodePlayer] = field(default_factory=dict)
    _replies: dict[int, EpisodeReply] = field(default_factory=dict)

    def ask(self, episode: int, question: Question) -> None:
        """Puts a question to an episode and keeps the reply."""
        if question.beginning is not None:
            self._players[episode] = EpisodePlayer(self.task)
        self._replies[episode] = self._players[episode].answer(question)

    def replies(self, wait: bool) -> Mapping[int, EpisodeReply]:
        """Returns the replies since the last call, by episode."""
        replies, self._replies = self._replies, {}
        return replies

    def release(self, episode: int) -> None:
        """Ends an episode, whatever it is doing."""
        self._replies.pop(episode, None)
        if (player := self._players.pop(episode, None)) is not None:
            player.release()

    def close(self) -> None:
        """Ends all episodes."""
        for episode in list(self._players):
            self.release(episode)


class _Host:
    """The searcher's side of one process, which is starting, free, or has an episode."""

    def __init__(self, number: int, channel: socket.socket) -> None:
        self.number, self.channel = number, channel
        channel.settimeout(_START_SECONDS)  # of a question that a process does not read
        self.episode: int | None = None
        self.is_busy = False
        self.is_ready = False
        self.deadline = time.monotonic() + _START_SECONDS
        self._buffer = b""

    def send(self, message: Json) -> None:
        with suppress(OSError):  # it has died, which its output's end tells
            self.channel.sendall(json.dumps(message).encode() + b"\n")

    def lines(self) -> list[bytes] | None:
        """Returns the complete lines that have arrived; None at the end of its output, or when a line is too long."""
        try:
            data = self.channel.recv(_BLOCK_BYTES)
        except OSError:
            return None
        if not data or len(self._buffer) > _LONGEST_LINE:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return lines


class Hosts:
    """Plays each episode in a process of its own; beyond `limits.processes` they wait until one is free."""

    def __init__(self, task: Acted, limits: EpisodeLimits) -> None:
        self.task, self.limits = task, limits
        self.losses: Counter[str] = Counter()  # processes that had to be replaced, by why
        self._selector = selectors.DefaultSelector()
        self._hosts: dict[int, _Host] = {}  # by number
        self._host_of: dict[int, _Host] = {}  # by episode, of those that have begun
        self._free_hosts: list[_Host] = []
        self._queue: deque[tuple[int, Question]] = deque()  # episodes that have not begun
        self._replies: dict[int, EpisodeReply] = {}
        self._host_count = self._failed_starts = 0
        self._nursery_by_host: dict[int, _HostNursery] = {}  # of the processes that are not ready yet
        self._nurseries = [_HostNursery(task, limits)]  # the last one is in use
        self._finalizer = weakref.finalize(self, _close_all, self._nurseries, self._hosts, self._selector)

    def ask(self, episode: int, question: Question) -> None:
        """Puts a question to an episode, which may have one question at a time."""
        if question.beginning is not None:
            self._queue.append((episode, question))
            self._assign_hosts()
        elif (host := self._host_of.get(episode)) is not None:
            self._send_question(host, question)
        else:  # its process has died between two turns
            self._replies[episode] = EpisodeReply(failure="its process died")

    def replies(self, wait: bool) -> Mapping[int, EpisodeReply]:
        """Returns the replies since the last call, by episode. With `wait` it waits for one, but only for a moment.

        Raises `UserError` for an object that is no environment, and `PartFailed` when no process can be started.
        """
        if wait and self._queue and all(host.is_ready and not host.is_busy for host in self._hosts.values()):
            for _ in self._queue:  # beyond the limit: those that have a process wait for those that have none
                self._start_host()
        now = time.monotonic()
        deadline = min((host.deadline for host in self._hosts.values()), default=now + _WAIT_SECONDS) if wait else now
        for key, _ in self._selector.select(0.0 if self._replies else max(0.0, min(_WAIT_SECONDS, deadline - now))):
            self._read_from(key.data)
        self._end_overdue()
        self._assign_hosts()
        replies, self._replies = self._replies, {}
        return replies

    def release(self, episode: int) -> None:
        """Ends an episode, whatever it is doing."""
        self._replies.pop(episode, None)
        if (host := self._host_of.pop(episode, None)) is None:
            self._queue = deque(entry for entry in self._queue if entry[0] != episode)
        elif host.is_busy:
            self._end_host(host)
        else:
            host.episode = None
            self._send_question(host, None)

    def close(self) -> None:
        """Ends all episodes; the processes stay for later ones."""
        for episode in [*self._host_of, *(episode for episode, _ in self._queue)]:
            self.release(episode)
        self._replies.clear()

    def end(self) -> None:
        """Ends all processes."""
        self._finalizer()

    def __len__(self) -> int:
        return len(self._hosts)

    def _assign_hosts(self) -> None:
        """Give processes to the episodes that wait for one; start as many as may be."""
        while self._queue and self._free_hosts:
            episode, question = self._queue.popleft()
            host = self._free_hosts.pop()
            host.episode, self._host_of[episode] = episode, host
            self._send_question(host, question)
        starting_count = sum(not host.is_ready for host in self._hosts.values()) if self._queue else 0
        while starting_count < len(self._queue) and len(self._hosts) < self.limits.processes:
            self._start_host()
            starting_count += 1

    def _start_host(self) -> None:
        if not self._nurseries[-1].is_alive:
            self._nurseries.pop().close()
            self._nurseries.append(_HostNursery(self.task, self.limits))
        self._host_count = number = self._host_count + 1
        host = self._hosts[number] = _Host(number, self._nurseries[-1].start(number))
        self._nursery_by_host[number] = self._nurseries[-1]
        self._selector.register(host.channel, selectors.EVENT_READ, host)

    def _send_question(self, host: _Host, question: Question | None) -> None:
        """Send a process a question, or None to end its episode; its time limit begins now."""
        host.is_busy, host.deadline = True, time.monotonic() + self.limits.seconds
        host.send(None if question is None else asdict(question))

    def _read_from(self, host: _Host) -> None:
        if (lines := host.lines()) is None:
            if not host.is_ready and self._counts_as_failed_start(host):
                self._failed_starts += 1
            self._end_host(host, "died")
            if self._failed_starts >= _FAILED_STARTS:
                raise PartFailed(f"{_FAILED_STARTS} processes for environments ended before they were ready")
            return
        for line in lines:
            if not host.is_ready:
                host.is_ready, self._failed_starts = True, 0
                del self._nursery_by_host[host.number]
                self._free_host(host)
            elif not self._accept_reply(host, line):
                self._end_host(host, "said something else than an answer")
            if host.number not in self._hosts:
                return

    def _counts_as_failed_start(self, host: _Host) -> bool:
        """Returns whether a process that ended before it was ready counts as a failed start. All that are starting die
        with their nursery: only the first of them counts.
        """
        nursery = self._nursery_by_host.pop(host.number)
        if nursery is self._nurseries[-1] and not nursery.has_ended():
            return True
        is_first, nursery.has_counted_failure = not nursery.has_counted_failure, True
        return is_first

    def _accept_reply(self, host: _Host, line: bytes) -> bool:
        """Record the reply on a line. Returns False for a line that is no reply."""
        if not host.is_busy:
            return False
        try:
            reply_json, error_message = json.loads(line)
            reply = _reply_from_json(reply_json)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return False
        if error_message:
            raise UserError(str(error_message))
        host.is_busy, host.deadline = False, math.inf
        if host.episode is None:
            self._free_host(host)
            return True
        self._replies[host.episode] = reply
        if reply.failure:  # who knows what is left in it
            del self._host_of[host.episode]
            self._end_host(host)
        elif reply.judgement is not None:
            del self._host_of[host.episode]
            self._free_host(host)
        return True

    def _free_host(self, host: _Host) -> None:
        host.episode, host.is_busy, host.deadline = None, False, math.inf
        self._free_hosts.append(host)
        if len(self._hosts) > self.limits.processes and not self._queue:
            self._end_host(host)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for host in [host for host in self._hosts.values() if host.deadline < now]:
            reason = f"took more than {self.limits.seconds:g} s" if host.is_ready else "was not ready in time"
            self._end_host(host, reason)

    def _end_host(self, host: _Host, reason: str = "") -> None:
        """End a process. With a `reason` its episode, if it has one, has failed."""
        self._selector.unregister(host.channel)
        host.channel.close()
        del self._hosts[host.number]
        self._nursery_by_host.pop(host.number, None)
        if host in self._free_hosts:
            self._free_hosts.remove(host)
        self._nurseries[-1].kill(host.number)
        if host.episode is not None and reason:
            self.losses[reason] += 1
            del self._host_of[host.episode]
            if host.is_busy:  # else its next question finds that out
                self._replies[host.episode] = EpisodeReply(failure=f"its process {reason}")


def _close_all(nurseries: list[_HostNursery], hosts: dict[int, _Host], selector: selectors.BaseSelector) -> None:
    for nursery in nurseries:
        nursery.close()
    for host in hosts.values():
        host.channel.close()
    selector.close()


def _reply_to_json(reply: EpisodeReply) -> Json:
    observation, judgement = reply.observation, reply.judgement
    return [
        None if observation is None else [observation.text, observation.results, observation.call_ids],
        None if judgement is None else [judgement.reward, dict(judgement.parts)],
        reply.failure,
    ]


def _reply_from_json(fields: Json) -> EpisodeReply:
    """Returns a reply from its JSON. Raises `ValueError`, `TypeError` or `LookupError` for anything else."""
    parts, judgement, failure = fields
    return EpisodeReply(
        None
        if parts is None
        else Observation(str(parts[0]), tuple((str(a), str(b)) for a, b in parts[1]), tuple(map(str, parts[2]))),
        None if judgement is None else Judgement(float(judgement[0]), {k: float(v) for k, v in judgement[1].items()}),
        str(failure),
    )


class _HostNursery:
    """The searcher's side of the process that forks the others."""

    def __init__(self, task: Acted, limits: EpisodeLimits) -> None:
        parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()  # otherwise buffered text would be written twice
        sys.stderr.flush()
        gc.collect()  # here: a destructor that waits for one of our threads would wait for ever in the copy
        with warnings.catch_warnings():
            # about threads: they are a matrix library's or write a journal, and nothing of them is used after the fork
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = os.fork()
        if self.process == 0:
            _run_nursery(child_socket, task, limits)
        child_socket.close()
        self.channel, self.is_alive, self._parent = parent_socket, True, os.getpid()
        self.has_counted_failure = False  # whether its death has been counted as a failed start

    def start(self, number: int) -> socket.socket:
        """Start a process; returns the socket that is connected to it."""
        parent_socket, child_socket = socket.socketpair()
        with child_socket:
            self._send({"start": number}, [child_socket.fileno()])
        return parent_socket

    def kill(self, number: int) -> None:
        self._send({"kill": number})

    def has_ended(self) -> bool:
        """Returns whether the nursery is dead, which may show before the death of the processes killed with it."""
        if self.is_alive:
            try:
                has_ended = os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            except ChildProcessError:
                has_ended = True
            self.is_alive = not has_ended
        return not self.is_alive

    def close(self) -> None:
        """End the nursery, and with it all processes that it has forked."""
        if os.getpid() != self._parent:  # a copy of the one that has it
            return
        self.channel.close()
        with suppress(ProcessLookupError, ChildProcessError):
            limit = time.monotonic() + _END_SECONDS
            while not os.waitpid(self.process, os.WNOHANG)[0]:
                if time.monotonic() > limit:
                    os.kill(self.process, signal.SIGKILL)
                time.sleep(_POLL_SECONDS)

    def _send(self, message: Json, descriptors: list[int] | None = None) -> None:
        try:
            socket.send_fds(self.channel, [json.dumps(message).encode()], descriptors or [])
        except OSError:
            self.is_alive = False


def _run_nursery(channel: socket.socket, task: Acted, limits: EpisodeLimits) -> NoReturn:
    """Serve, in a forked process. Does not return, and runs nothing of what its parent has still to do."""
    exit_code = 1
    try:
        gc.freeze()  # pages that are shared stay shared
        _detach_process("tba-nursery", channel.fileno())
        _fork_hosts(channel, task, limits)
        exit_code = 0
    except BaseException as error:  # noqa: BLE001 - the process ends here
        print_error(error)
    finally:
        os._exit(exit_code)


def _detach_process(name: str, kept_descriptor: int) -> None:
    """Detach this process from its parent: close all files but the log and one descriptor, reset signal handlers."""
    os.setsid()
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signal_number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    with open(os.devnull, "rb") as null_device:
        os.dup2(null_device.fileno(), 0)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != kept_descriptor:
            with suppress(OSError):  # the one that lists them
                os.close(descriptor)
    Path("/proc/self/comm").write_text(name)


def _fork_hosts(channel: socket.socket, task: Acted, limits: EpisodeLimits) -> None:
    """Fork and kill hosts as the searcher orders until it is gone; then kill all of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the selector
    wake_reader, wake_writer = os.pipe()
    for pipe_end in (wake_reader, wake_writer):
        os.set_blocking(pipe_end, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    hosts: dict[int, int] = {}  # number -> process
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake_reader, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wake_reader:
                    os.read(wake_reader, 4096)
                    for number, process in list(hosts.items()):
                        if os.waitpid(process, os.WNOHANG)[0]:
                            del hosts[number]
                    continue
                data, descriptors, _, _ = socket.recv_fds(channel, _BLOCK_BYTES, 1)
                if not data:
                    for process in hosts.values():
                        _kill(process)
                    return
                order = json.loads(data)
                if (number := order.get("kill")) in hosts:
                    _kill(hosts[number])
                elif "start" in order:
                    if (process := os.fork()) == 0:
                        _run_host(order["start"], descriptors[0], task, limits)
                    hosts[order["start"]] = process
                    os.close(descriptors[0])


def _kill(process: int) -> None:
    """Kill a process and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _run_host(number: int, descriptor: int, task: Acted, limits: EpisodeLimits) -> NoReturn:
    """Play episodes until nobody asks any more. Does not return."""
    exit_code = 1
    try:
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        _detach_process(f"tba-world-{number}"[:15], descriptor)
        _limit_memory(int(limits.memory_gb * 1e9))
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # being asked does not interrupt who asks
        channel = socket.socket(fileno=descriptor)  # open to the end: once it is closed, this process is killed
        with suppress(ConnectionError):  # nobody may be there any more
            _play_episodes(task, channel.makefile("rwb"))
        exit_code = 0
    except BaseException as error:  # noqa: BLE001 - the process ends here
        print_error(error)
    finally:
        os._exit(exit_code)


def _limit_memory(extra_bytes: int) -> None:
    """Limit this process's address space to its present size and `extra_bytes`, and write no core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    total_bytes = pages * resource.getpagesize() + extra_bytes
    bounds = [total_bytes, *(limit for limit in (soft_limit, hard_limit) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), min(bounds)))


def _play_episodes(task: Acted, lines: Any) -> None:
    player = EpisodePlayer(task)
    lines.write(b"ready\n")
    lines.flush()
    for line in lines:
        question, error_message, reply = json.loads(line), "", EpisodeReply()
        if question is not None:
            beginning = None if question["beginning"] is None else Beginning(**question["beginning"])
            try:
                reply = player.answer(Question(beginning, question["turn"], question["cut_turn"]))
            except UserError as error:
                error_message = str(error)
        if reply.observation is None:
            player.release()
        lines.write(json.dumps([_reply_to_json(reply), error_message]).encode() + b"\n")
        lines.flush()
