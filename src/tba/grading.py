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
from tba.types import Completion, Judgement, Prompt, TokenScores, copies_for_reward

T = TypeVar("T")
log = logging.getLogger("tba.reward")
DEADLINE = 120.0  # seconds of one call
RETRIES = 2  # repetitions of a call that raised: what fails for longer is better mended than waited for
MAX_ABANDONED = 16  # threads of expired calls that may go on for ever; then calls run in processes of their own
MAX_PROCESSES = 32  # of one part
MAX_ABSTENTIONS = 64  # first answers that may get no value from any part
_FIRST_PAUSE = 0.25  # seconds before a call is repeated; doubled each time
_MAX_BATCH = 1024  # answers of one call of a part whose unit is "waiting"
_ANSWERS_PER_DEADLINE = 64  # such a call has the deadline once for so many answers
_LOOP_GRACE = 10.0  # seconds beyond the deadline after which the event loop itself must hang
_CHECK_SECONDS = 0.5  # seconds between two checks for expired calls while there is nothing else to do


@dataclass(eq=False, slots=True)
class Grade:
    """Follows one answer through the windows. `judgement` stays None for an answer whose call expired."""

    prompt: Prompt
    completion: Completion
    destination: list[Grade]  # the list that the grade is added to when it comes back
    part_values: list[Any]  # one for each part
    missing_parts: int  # parts that have not given their value
    judgement: Judgement | None = None
    scores: tuple[TokenScores, ...] = ()  # under each scorer
    has_expired: bool = False
    has_failed: bool = False  # a call about it raised, or is not made: it does not come back
    seconds: float = 0.0  # of the longest call about it

    @property
    def answer(self) -> tuple[Prompt, Completion]:
        return self.prompt, self.completion


@dataclass(eq=False, slots=True)
class _RewardCall:
    """Describes a call about some answers that is in progress."""

    grades: Sequence[Grade]
    started_at: float
    attempt: int = 0
    values: Sequence[Any] | None = None
    error: BaseException | None = None
    is_paused: bool = False  # its deadline rests
    is_isolated: bool = False  # it runs in a process, which is killed in time
    has_expired: bool = False
    seconds: float = 0.0


