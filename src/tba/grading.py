"""Grading: each answer is graded by its own call, in a window of calls that go on while answers are generated.

A reward has one or more parts (`GradingCalls`); one without `calls` is a single part that is called by `judge`, about
all answers that wait. Each part has a window: at most `concurrency` of its calls run at once, in threads, or in one
event loop if they are asynchronous. An answer is graded once every part has given it a value. A slow call holds up the
answers that it is about, and no others.

Invariant: each answer that is submitted comes back once: graded, or without a judgement because a call about it took
longer than the deadline. Such a call is not repeated, and its place in the window is free again; its thread is
abandoned, and is a daemon, so that it cannot keep the process alive. A call that raises is repeated, alone, a bounded
number of times; what it raises last is raised by `poll`, after all that is graded has come back. One thread submits and
polls; every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from tba.errors import DeadlineExceeded, PartFailed, UserError
from tba.protocols import GradingCalls, Reward, Separable
from tba.signals import watching_signals
from tba.types import Completion, FloatArray, Judgement, Prompt, handed_out

T = TypeVar("T")
log = logging.getLogger("tba.reward")
DEADLINE = 120.0  # seconds of one call
RETRIES = 2  # repetitions of a call that raised: what fails for longer is better mended than waited for
MOST_ABANDONED = 16  # threads of expired calls that may go on for ever; then calls run in processes of their own
MOST_PROCESSES = 32  # of such
MOST_ABSTENTIONS = 64  # first answers that may get no value from any part
_FIRST_PAUSE = 0.25  # seconds before a call is repeated; doubled each time
_MOST_IN_BATCH = 1024  # answers of a call about all that wait
_PER_DEADLINE = 64  # answers of such a call for which it has the deadline once
_LOOP_GRACE = 10.0  # seconds beyond the deadline after which the event loop itself must hang
_BEAT = 0.5  # seconds between two checks for expired calls while there is nothing else to do


@dataclass(eq=False, slots=True)
class Grade:
    """One answer on its way through the windows. `judgement` stays None for an answer whose call expired."""

    prompt: Prompt
    completion: Completion
    finished: list[Grade]  # where it is put when it comes back
    values: list[Any]  # of each part
    missing: int  # parts that have not given their value
    judgement: Judgement | None = None
    scores: tuple[FloatArray, ...] = ()  # log-probabilities [T] under each scorer
    expired: bool = False
    failed: bool = False  # a call about it raised, or is not made: it does not come back
    seconds: float = 0.0  # of the longest call about it

    @property
    def answer(self) -> tuple[Prompt, Completion]:
        return self.prompt, self.completion


@dataclass(eq=False, slots=True)
class _Call:
    """A call that is under way about some answers."""

    grades: Sequence[Grade]
    started: float
    attempt: int = 0
    values: Sequence[Any] | None = None
    error: BaseException | None = None
    paused: bool = False  # its deadline rests
    isolated: bool = False  # it runs in a process, which is killed in time
    expired: bool = False
    seconds: float = 0.0


class Grader:
    """Grades answers by a reward. Make one where answers are graded, and `close` it at the end.

    deadline: seconds of one call. share: (index, count) of this searcher among those that share the windows' limits.
    report: called with a sentence before a call is repeated. isolate: makes what grades in a process of its own, for a
    part that uses signals or does not end; None: that cannot be. now: by which a call's seconds are measured. scorers:
    further calls about each answer, whose values come back with its judgement (`Grade.scores`).
    """

    def __init__(
        self,
        reward: Reward | Separable,
        deadline: float = DEADLINE,
        retries: int = RETRIES,
        share: tuple[int, int] = (0, 1),
        report: Callable[[str], None] = lambda message: None,
        isolate: Callable[[], Isolated] | None = None,
        now: Callable[[], float] = time.monotonic,
        scorers: Sequence[GradingCalls] = (),
    ) -> None:
        self.reward = reward
        self.deadline = deadline
        separable = isinstance(reward, Separable)
        parts: Sequence[GradingCalls]
        if isinstance(reward, Separable):
            parts, self._judgement = reward.calls(), reward.judgement
        else:
            parts, self._judgement = [whole(reward)], _only
        self._returned: SimpleQueue[tuple[_Window, _Call]] = SimpleQueue()
        self._parts = len(parts)
        settings = _Settings(deadline, retries, report, isolate, now)
        alone = _Settings(deadline, retries, report, None, now)
        windows = [(part, settings, i if separable else None) for i, part in enumerate(parts)]
        windows += [(part, alone, None) for part in scorers]
        self._windows = [
            _Window(
                part, place, index, share_of(part.concurrency, *share), of_part, place >= len(parts), self._returned
            )
            for place, (part, of_part, index) in enumerate(windows)
        ]
        self.close = weakref.finalize(self, _close, self._windows)  # ends the threads, at the latest with this object
        self._error: BaseException | None = None
        self.alive: Callable[[], object] = lambda: None  # called now and then by `grade` while it waits
        self.unfinished = 0  # answers that have not come back
        self._abstained: int | None = 0  # of the first answers; None: one has a value
        self.call_seconds = 0.0  # of all calls, each by itself

    def busy(self, samples: int) -> int:
        """Returns how many answers the calls are about that are under way at once, at most, with so many answers to a
        prompt; a call about all that wait counts as one.
        """
        return max(w.limit * (samples if w.part.unit == "group" else 1) for w in self._windows)

    @property
    def batched(self) -> bool:
        """Returns whether some part is called about all answers that wait."""
        return any(window.part.unit == "waiting" for window in self._windows)

    def submit(
        self,
        answers: Sequence[tuple[Prompt, Sequence[Completion]]],
        finished: list[Grade],
        urgent: bool = False,
        scored: bool = True,
    ) -> list[list[Grade]]:
        """Hand in prompts, each with answers to it; each answer is added to `finished` by the `poll` after it has been
        graded. Returns [i][j], of the j-th answer to the i-th prompt.

        urgent: before all others that wait. scored: by the scorers too.
        """
        windows = self._windows if scored else self._windows[: self._parts]
        parts = len(windows)
        grades = [
            [Grade(prompt, c, finished, [None] * parts, parts) for c in completions] for prompt, completions in answers
        ]
        self.unfinished += sum(map(len, grades))
        for window in windows:
            window.submit([group for group in grades if group], urgent)
        return grades

    def poll(self) -> None:
        """Take in what has been graded, and give up calls that have expired. Raises what a call raised, once nothing
        else comes back.
        """
        graded = self._take_in()
        for window in self._windows:
            window.expire()
        came = self._take_in() + graded
        if self._error is not None and (not came or not self.unfinished):
            error, self._error = self._error, None
            raise error

    def wait(self, seconds: float) -> None:
        """Wait until an answer comes back, at most so long; then `poll`."""
        if self.unfinished and self._error is None:
            with suppress(Empty):
                self._receive(*self._returned.get(timeout=min(seconds, _BEAT)))
        self.poll()

    def cancel(self) -> None:
        """Begin no further call: answers that wait for one do not come back."""
        for window in self._windows:
            self._fail(window.cancel())

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Returns the judgement of every answer, in order, before any other that waits; its reward is NaN where a call
        about it expired.
        """
        places: dict[str, list[int]] = {}  # of the answers to each prompt
        for i, (prompt, _) in enumerate(answered):
            places.setdefault(prompt.key, []).append(i)
        grades = self.grade([(answered[row[0]][0], [answered[i][1] for i in row]) for row in places.values()])
        if len(answered) > 1 and len(answered) == self._abstained:
            raise UserError(_abstains(self._windows[: self._parts], len(answered)))
        judgements = [Judgement(math.nan)] * len(answered)
        for row, group in zip(places.values(), grades, strict=True):
            for i, grade in zip(row, group, strict=True):
                judgements[i] = grade.judgement or judgements[i]
        return judgements

    def grade(self, answers: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[Grade]]:
        """Returns what `submit` does, once all are graded by the reward alone, before any other that waits."""
        finished: list[Grade] = []
        grades = self.submit(answers, finished, urgent=True, scored=False)
        try:
            while len(finished) < sum(map(len, grades)):
                self.wait(_BEAT)
                self.alive()
        except BaseException:
            returned = set(map(id, finished))
            self._fail([grade for row in grades for grade in row if id(grade) not in returned])
            raise
        return grades

    def _fail(self, grades: Sequence[Grade]) -> None:
        """Give up answers: they do not come back."""
        for grade in grades:
            self.unfinished -= not grade.failed
            grade.failed = True

    def _see_abstention(self, values: Sequence[Any]) -> None:
        """Raises `UserError` where the first answers get no value from any part: there would be nothing to learn."""
        if self._abstained is None:
            return
        self._abstained += 1
        if any(value is not None for value in values):
            self._abstained = None
        elif self._abstained == MOST_ABSTENTIONS:
            raise UserError(_abstains(self._windows[: self._parts], self._abstained))

    def _take_in(self) -> int:
        count = 0
        while True:
            try:
                window, call = self._returned.get_nowait()
            except Empty:
                return count
            count += self._receive(window, call)

    def _receive(self, window: _Window, call: _Call) -> int:
        """Take in one call; returns how many answers came back by it."""
        if call.error is not None:
            if not all(grade.failed for grade in call.grades):  # else nobody waits for it any more
                self._error = self._error or call.error
            self._fail(call.grades)
            return 0
        count = 0
        self.call_seconds += call.seconds
        for i, grade in enumerate(call.grades):
            grade.seconds = max(grade.seconds, call.seconds)
            if grade.failed:
                continue
            grade.missing -= 1
            grade.expired |= call.expired
            if call.values is not None:
                grade.values[window.place] = call.values[i]
            if grade.missing:
                continue
            if not grade.expired:
                try:
                    self._see_abstention(grade.values[: self._parts])
                    grade.judgement = self._judgement(grade.values[: self._parts])
                except Exception as error:  # noqa: BLE001 - of the user's reward; raised by `poll`
                    self._error = self._error or error
                    self._fail([grade])
                    continue
                grade.scores = tuple(grade.values[self._parts :])
            grade.finished.append(grade)
            self.unfinished -= 1
            count += 1
        return count


