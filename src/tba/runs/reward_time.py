"""Times a reward's calls, and says what they cost a round and which setting helps.

    rate = min(searchers / seconds that a searcher is busy with an answer, window / seconds of a call per answer)

A searcher generates while answers are graded, so that a run's rate is the smaller of the two; with several parts the
slowest counts. What generates grows with the searchers, a window does not: it is the whole run's, but for one call that
each searcher has at least. Only what the reward computes itself is taken from generation: threads take turns.

Invariant: whether a call waits or computes is measured, by the processor's time of this process while calls are made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tba.grading import Grader, GradingProcess, as_single_part
from tba.protocols import GradingCalls, Reward, Separable
from tba.types import Completion, Json, Judgement, Prompt

_SLOW_RATIO = 1.25  # times what the searcher is busy for, from which on a reward is said to hold up a round
_COMPUTING_SHARE = 0.5  # share of the time of its calls in which a reward computes, from which on threads do not help
_NOTABLE_SHARE = 0.3  # share of a searcher's time from which on it is said that the reward computes
MOST_CALLS = 256  # calls at once that are advised

PromptAnswer = tuple[Prompt, Completion]


@dataclass(frozen=True)
class PartTime:
    """Holds the seconds that the calls of one part of a reward took, as sums over `answers`."""

    name: str
    unit: str
    concurrency: int
    asynchronous: bool
    answers: int
    seconds: float  # of the calls, each by itself
    processor: float  # seconds that this process computed meanwhile

    def window(self, searchers: int) -> int:
        """Returns how many calls are under way at once in a run."""
        return max(self.concurrency, searchers)

    def seconds_of(self, answers: float) -> float:
        """Returns how long calls about so many answers take, one after another."""
        return answers * self.seconds / self.answers

    @property
    def is_computing(self) -> bool:
        """Returns whether a call mostly computes, rather than waits."""
        return self.processor > _COMPUTING_SHARE * self.seconds

    def to_json(self) -> dict[str, Json]:
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> PartTime:
        return cls(**state)


class TimedReward:
    """Calls a reward as a run does, and times its calls. The first group of answers warms it up.

    isolate: as `Grader` has it.
    """

    def __init__(
        self,
        reward: Reward,
        now: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.process_time,
        isolate: Callable[[], GradingProcess] | None = None,
    ) -> None:
        self._now, self._processor = now, processor
        separable = reward if isinstance(reward, Separable) else None
        self._judgement = None if separable is None else separable.judgement
        self._parts = [as_single_part(reward)] if separable is None else list(separable.calls())
        self._graders = [
            Grader(_SinglePart(part), isolate=_part_isolation(isolate, None if separable is None else i), now=now)
            for i, part in enumerate(self._parts)
        ]
        self._times: list[list[tuple[int, float, float]]] = [[] for _ in self._parts]
        self.seconds = 0.0  # for which it was waited so far

    def judge(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Judgement]:
        """Returns the judgements of the answers to one prompt; the reward of one is NaN where its call expired."""
        start, by_part, expired_flags = self._now(), [], [False] * len(completions)
        for grader, times in zip(self._graders, self._times, strict=True):
            processor_before, call_seconds_before = self._processor(), grader.call_seconds
            (grades,) = grader.grade([(prompt, completions)])
            times.append((len(grades), grader.call_seconds - call_seconds_before, self._processor() - processor_before))
            by_part.append([grade.part_values[0] for grade in grades])
            expired_flags = [flag or grade.has_expired for flag, grade in zip(expired_flags, grades, strict=True)]
        self.seconds += self._now() - start
        return [
            Judgement(math.nan) if has_expired else values[0] if self._judgement is None else self._judgement(values)
            for has_expired, values in zip(expired_flags, zip(*by_part, strict=True), strict=True)
        ]

    def times(self) -> list[PartTime]:
        """Returns the times of each part's calls."""
        parts = []
        for part, times in zip(self._parts, self._times, strict=True):
            answers, seconds, processor = (sum(column) for column in zip(*(times[1:] or times), strict=True))
            parts.append(
                PartTime(part.name, part.unit, part.concurrency, part.asynchronous, int(answers), seconds, processor)
            )
        return parts

    def close(self) -> None:
        """End the threads of the reward's calls."""
        for grader in self._graders:
            grader.close()


@dataclass
class _IsolatedPart:
    """Grades by one part of a reward in a process of its own."""

    process: GradingProcess
    part: int | None  # None: by its `judge`
    seconds: float = 0.0

    def grade(self, answered: Sequence[PromptAnswer], part: int | None = None) -> Sequence[Any]:
        self.process.seconds = self.seconds
        return self.process.grade(answered, self.part)

    def close(self) -> None:
        self.process.close()


def _part_isolation(
    isolate: Callable[[], GradingProcess] | None, part: int | None
) -> Callable[[], GradingProcess] | None:
    return None if isolate is None else lambda: _IsolatedPart(isolate(), part)