class Grader:
    """Grades answers by a reward. Make one where answers are graded, and `close` it at the end.

    deadline: seconds of one call. share: (index, count) of this searcher among those that share the windows' limits.
    report: called with a sentence before a call is repeated. isolate: starts a process that grades, for a part that
    uses signals or does not end; None: no process can be started. now: the clock by which calls are measured. scorers:
    further calls about each answer, whose values come back with its judgement (`Grade.scores`).
    """

    def __init__(
        self,
        reward: Reward | Separable,
        deadline: float = DEADLINE,
        retries: int = RETRIES,
        share: tuple[int, int] = (0, 1),
        report: Callable[[str], None] = lambda message: None,
        isolate: Callable[[], GradingProcess] | None = None,
        now: Callable[[], float] = time.monotonic,
        scorers: Sequence[GradingCalls] = (),
    ) -> None:
        self.reward = reward
        self.deadline = deadline
        is_separable = isinstance(reward, Separable)
        parts: Sequence[GradingCalls]
        if isinstance(reward, Separable):
            parts, self._combine_values = reward.calls(), reward.judgement
        else:
            parts, self._combine_values = [as_single_part(reward)], _single_judgement
        self._returned_calls: SimpleQueue[tuple[_Window, _RewardCall]] = SimpleQueue()
        self._part_count = n = len(parts)
        settings = _WindowSettings(deadline, retries, report, isolate, now)
        scorer_settings = _WindowSettings(deadline, retries, report, None, now)
        windows = [(part, settings, i if is_separable else None) for i, part in enumerate(parts)]
        windows += [(part, scorer_settings, None) for part in scorers]
        self._windows = [
            _Window(part, i, index, searcher_limit(part.concurrency, *share), options, i >= n, self._returned_calls)
            for i, (part, options, index) in enumerate(windows)
        ]
        self.close = weakref.finalize(self, _close_windows, self._windows)  # ends its threads
        self._error: BaseException | None = None
        self.on_wait: Callable[[], object] = lambda: None  # called now and then by `grade` while it waits
        self.unfinished_count = 0  # answers that have not come back
        self._abstention_count: int | None = 0  # of the first answers; None: one has a value
        self.call_seconds = 0.0  # of all calls, each by itself

    def capacity(self, samples: int) -> int:
        """Returns the most answers that calls in progress are about at once, with `samples` answers to a prompt. A call
        about all waiting answers counts as one.
        """
        return max(w.limit * (samples if w.part.unit == "group" else 1) for w in self._windows)

    @property
    def has_batched_part(self) -> bool:
        """Returns whether some part is called about all waiting answers at once."""
        return any(window.part.unit == "waiting" for window in self._windows)

    def submit(
        self,
        answers: Sequence[tuple[Prompt, Sequence[Completion]]],
        destination: list[Grade],
        is_urgent: bool = False,
        with_scores: bool = True,
    ) -> list[list[Grade]]:
        """Submits prompts with answers to each. `poll` adds each grade to `destination` once it is complete. Returns
        the grades [i][j] of the j-th answer to the i-th prompt.

        `is_urgent` puts them before all waiting answers; `with_scores` has the scorers called about them too.
        """
        windows = self._windows if with_scores else self._windows[: self._part_count]
        n = len(windows)
        grades = [[Grade(p, c, destination, [None] * n, n) for c in completions] for p, completions in answers]
        self.unfinished_count += sum(map(len, grades))
        for window in windows:
            window.submit([group for group in grades if group], is_urgent)
        return grades

    def poll(self) -> None:
        """Receives results of calls and gives up calls that have expired. Raises the error of a call once no further
        answer comes back.
        """
        count = self._receive_all()
        for window in self._windows:
            window.expire()
        returned_count = self._receive_all() + count
        if self._error is not None and (not returned_count or not self.unfinished_count):
            error, self._error = self._error, None
            raise error

    def wait(self, seconds: float) -> None:
        """Waits until a call returns, at most `seconds`, and then polls."""
        if self.unfinished_count and self._error is None:
            with suppress(Empty):
                self._receive(*self._returned_calls.get(timeout=min(seconds, _CHECK_SECONDS)))
        self.poll()

    def cancel(self) -> None:
        """Begins no further calls, so that waiting answers do not come back."""
        for window in self._windows:
            self._fail(window.cancel())

    def judge(self, answers: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Returns the judgement of every answer, in order, graded before all waiting answers. The reward is NaN where a
        call about the answer expired.
        """
        rows_by_prompt: dict[str, list[int]] = {}  # of the answers to each prompt
        for i, (prompt, _) in enumerate(answers):
            rows_by_prompt.setdefault(prompt.key, []).append(i)
        grades = self.grade([(answers[row[0]][0], [answers[i][1] for i in row]) for row in rows_by_prompt.values()])
        if len(answers) > 1 and len(answers) == self._abstention_count:
            raise UserError(_abstention_message(self._windows[: self._part_count], len(answers)))
        judgements = [Judgement(math.nan)] * len(answers)
        for row, group in zip(rows_by_prompt.values(), grades, strict=True):
            for i, grade in zip(row, group, strict=True):
                judgements[i] = grade.judgement or judgements[i]
        return judgements

    def grade(self, answers: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[Grade]]:
        """Returns complete grades as `submit` arranges them, by the reward alone and before all waiting answers."""
        returned_grades: list[Grade] = []
        grades = self.submit(answers, returned_grades, is_urgent=True, with_scores=False)
        try:
            while len(returned_grades) < sum(map(len, grades)):
                self.wait(_CHECK_SECONDS)
                self.on_wait()
        except BaseException:
            returned_ids = set(map(id, returned_grades))
            self._fail([grade for row in grades for grade in row if id(grade) not in returned_ids])
            raise
        return grades

    def _fail(self, grades: Sequence[Grade]) -> None:
        """Gives up answers, which then do not come back."""
        for grade in grades:
            self.unfinished_count -= not grade.has_failed
            grade.has_failed = True

    def _note_abstention(self, values: Sequence[Any]) -> None:
        """Raises `UserError` where the first answers get no value from any part, since nothing could be learnt."""
        if self._abstention_count is None:
            return
        self._abstention_count += 1
        if any(value is not None for value in values):
            self._abstention_count = None
        elif self._abstention_count == MAX_ABSTENTIONS:
            raise UserError(_abstention_message(self._windows[: self._part_count], self._abstention_count))

    def _receive_all(self) -> int:
        count = 0
        while True:
            try:
                window, call = self._returned_calls.get_nowait()
            except Empty:
                return count
            count += self._receive(window, call)

    def _receive(self, window: _Window, call: _RewardCall) -> int:
        """Receives the result of one call, and returns how many answers came back with it."""
        if call.error is not None:
            if not all(grade.has_failed for grade in call.grades):  # else nobody waits for these answers
                self._error = self._error or call.error
            self._fail(call.grades)
            return 0
        count = 0
        self.call_seconds += call.seconds
        for i, grade in enumerate(call.grades):
            grade.seconds = max(grade.seconds, call.seconds)
            if grade.has_failed:
                continue
            grade.missing_parts -= 1
            grade.has_expired |= call.has_expired
            if call.values is not None:
                grade.part_values[window.position] = call.values[i]
            if grade.missing_parts:
                continue
            if not grade.has_expired:
                try:
                    self._note_abstention(grade.part_values[: self._part_count])
                    grade.judgement = self._combine_values(grade.part_values[: self._part_count])
                except Exception as error:  # noqa: BLE001 - of the user's reward; raised by `poll`
                    self._error = self._error or error
                    self._fail([grade])
                    continue
                grade.scores = tuple(grade.part_values[self._part_count :])
            grade.destination.append(grade)
            self.unfinished_count -= 1
            count += 1
        return count


class GradingProcess(Protocol):
    """Grades answers in a process of its own, whose main thread calls the reward."""

    seconds: float  # that a call may take

    def grade(self, answers: Sequence[tuple[Prompt, Completion]], part: int | None = None) -> Sequence[Any]:
        """Returns the values of a part of the reward, or without a part the judgements. Raises `DeadlineExceeded` when
        the call took too long and was killed.
        """

    def close(self) -> None:
        """Ends the process."""


@dataclass(frozen=True)
class _WindowSettings:
    """Holds what all windows of a grader have in common."""

    deadline: float
    retries: int
    report: Callable[[str], None]
    isolate: Callable[[], GradingProcess] | None
    now: Callable[[], float]  # by which a call's seconds are measured


class _Window:
    """Holds the calls of one part of a reward: those that wait, and at most `limit` that run."""

    def __init__(
        self,
        part: GradingCalls,
        position: int,
        part_index: int | None,
        limit: int,
        settings: _WindowSettings,
        is_scorer: bool,
        returned_calls: SimpleQueue[tuple[_Window, _RewardCall]],
    ) -> None:
        self.part, self.position, self.part_index, self.limit = part, position, part_index, limit
        self._settings, self._deadline = settings, settings.deadline
        self._is_scorer = is_scorer  # values depend on the tokens alone
        self._is_isolated = False  # calls run in processes of their own
        self._thread_state = threading.local()  # the process of each thread
        self._returned_calls = returned_calls
        self._condition = threading.Condition()
        self._waiting_entries: deque[Sequence[Grade]] = deque()
        self._running_calls: dict[_RewardCall, None] = {}  # the oldest first
        self._idle_count = self._worker_count = 0  # threads
        self._abandoned_calls: dict[_RewardCall, float] = {}  # expired calls whose threads go on, and since when
        self._is_closed = False

    def submit(self, groups: Sequence[Sequence[Grade]], is_urgent: bool) -> None:
        """Queues the answers of these prompts, and begins calls as far as the limit allows."""
        entries: list[Sequence[Grade]] = list(groups)
        if self.part.unit == "answer":
            entries = [entry for group in groups for entry in self._entries(group)]
        with self._condition:
            if is_urgent:
                self._waiting_entries.extendleft(reversed(entries))
            else:
                self._waiting_entries.extend(entries)
            if self.part.asynchronous:
                self._start_tasks()
                return
            while self._worker_count < self.limit and self._idle_count < len(self._waiting_entries):
                self._start_thread()
            self._condition.notify(len(entries))

    def _entries(self, group: Sequence[Grade]) -> list[list[Grade]]:
        """Returns the answers to one prompt by call. A scorer gets equal answers in one call."""
        if not self._is_scorer:
            return [[grade] for grade in group]
        by_digest: dict[str, list[Grade]] = {}
        for grade in group:
            by_digest.setdefault(grade.completion.digest, []).append(grade)
        return list(by_digest.values())

    def _start_thread(self) -> None:
        self._worker_count, self._idle_count = self._worker_count + 1, self._idle_count + 1
        threading.Thread(target=self._run_thread, name="reward", daemon=True).start()

    def expire(self) -> None:
        """Gives up the calls that have run for longer than the deadline."""
        now = time.monotonic() - (_LOOP_GRACE if self.part.asynchronous else 0.0)
        with self._condition:
            late_calls = [call for call in self._calls_to_check() if now - call.started_at > self._time_limit(call)]
            for call in late_calls:
                if self.part.asynchronous:
                    raise DeadlineExceeded(
                        f"the event loop has not come back from {self.part.name} for {self._deadline + _LOOP_GRACE:g} "
                        "s: an async function must not block; await what waits, or make it a plain function"
                    )
                del self._running_calls[call]
                self._abandoned_calls[call] = time.monotonic()
                self._worker_count -= 1
                self._mark_expired(call)
                self._returned_calls.put((self, call))
            if self.part.asynchronous:
                return
            while self._worker_count < self.limit and self._idle_count < len(self._waiting_entries):
                self._start_thread()
            # Calls to a server that stalls end some time; one that hangs twice as long counts as hanging for ever.
            hanging_count = sum(time.monotonic() - expiry > self._deadline for expiry in self._abandoned_calls.values())
            if hanging_count > MAX_ABANDONED and not self._is_isolated:
                self._isolate(f"{hanging_count} of its calls hang for more than {2 * self._deadline:g} s each")

    def _calls_to_check(self) -> Sequence[_RewardCall]:
        """Returns the calls that may be late; none while the oldest is not, so that 500 new calls cost nothing."""
        calls = self._running_calls
        if not calls or time.monotonic() - next(iter(calls)).started_at <= self._deadline:
            return ()
        return [call for call in calls if not call.is_isolated]

    def _time_limit(self, call: _RewardCall) -> float:
        """Returns the seconds that a call may take: the deadline, or for a large batch a multiple of it."""
        if self.part.unit != "waiting":
            return self._deadline
        return self._deadline * math.ceil(len(call.grades) / _ANSWERS_PER_DEADLINE)

    def cancel(self) -> list[Grade]:
        """Removes the waiting answers and returns them."""
        with self._condition:
            grades = [grade for entry in self._waiting_entries for grade in entry]
            self._waiting_entries.clear()
        return grades

    def close(self) -> None:
        """Ends idle threads, and begins no further calls."""
        with self._condition:
            self._is_closed = True
            self._waiting_entries.clear()
            self._condition.notify_all()

    def _mark_expired(self, call: _RewardCall) -> None:
        call.has_expired, call.seconds = True, self._deadline
        log.warning("%s did not grade %d answers within %g s", self.part.name, len(call.grades), self._deadline)

    def pause_deadline(self, call: _RewardCall) -> None:
        """Stops the deadline of a call."""
        with self._condition:
            if call in self._running_calls:
                del self._running_calls[call]
                call.is_paused = True

    def resume_deadline(self, call: _RewardCall) -> None:
        """Restarts the deadline of a call that was stopped."""
        with self._condition:
            if call.is_paused:
                call.is_paused, call.started_at = False, time.monotonic()
                self._running_calls[call] = None

    def _isolate(self, reason: str) -> None:
        """Makes all calls from here on in processes of their own. Raises `PartFailed` where none can be started."""
        if self._settings.isolate is None:
            raise PartFailed(
                f"{self.part.name} has to run in processes of its own, but cannot here ({reason}): give what it waits "
                "for a timeout of its own, and use no signals"
            )
        if not self._is_isolated:
            log.warning("%s runs in processes of its own from here on: %s", self.part.name, reason)
            self._report(f"{self.part.name} runs in processes of its own: {reason}")
            self._is_isolated, self.limit = True, min(self.limit, MAX_PROCESSES)

    def _run_thread(self) -> None:
        """Makes calls, one after another, until the window is closed or a call has expired."""
        try:
            self._make_calls()
        finally:
            if (process := getattr(self._thread_state, "process", None)) is not None:
                process.close()

    def _make_calls(self) -> None:
        while (call := self._next_call()) is not None:
            while not self._attempt(call):
                pass
            with self._condition:
                if call not in self._running_calls:  # expired: another thread has taken this one's place
                    self._abandoned_calls.pop(call, None)
                    return
                del self._running_calls[call]
                self._idle_count += 1
            self._returned_calls.put((self, call))

    def _next_call(self) -> _RewardCall | None:
        """Waits for the next call and returns it, counted as running; None when this thread is to end."""
        with self._condition:
            while not self._waiting_entries and not self._is_closed and self._worker_count <= self.limit:
                self._condition.wait()
            self._idle_count -= 1
            if self._is_closed or self._worker_count > self.limit:
                self._worker_count -= 1
                self._condition.notify()  # another thread may have to take the call that this one was woken for
                return None
            return self._start_call()

    def _start_call(self) -> _RewardCall:
        """Starts a call about the entry that has waited longest, or for the unit "waiting" about a whole batch."""
        grades = self._waiting_entries.popleft()
        if self.part.unit == "waiting":
            grades = list(grades)
            while self._waiting_entries and len(grades) + len(self._waiting_entries[0]) <= _MAX_BATCH:
                grades += self._waiting_entries.popleft()
        call = _RewardCall(grades, time.monotonic())
        self._running_calls[call] = None
        return call

    def _attempt(self, call: _RewardCall) -> bool:
        """Makes a call once, and returns whether that was its last attempt."""
        started_at, _thread_call.call = self._settings.now(), (self, call)
        try:
            answers = [grade.answer for grade in call.grades]
            values = self._attempt_values(call, answers[:1] if self._is_scorer else answers)
            self._accept_values(call, [*values] * len(answers) if self._is_scorer else values)
        except BaseException as error:  # noqa: BLE001 - raised again by `poll`
            if self._is_isolated and isinstance(error, DeadlineExceeded):
                self._mark_expired(call)
                return True
            pause = None if call not in self._running_calls else self._pause_before_retry(call, error)
            if pause is None:
                return True
            threading.Event().wait(pause)
            with self._condition:
                if call not in self._running_calls:
                    return True
                del self._running_calls[call]
                call.started_at = time.monotonic()
                self._running_calls[call] = None
            return False
        call.seconds = self._settings.now() - started_at
        return True

    def _attempt_values(self, call: _RewardCall, answers: Sequence[tuple[Prompt, Completion]]) -> Sequence[Any]:
        """Returns the values of a call made in this thread, or in the thread's process. A call that tries to use
        signals is made again in the process, since the error that it got in the thread may have become its value.
        """
        if not self._is_isolated:
            values: Sequence[Any] = ()
            with watching_signals() as signal_use:
                try:
                    values = self.part.grade(self._call_arguments(answers))
                except Exception:  # a call that tried to use signals is made again, in a process
                    if not signal_use.was_tried:
                        raise
            if not signal_use.was_tried:
                return values
            self._isolate("it uses signals, which work in the main thread of a process only")
        with self._condition:
            if call not in self._running_calls:
                return ()
            call.is_isolated = True
        return self._in_process(call, answers)

    def _call_arguments(self, answers: Sequence[tuple[Prompt, Completion]]) -> Sequence[tuple[Prompt, Completion]]:
        """Returns the answers that a call gets, as copies where the part asks for them."""
        return copies_for_reward(answers) if self.part.copies else answers

    def _in_process(self, call: _RewardCall, answers: Sequence[tuple[Prompt, Completion]]) -> Sequence[Any]:
        """Returns the values of a call made in this thread's process."""
        assert self._settings.isolate is not None
        if not hasattr(self._thread_state, "process"):
            self._thread_state.process = self._settings.isolate()
        process: GradingProcess = self._thread_state.process
        process.seconds = self._time_limit(call)
        return process.grade(answers, self.part_index)

    def _accept_values(self, call: _RewardCall, values: Sequence[Any]) -> None:
        if len(values) != len(call.grades):
            raise UserError(f"{self.part.name} gave {len(values)} values for {len(call.grades)} answers")
        call.values = values

    def _pause_before_retry(self, call: _RewardCall, error: BaseException) -> float | None:
        """Returns the seconds until a call that raised is repeated; None if it is not repeated and keeps its error."""
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
        """Records a fault. A failure to record is no fault of the call, and is ignored."""
        with suppress(Exception):
            self._settings.report(message)

    def _start_tasks(self) -> None:
        """Begins asynchronous calls, as many as the limit allows."""
        while self._waiting_entries and len(self._running_calls) < self.limit and not self._is_closed:
            asyncio.run_coroutine_threadsafe(self._run_task(self._start_call()), event_loop())

    async def _run_task(self, call: _RewardCall) -> None:
        while not await self._attempt_async(call):
            pass
        with self._condition:
            self._running_calls.pop(call, None)
            self._start_tasks()
        self._returned_calls.put((self, call))

    async def _attempt_async(self, call: _RewardCall) -> bool:
        """Makes an asynchronous call once, and returns whether that was its last attempt."""
        call.started_at, started_at = time.monotonic(), self._settings.now()
        try:
            async with asyncio.timeout(self._deadline) as limit:
                with watching_signals() as signal_use:
                    values = await self.part.grade(self._call_arguments([grade.answer for grade in call.grades]))
                if signal_use.was_tried:
                    raise UserError(
                        f"{self.part.name} is async and uses signals, which work in the main thread of a process only: "
                        "make it a plain function"
                    )
                self._accept_values(call, values)
        except BaseException as error:  # noqa: BLE001 - raised again by `poll`
            if limit.expired():
                self._mark_expired(call)
                return True
            pause = self._pause_before_retry(call, error)
            if pause is not None:
                await asyncio.sleep(pause)
            return pause is None
        call.seconds = self._settings.now() - started_at
        return True


def _abstention_message(windows: Sequence[_Window], count: int) -> str:
    names = ", ".join(window.part.name for window in windows)
    return f"{names} gave None for all of {count} answers: return a number for some"


def _close_windows(windows: Sequence[_Window]) -> None:
    """Ends the idle threads; those of unfinished calls are abandoned."""
    for window in windows:
        window.close()


_thread_call = threading.local()  # the call that a thread makes


@contextmanager
def pausing_deadline() -> Iterator[None]:
    """Stops the deadline of the grading call that this thread makes, while inside. It is for a call that waits for its
    turn at a server which other calls share and which has a deadline of its own.
    """
    window_and_call: tuple[_Window, _RewardCall] | None = getattr(_thread_call, "call", None)
    if window_and_call is None:
        yield
        return
    window, call = window_and_call
    window.pause_deadline(call)
    try:
        yield
    finally:
        window.resume_deadline(call)


def searcher_limit(limit: int, index: int, count: int) -> int:
    """Returns how many of `limit` concurrent calls the searcher `index` may make, of `count` that share the limit."""
    return max(1, limit // count + (index < limit % count))


def as_single_part(reward: Reward) -> GradingCalls:
    """Returns a reward without `calls` as a single part, which is called by `judge`."""
    return GradingCalls(f"the reward {type(reward).__name__}", reward.judge)


def _single_judgement(values: Sequence[Any]) -> Judgement:
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


def call_in_thread(name: str, function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Calls a function in a thread of its own, which cannot keep the process alive, and returns its future."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asks
            future.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future