class Isolated(Protocol):
    """Grades answers in a process of its own, whose main thread calls the reward."""

    seconds: float  # that a call may take

    def grade(self, answered: Sequence[tuple[Prompt, Completion]], part: int | None = None) -> Sequence[Any]:
        """Returns the values of a part (`calls`), or the judgements. Raises `DeadlineExceeded` when the call took too
        long and was killed.
        """
        ...

    def close(self) -> None:
        """End the process."""
        ...


@dataclass(frozen=True)
class _Settings:
    """What all windows of a grader have in common."""

    deadline: float
    retries: int
    report: Callable[[str], None]
    isolate: Callable[[], Isolated] | None
    now: Callable[[], float]  # by which a call's seconds are measured


class _Window:
    """The calls of one part of a reward: those that wait, and at most `limit` that run."""

    def __init__(
        self,
        part: GradingCalls,
        place: int,
        index: int | None,
        limit: int,
        settings: _Settings,
        scores: bool,
        returned: SimpleQueue[tuple[_Window, _Call]],
    ) -> None:
        self.part, self.place, self.index, self.limit = part, place, index, limit
        self._settings, self._deadline = settings, settings.deadline
        self._scores = scores  # values depend on the tokens alone
        self._isolated = False  # calls run in processes of their own
        self._own = threading.local()  # the process of each thread
        self._returned = returned
        self._changed = threading.Condition()
        self._waiting: deque[Sequence[Grade]] = deque()
        self._running: dict[_Call, None] = {}  # the oldest first
        self._idle = self._workers = 0  # threads
        self._abandoned: dict[_Call, float] = {}  # expired calls whose threads go on, and since when
        self._closed = False

    def submit(self, groups: Sequence[Sequence[Grade]], urgent: bool) -> None:
        """Let the answers of these prompts wait for a call; calls begin as far as the limit allows."""
        entries: list[Sequence[Grade]] = list(groups)
        if self.part.unit == "answer":
            entries = [entry for group in groups for entry in self._entries(group)]
        with self._changed:
            if urgent:
                self._waiting.extendleft(reversed(entries))
            else:
                self._waiting.extend(entries)
            if self.part.asynchronous:
                self._begin_tasks()
                return
            while self._workers < self.limit and self._idle < len(self._waiting):
                self._begin_thread()
            self._changed.notify(len(entries))

    def _entries(self, group: Sequence[Grade]) -> list[list[Grade]]:
        """Returns what a call each is about; equal answers to a prompt are scored once."""
        if not self._scores:
            return [[grade] for grade in group]
        by_digest: dict[str, list[Grade]] = {}
        for grade in group:
            by_digest.setdefault(grade.completion.digest, []).append(grade)
        return list(by_digest.values())

    def _begin_thread(self) -> None:
        self._workers, self._idle = self._workers + 1, self._idle + 1
        threading.Thread(target=self._work, name="reward", daemon=True).start()

    def expire(self) -> None:
        """Give up the calls that run for longer than the deadline."""
        now = time.monotonic() - (_LOOP_GRACE if self.part.asynchronous else 0.0)
        with self._changed:
            late = [call for call in self._oldest() if now - call.started > self._allowed(call)]
            for call in late:
                if self.part.asynchronous:
                    raise DeadlineExceeded(
                        f"the event loop has not come back from {self.part.name} for {self._deadline + _LOOP_GRACE:g} "
                        "s: an async function must not block; await what waits, or make it a plain function"
                    )
                del self._running[call]
                self._abandoned[call] = time.monotonic()
                self._workers -= 1
                self._mark_expired(call)
                self._returned.put((self, call))
            if self.part.asynchronous:
                return
            while self._workers < self.limit and self._idle < len(self._waiting):
                self._begin_thread()
            # a server that stalls lets its calls end in time; what hangs twice as long is taken to hang for ever
            hanging = sum(time.monotonic() - since > self._deadline for since in self._abandoned.values())
            if hanging > MOST_ABANDONED and not self._isolated:
                self._isolate(f"{hanging} of its calls hang for more than {2 * self._deadline:g} s each")

    def _oldest(self) -> Sequence[_Call]:
        """Returns the calls that may be late: none of 500 that were begun just now is looked at."""
        calls = self._running
        if not calls or time.monotonic() - next(iter(calls)).started <= self._deadline:
            return ()
        return [call for call in calls if not call.isolated]

    def _allowed(self, call: _Call) -> float:
        """Returns the seconds that a call may take: the deadline, of a large batch a multiple of it."""
        if self.part.unit != "waiting":
            return self._deadline
        return self._deadline * math.ceil(len(call.grades) / _PER_DEADLINE)

    def cancel(self) -> list[Grade]:
        """Returns the answers that wait, which wait no longer."""
        with self._changed:
            grades = [grade for entry in self._waiting for grade in entry]
            self._waiting.clear()
        return grades

    def close(self) -> None:
        """End idle threads; nothing more is called."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _mark_expired(self, call: _Call) -> None:
        call.expired, call.seconds = True, self._deadline
        log.warning("%s did not grade %d answers within %g s", self.part.name, len(call.grades), self._deadline)

    def pause(self, call: _Call) -> None:
        """Let a call's deadline rest."""
        with self._changed:
            if call in self._running:
                del self._running[call]
                call.paused = True

    def proceed(self, call: _Call) -> None:
        """Let a call's deadline begin."""
        with self._changed:
            if call.paused:
                call.paused, call.started = False, time.monotonic()
                self._running[call] = None

    def _isolate(self, why: str) -> None:
        """From here on make all calls in processes of their own. Raises `PartFailed` where there can be none."""
        if self._settings.isolate is None:
            raise PartFailed(
                f"{self.part.name} has to run in processes of its own, but cannot here ({why}): give what it waits for "
                "a timeout of its own, and use no signals"
            )
        if not self._isolated:
            log.warning("%s runs in processes of its own from here on: %s", self.part.name, why)
            self._report(f"{self.part.name} runs in processes of its own: {why}")
            self._isolated, self.limit = True, min(self.limit, MOST_PROCESSES)

    def _work(self) -> None:
        """Make calls, one after another, until the window is closed or a call has expired."""
        try:
            self._calls()
        finally:
            if (process := getattr(self._own, "process", None)) is not None:
                process.close()

    def _calls(self) -> None:
        while (call := self._next()) is not None:
            while not self._attempt(call):
                pass
            with self._changed:
                if call not in self._running:  # expired: another thread has taken this one's place
                    self._abandoned.pop(call, None)
                    return
                del self._running[call]
                self._idle += 1
            self._returned.put((self, call))

    def _next(self) -> _Call | None:
        """Returns the next call, which counts as running; waits for one. None: the window is closed."""
        with self._changed:
            while not self._waiting and not self._closed and self._workers <= self.limit:
                self._changed.wait()
            self._idle -= 1
            if self._closed or self._workers > self.limit:
                self._workers -= 1
                return None
            return self._started()

    def _started(self) -> _Call:
        """Take what waits longest; for a part that takes all that waits, up to a batch."""
        grades = self._waiting.popleft()
        if self.part.unit == "waiting":
            grades = list(grades)
            while self._waiting and len(grades) + len(self._waiting[0]) <= _MOST_IN_BATCH:
                grades += self._waiting.popleft()
        call = _Call(grades, time.monotonic())
        self._running[call] = None
        return call

    def _attempt(self, call: _Call) -> bool:
        """Make a call once; returns whether that was its last attempt."""
        began, _present.call = self._settings.now(), (self, call)
        try:
            answers = [grade.answer for grade in call.grades]
            values = self._values(call, answers[:1] if self._scores else answers)
            self._accept(call, [*values] * len(answers) if self._scores else values)
        except BaseException as error:  # noqa: BLE001 - raised again by `poll`
            if self._isolated and isinstance(error, DeadlineExceeded):
                self._mark_expired(call)
                return True
            pause = None if call not in self._running else self._pause(call, error)
            if pause is None:
                return True
            threading.Event().wait(pause)
            with self._changed:
                if call not in self._running:
                    return True
                del self._running[call]
                call.started = time.monotonic()
                self._running[call] = None
            return False
        call.seconds = self._settings.now() - began
        return True

    def _values(self, call: _Call, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[Any]:
        """Make a call, here or in this thread's process: there if it tries to use signals here, since the error that it
        gets may become its value.
        """
        if not self._isolated:
            values: Sequence[Any] = ()
            with watching_signals() as watch:
                try:
                    values = self.part.grade(self._handed_out(answered))
                except Exception:  # of a call that tried to use signals none counts: it is made again, in a process
                    if not watch.tried:
                        raise
            if not watch.tried:
                return values
            self._isolate("it uses signals, which work in the main thread of a process only")
        with self._changed:
            if call not in self._running:
                return ()
            call.isolated = True
        return self._in_process(call, answered)

    def _handed_out(self, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[tuple[Prompt, Completion]]:
        """Returns what a call gets."""
        return handed_out(answered) if self.part.copies else answered

    def _in_process(self, call: _Call, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[Any]:
        """Make a call in this thread's process."""
        assert self._settings.isolate is not None
        if not hasattr(self._own, "process"):
            self._own.process = self._settings.isolate()
        process: Isolated = self._own.process
        process.seconds = self._allowed(call)
        return process.grade(answered, self.index)

    def _accept(self, call: _Call, values: Sequence[Any]) -> None:
        if len(values) != len(call.grades):
            raise UserError(f"{self.part.name} gave {len(values)} values for {len(call.grades)} answers")
        call.values = values

    def _pause(self, call: _Call, error: BaseException) -> float | None:
        """Returns the seconds until a call that raised is repeated; None: it is not, and its error stands."""
        bad_input = isinstance(error, UserError) and error.__cause__ is None
        if call.attempt >= self._settings.retries or bad_input or not isinstance(error, Exception):
            call.error = error
            return None
        message = f"{self.part.name}: {type(error).__name__}: {error}"
        log.warning("%s; retrying", message)
        self._report(message)
        call.attempt += 1
        return _FIRST_PAUSE * 2.0 ** (call.attempt - 1)

    def _report(self, message: str) -> None:
        """Record a fault; that it cannot be recorded is no fault of the call."""
        with suppress(Exception):
            self._settings.report(message)

    def _begin_tasks(self) -> None:
        """Begin asynchronous calls, as many as the limit allows."""
        while self._waiting and len(self._running) < self.limit and not self._closed:
            asyncio.run_coroutine_threadsafe(self._task(self._started()), event_loop())

    async def _task(self, call: _Call) -> None:
        while not await self._awaited(call):
            pass
        with self._changed:
            self._running.pop(call, None)
            self._begin_tasks()
        self._returned.put((self, call))

    async def _awaited(self, call: _Call) -> bool:
        """Make an asynchronous call once; returns whether that was its last attempt."""
        call.started, began = time.monotonic(), self._settings.now()
        try:
            async with asyncio.timeout(self._deadline) as limit:
                with watching_signals() as watch:
                    values = await self.part.grade(self._handed_out([grade.answer for grade in call.grades]))
                if watch.tried:
                    raise UserError(
                        f"{self.part.name} is async and uses signals, which work in the main thread of a process only: "
                        "make it a plain function"
                    )
                self._accept(call, values)
        except BaseException as error:  # noqa: BLE001 - raised again by `poll`
            if limit.expired():
                self._mark_expired(call)
                return True
            pause = self._pause(call, error)
            if pause is not None:
                await asyncio.sleep(pause)
            return pause is None
        call.seconds = self._settings.now() - began
        return True


def _abstains(windows: Sequence[_Window], count: int) -> str:
    names = ", ".join(window.part.name for window in windows)
    return f"{names} gave None for all of {count} answers: return a number for some"


def _close(windows: Sequence[_Window]) -> None:
    """End the threads that are idle; those of unfinished calls are abandoned."""
    for window in windows:
        window.close()


_present = threading.local()  # the call that a thread makes


@contextmanager
def queueing() -> Iterator[None]:
    """Inside, the deadline of the call that this thread makes does not run: it waits for its turn at a server that is
    shared with other calls, which has a deadline of its own.
    """
    present: tuple[_Window, _Call] | None = getattr(_present, "call", None)
    if present is None:
        yield
        return
    window, call = present
    window.pause(call)
    try:
        yield
    finally:
        window.proceed(call)


def share_of(limit: int, index: int, count: int) -> int:
    """Returns how many of `limit` calls the searcher of this index may have under way, of `count` that share them."""
    return max(1, limit // count + (index < limit % count))


def whole(reward: Reward) -> GradingCalls:
    """Returns a reward that is called by `judge` as its only part."""
    return GradingCalls(f"the reward {type(reward).__name__}", reward.judge)


def _only(values: Sequence[Any]) -> Judgement:
    judgement: Judgement = values[0]
    return judgement


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop in which all asynchronous user code of this process runs, in a daemon thread: clients that
    keep connections open, such as those of HTTP libraries, work in one loop only.
    """
    global _loop
    with _loop_lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="reward loop", daemon=True).start()
        return _loop


def in_thread(name: str, act: Callable[..., T], *arguments: Any) -> Future[T]:
    """Call in a thread of its own, which cannot keep the process alive."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(act(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asks
            future.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future
