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

_SLOWER = 1.25  # times what the searcher is busy for, from which on a reward is said to hold up a round
_COMPUTES = 0.5  # share of the time of its calls in which a reward computes, from which on threads do not help
_MUCH = 0.3  # share of a searcher's time from which on it is said that the reward computes
MOST = 256  # calls at once that are advised

Answer = tuple[Prompt, Completion]


@dataclass(frozen=True)
class PartTime:
    """Holds what the calls of one part of a reward took. Sums are over `answers`."""

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
    def computes(self) -> bool:
        """Returns whether a call mostly computes, rather than waits."""
        return self.processor > _COMPUTES * self.seconds

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
            Grader(_OfPart(part), isolate=_of_part(isolate, None if separable is None else i), now=now)
            for i, part in enumerate(self._parts)
        ]
        self._times: list[list[tuple[int, float, float]]] = [[] for _ in self._parts]
        self.seconds = 0.0  # for which it was waited so far

    def judge(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Judgement]:
        """Returns the judgements of the answers to one prompt; the reward of one is NaN where its call expired."""
        began, by_part, expired = self._now(), [], [False] * len(completions)
        for grader, times in zip(self._graders, self._times, strict=True):
            computed, spent = self._processor(), grader.call_seconds
            (grades,) = grader.grade([(prompt, completions)])
            times.append((len(grades), grader.call_seconds - spent, self._processor() - computed))
            by_part.append([grade.part_values[0] for grade in grades])
            expired = [was or grade.has_expired for was, grade in zip(expired, grades, strict=True)]
        self.seconds += self._now() - began
        return [
            Judgement(math.nan) if late else values[0] if self._judgement is None else self._judgement(values)
            for late, values in zip(expired, zip(*by_part, strict=True), strict=True)
        ]

    def times(self) -> list[PartTime]:
        """Returns what each part's calls took."""
        parts = []
        for part, times in zip(self._parts, self._times, strict=True):
            answers, seconds, processor = (sum(column) for column in zip(*(times[1:] or times), strict=True))
            parts.append(
                PartTime(part.name, part.unit, part.concurrency, part.asynchronous, int(answers), seconds, processor)
            )
        return parts

    def close(self) -> None:
        """End the threads of its calls."""
        for grader in self._graders:
            grader.close()


@dataclass
class _IsolatedPart:
    """Grades by one part of a reward in a process of its own."""

    process: GradingProcess
    part: int | None  # None: by its `judge`
    seconds: float = 0.0

    def grade(self, answered: Sequence[Answer], part: int | None = None) -> Sequence[Any]:
        self.process.seconds = self.seconds
        return self.process.grade(answered, self.part)

    def close(self) -> None:
        self.process.close()


def _of_part(isolate: Callable[[], GradingProcess] | None, part: int | None) -> Callable[[], GradingProcess] | None:
    return None if isolate is None else lambda: _IsolatedPart(isolate(), part)


@dataclass(frozen=True)
class _OfPart:
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
    def busy(self) -> float:
        """Returns the seconds for which a searcher itself is busy with a round."""
        return sum(self.stages.values()) + self.computing

    @property
    def computing(self) -> float:
        """Returns for how many of these the reward computes."""
        return sum(self.answers * part.processor / part.answers for part in self.parts)

    @property
    def reward(self) -> float:
        """Returns the seconds after which the slowest part has graded a round of each searcher."""
        return max((self._graded(part, part.window(self.searchers)) for part in self.parts), default=0.0)

    @property
    def seconds(self) -> float:
        """Returns the seconds from one round to the next: see the formula above."""
        return max(self.busy, self.reward)

    @property
    def grading(self) -> float:
        """Returns the seconds in which one searcher alone grades a round."""
        return max((part.seconds_of(self.answers) / part.concurrency for part in self.parts), default=0.0)

    @property
    def one_by_one(self) -> float:
        """Returns the seconds of a round where nothing goes on at the same time, as in the inline runtime."""
        return sum(self.stages.values()) + sum(part.seconds_of(self.answers) for part in self.parts)

    @property
    def rate(self) -> float:
        """Returns the answers a second of all searchers together."""
        return self.searchers * self.answers / self.seconds

    def _graded(self, part: PartTime, window: int) -> float:
        return self.searchers * part.seconds_of(self.answers) / window

    def facts(self, inline: bool = False) -> str:
        """Returns the seconds of each stage, in words."""
        stages = [f"{name} {spent:.3g} s" for name, spent in self.stages.items() if spent]
        for part in self.parts:
            window, alone = (1 if inline else part.window(self.searchers)), part.seconds_of(self.answers)
            calls = f" ({window} calls at once: {self._graded(part, window):.3g} s)" if window > 1 else ""
            stages.append(f"{part.name if len(self.parts) > 1 else 'reward'} {alone:.3g} s{calls}")
        return ", ".join(stages)

    def advice(self) -> list[str]:
        """Says what holds up a round, and which setting helps; nothing where the reward is a small share of it."""
        if not self.parts:
            return []
        part = max(self.parts, key=lambda part: self._graded(part, part.window(self.searchers)))
        spent, window = self._graded(part, part.window(self.searchers)), part.window(self.searchers)
        slow = spent > _SLOWER * self.busy
        if part.computes:
            if not slow and self.computing < _MUCH * self.busy:
                return []
            return [
                f"{part.name} takes {max(spent, self.computing):.3g} of a round's {self.seconds:.3g} s, and it "
                "computes: of its threads one computes at a time, so that `concurrency` would not help; make it "
                "faster, or take more searchers (--searchers), each of which grades in a process of its own"
            ]
        if not slow:
            return []
        named = f"{part.name} takes {spent:.3g} of a round's {self.seconds:.3g} s: it is"
        if part.unit == "waiting":
            return [
                f"{named} called about all answers that wait, one call at a time: make it faster, or write it for one "
                "answer, so that several calls can be under way (`concurrency`)"
            ]
        calls = min(MOST, 2 ** math.ceil(math.log2(window * spent / self.busy)))
        if calls <= window:
            return [
                f"{named} waited for with {window} calls at once: make it faster; with as many at once a round cannot "
                "be shorter"
            ]
        gain = f"`concurrency={calls}` brings a round to about {max(self.busy, self._graded(part, calls)):.2g} s"
        if part.asynchronous:
            return [f"{named} async, with {window} calls at once; if what it asks takes as many, {gain}"]
        if part.concurrency == 1:
            return [f"{named} a plain function called one at a time; if it may run in several threads at once, {gain}"]
        return [f"{named} called in {window} threads at once; if what it asks takes as many, {gain}"]
