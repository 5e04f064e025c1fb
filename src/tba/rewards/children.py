"""A pool of child processes that may hang or crash: questions are answered in order, each within a time limit.

Invariant: every question gets an answer or None, in the order asked. A child that takes too long, dies, or writes
something that is not JSON or was not asked for is replaced; its question gets None and is counted. A child ends when
its standard input closes, so that none outlives its parent, however the parent ended; a pool that is dropped or closed
ends its children.

A child (any command) first writes the line `ready`. Then it answers each JSON line `[number, question]` with a line
`[number, answer]`; an answer of null says that it gave up in time. A random number is drawn for each question, so that
nothing written earlier can pass for its answer.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from tba.errors import DeadlineExceeded, PartFailed
from tba.types import Json

_END_SECONDS = 2.0  # that a child has to end by itself
_FAILED_STARTS = 3  # children that end before they are ready, one after another: then it is not their questions
_BLOCK = 1 << 16
_LONGEST_LINE = 1 << 20  # bytes of an answer


class _ChildProcess:
    """One process: starting, idle, or busy with the question of an index until a deadline."""

    def __init__(self, command: Sequence[str], errors: IO[bytes] | int, start_seconds: float) -> None:
        self.process = subprocess.Popen(  # noqa: S603 - the pool's own command
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is the parent's business
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.index: int | None = None
        self.question_id = ""
        self.is_ready = False
        self.deadline = time.monotonic() + start_seconds
        self._buffer = b""

    def ask(self, index: int, question: Json, seconds: float) -> bool:
        """Send a question. Returns False for a child that has died."""
        self.index, self.deadline = index, time.monotonic() + seconds
        self.question_id = secrets.token_hex(8)
        with suppress(BrokenPipeError):
            self.stdin.write(json.dumps([self.question_id, question]).encode() + b"\n")
            self.stdin.flush()
            return True
        return False

    def lines(self) -> list[bytes] | None:
        """Returns the complete lines that have arrived; None at the end of its output, or when a line is too long."""
        data = os.read(self.stdout.fileno(), _BLOCK)
        if not data or len(self._buffer) > _LONGEST_LINE:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return lines

    def end(self) -> None:
        """Close the child's input, which makes it exit; kill it when it does not."""
        with suppress(BrokenPipeError):
            self.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS if self.index is None else 0.0)
        self.process.kill()
        self.process.wait()
        self.stdout.close()


@dataclass
class Children:
    """A pool of `processes` children of one command. `ask` may be called from any thread; one call at a time runs."""

    command: Sequence[str]
    processes: int
    seconds: float  # time limit for one question
    errors: IO[bytes] | int = subprocess.DEVNULL  # where their standard error goes
    start_seconds: float = 120.0  # that a child may take until it is ready: it imports what it needs
    counts: Counter[str] = field(default_factory=lambda: Counter(timed_out=0, crashed=0))
    _children: list[_ChildProcess] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._finalizer = weakref.finalize(self, _end_children, self._children)

    def ask(self, questions: Sequence[Json]) -> list[Json | None]:
        """Returns an answer to each, in order; None where the child took more than `seconds` or died.

        Raises `PartFailed` when children cannot be started, and `DeadlineExceeded` when one is not ready in time.
        """
        with self._lock:
            return _QuestionRound(self, questions).answers()

    def close(self) -> None:
        """End all children; asking again starts new ones."""
        with self._lock:
            _end_children(self._children)

    def __len__(self) -> int:
        return len(self._children)

    def start(self) -> _ChildProcess:
        """Start one more child process."""
        child = _ChildProcess(self.command, self.errors, self.start_seconds)
        self._children.append(child)
        return child

    def drop(self, child: _ChildProcess) -> None:
        """End one child, whatever it is doing."""
        self._children.remove(child)
        child.end()

    @property
    def members(self) -> list[_ChildProcess]:
        """Returns the children; between two calls none is busy."""
        return list(self._children)