@dataclass(frozen=True)
class _SinglePart:
    """One part of a reward, so that its calls are timed apart from those of others."""

    part: GradingCalls

    def calls(self) -> list[GradingCalls]:
        return [self.part]

    def judgement(self, values: Sequence[Any]) -> Judgement:
        return Judgement(0.0)


@dataclass(frozen=True)
class RoundTime:
    """Holds what the stages of one searcher's round take, and the rate of all searchers that follows."""

    answers: int  # of a round
    stages: Mapping[str, float]  # seconds of what a searcher does itself: generation, environment, reference, ...
    parts: Sequence[PartTime]  # of the reward
    searchers: int = 1

    @property
    def busy_seconds(self) -> float:
        """Returns the seconds for which a searcher itself is busy with a round."""
        return sum(self.stages.values()) + self.computing_seconds

    @property
    def computing_seconds(self) -> float:
        """Returns the seconds of a round in which the reward itself computes."""
        return sum(self.answers * part.processor / part.answers for part in self.parts)

    @property
    def reward_seconds(self) -> float:
        """Returns the seconds after which the slowest part has graded a round of each searcher."""
        return max((self._grading_seconds(part, part.window(self.searchers)) for part in self.parts), default=0.0)

    @property
    def seconds(self) -> float:
        """Returns the seconds from one round to the next: see the formula above."""
        return max(self.busy_seconds, self.reward_seconds)

    @property
    def grading_seconds(self) -> float:
        """Returns the seconds in which one searcher alone grades a round."""
        return max((part.seconds_of(self.answers) / part.concurrency for part in self.parts), default=0.0)

    @property
    def sequential_seconds(self) -> float:
        """Returns the seconds of a round where nothing goes on at the same time, as in the inline runtime."""
        return sum(self.stages.values()) + sum(part.seconds_of(self.answers) for part in self.parts)

    @property
    def rate(self) -> float:
        """Returns the answers a second of all searchers together."""
        return self.searchers * self.answers / self.seconds

    def _grading_seconds(self, part: PartTime, window: int) -> float:
        return self.searchers * part.seconds_of(self.answers) / window

    def facts(self, inline: bool = False) -> str:
        """Returns the seconds of each stage, in words."""
        stages = [f"{name} {seconds:.3g} s" for name, seconds in self.stages.items() if seconds]
        for part in self.parts:
            window, sequential_seconds = (1 if inline else part.window(self.searchers)), part.seconds_of(self.answers)
            calls = f" ({window} calls at once: {self._grading_seconds(part, window):.3g} s)" if window > 1 else ""
            stages.append(f"{part.name if len(self.parts) > 1 else 'reward'} {sequential_seconds:.3g} s{calls}")
        return ", ".join(stages)

    def advice(self) -> list[str]:
        """Says what holds up a round, and which setting helps; nothing where the reward is a small share of it."""
        if not self.parts:
            return []
        part = max(self.parts, key=lambda part: self._grading_seconds(part, part.window(self.searchers)))
        grading_seconds, window = self._grading_seconds(part, part.window(self.searchers)), part.window(self.searchers)
        is_slow = grading_seconds > _SLOW_RATIO * self.busy_seconds
        if part.is_computing:
            if not is_slow and self.computing_seconds < _NOTABLE_SHARE * self.busy_seconds:
                return []
            return [
                f"{part.name} takes {max(grading_seconds, self.computing_seconds):.3g} of a round's {self.seconds:.3g} "
                "s, and it computes: of its threads one computes at a time, so that `concurrency` would not help; make "
                "it faster, or take more searchers (--searchers), each of which grades in a process of its own"
            ]
        if not is_slow:
            return []
        sentence = f"{part.name} takes {grading_seconds:.3g} of a round's {self.seconds:.3g} s: it is"
        if part.unit == "waiting":
            return [
                f"{sentence} called about all answers that wait, one call at a time: make it faster, or write it for "
                "one answer, so that several calls can be under way (`concurrency`)"
            ]
        calls = min(MOST_CALLS, 2 ** math.ceil(math.log2(window * grading_seconds / self.busy_seconds)))
        if calls <= window:
            return [
                f"{sentence} waited for with {window} calls at once: make it faster; with as many at once a round "
                "cannot be shorter"
            ]
        round_seconds = max(self.busy_seconds, self._grading_seconds(part, calls))
        gain = f"`concurrency={calls}` brings a round to about {round_seconds:.2g} s"
        if part.asynchronous:
            return [f"{sentence} async, with {window} calls at once; if what it asks takes as many, {gain}"]
        if part.concurrency == 1:
            condition = "if it may run in several threads at once"
            return [f"{sentence} a plain function called one at a time; {condition}, {gain}"]
        return [f"{sentence} called in {window} threads at once; if what it asks takes as many, {gain}"]