class _QuestionRound:
    """One call of `Children.ask`: its questions, and the answers so far."""

    def __init__(self, pool: Children, questions: Sequence[Json]) -> None:
        self.pool, self.questions = pool, questions
        self.answers_by_index: dict[int, Json | None] = {}
        self.queue = deque(range(len(questions)))
        self.failed_starts = 0

    def answers(self) -> list[Json | None]:
        with selectors.DefaultSelector() as self.selector:
            for child in self.pool.members:
                self.selector.register(child.stdout, selectors.EVENT_READ, child)
            try:
                while len(self.answers_by_index) < len(self.questions):
                    self._hand_out()
                    self._wait()
                    self._end_overdue()
            except BaseException:
                for child in [c for c in self.pool.members if c.index is not None]:
                    self.pool.drop(child)  # its answer would be taken for one to a question of the next call
                raise
        return [self.answers_by_index[i] for i in range(len(self.questions))]

    def _hand_out(self) -> None:
        """Send questions to idle children, and start new children while there are too few for the questions left."""
        for child in [c for c in self.pool.members if c.is_ready and c.index is None]:
            if self.queue and not child.ask(self.queue[0], self.questions[self.queue[0]], self.pool.seconds):
                child.index = None  # it has died meanwhile, and not of this question
                self._drop(child)
            elif self.queue:
                self.queue.popleft()
        starting_count = sum(not c.is_ready for c in self.pool.members)
        while starting_count < len(self.queue) and len(self.pool) < self.pool.processes:
            child = self.pool.start()
            self.selector.register(child.stdout, selectors.EVENT_READ, child)
            starting_count += 1

    def _wait(self) -> None:
        """Wait until a child writes something or the first deadline expires."""
        deadlines = [c.deadline for c in self.pool.members if c.index is not None or not c.is_ready]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else 0.0
        for key, _ in self.selector.select(timeout):
            child: _ChildProcess = key.data
            lines = child.lines()
            if lines is None:
                self._handle_death(child)
                continue
            for line in lines:
                if not child.is_ready:
                    child.is_ready, self.failed_starts = True, 0
                elif not self._accept_answer(child, line):
                    self._handle_death(child)  # it is no longer what was started
                    break

    def _accept_answer(self, child: _ChildProcess, line: bytes) -> bool:
        """Record the answer on a line. Returns False when it does not answer the child's question."""
        if child.index is None:
            return False
        try:
            question_id, answer = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            return False
        if question_id != child.question_id:
            return False
        self.answers_by_index[child.index] = answer
        self.pool.counts["timed_out"] += answer is None
        child.index = None
        return True

    def _handle_death(self, child: _ChildProcess) -> None:
        if child.index is not None:
            self.answers_by_index[child.index] = None
            self.pool.counts["crashed"] += 1
        elif not child.is_ready:
            self.failed_starts += 1
        self._drop(child)
        if self.failed_starts >= _FAILED_STARTS:
            raise PartFailed(
                f"{self.failed_starts} processes of `{' '.join(self.pool.command)}` ended with exit code "
                f"{child.process.returncode} before they were ready: run that command by hand to see why"
            )

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for child in self.pool.members:
            if child.index is not None and now > child.deadline:
                self.answers_by_index[child.index] = None
                self.pool.counts["timed_out"] += 1
                self._drop(child)
            elif not child.is_ready and now > child.deadline:
                self._drop(child)
                raise DeadlineExceeded(
                    f"waited {self.pool.start_seconds:g} s for process {child.process.pid} of "
                    f"`{' '.join(self.pool.command)}` to be ready"
                )

    def _drop(self, child: _ChildProcess) -> None:
        self.selector.unregister(child.stdout)
        self.pool.drop(child)


def claim_stdout() -> IO[str]:
    """Returns a child's standard output, from here on its parent's alone: what a library prints goes to the errors."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _end_children(children: list[_ChildProcess]) -> None:
    """Ask all children to end, then wait for each."""
    for child in children:
        with suppress(BrokenPipeError):
            child.stdin.close()
    while children:
        children.pop().end()
