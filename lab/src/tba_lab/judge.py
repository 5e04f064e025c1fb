"""A judge that waits, fails and hangs as it is set to, and writes down each call: for measuring what slow rewards cost.

Invariant: a call is on the disk when it begins, and its verdict before anybody else gets it. So whatever is killed, the
judge's log says of each answer whether it was asked about and what it was worth; all times are of one clock, which all
processes of a machine share.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tba.errors import UserError
from tba.fields import as_declared
from tba.protocols import Reward
from tba.rewards.functions import FunctionReward
from tba.tasks.arithmetic import Arithmetic

Grade: TypeAlias = Callable[[str, Mapping[str, Any]], float]  # (answer, the problem's fields) -> reward
CallEnd: TypeAlias = Literal["value", "error", "hangs"]
_HANGING_SECONDS = 86_400.0  # seconds that a call lasts which hangs
_random = random.SystemRandom()  # of no seed: processes that are forked from each other draw different numbers


@dataclass(frozen=True)
@as_declared
class Judge:
    """Says how long calls last, which of them fail, and where they are written down. Raises `UserError` when a field
    makes no sense.
    """

    seconds: float = 0.0  # that a call lasts; with a spread, the mean over calls
    spread: float = 0.0  # standard deviation of the logarithm of the seconds; 0: all calls last alike
    tail_every: int = 0  # one call in so many lasts `tail_seconds`; 0: none
    tail_seconds: float = 20.0
    raises: float = 0.0  # share of calls that raise, when they end
    hangs: float = 0.0  # share of calls that never end
    concurrency: int = 0  # calls at once; 0: the reward leaves it open
    coroutine: bool = False  # the function is an `async def`
    log: Path | None = None  # folder in which each process writes its calls; None: they are not written

    def __post_init__(self) -> None:
        for name in ("seconds", "spread", "tail_every", "tail_seconds", "raises", "hangs", "concurrency"):
            if not getattr(self, name) >= 0:
                raise UserError(f"the judge has {name} {getattr(self, name)}: give 0 or more")
        if self.raises + self.hangs > 1:
            raise UserError(f"the judge raises {self.raises} and hangs {self.hangs}: give shares of calls, 1 together")

    def reward(self, grade: Grade) -> FunctionReward:
        """Returns the reward that gives each answer what `grade` does, after a while."""
        function = functools.partial(_judge_later if self.coroutine else _judge, self, grade)
        return FunctionReward(function, self.concurrency) if self.concurrency else FunctionReward(function)

    def draw(self) -> tuple[float, CallEnd]:
        """Returns how long the next call lasts and how it ends."""
        chance = _random.random()
        if chance < self.hangs:
            return _HANGING_SECONDS, "hangs"
        end: CallEnd = "error" if chance < self.hangs + self.raises else "value"
        if self.tail_every and _random.random() * self.tail_every < 1:
            return self.tail_seconds, end
        if self.spread and self.seconds:
            return _random.lognormvariate(math.log(self.seconds) - self.spread**2 / 2, self.spread), end
        return self.seconds, end


def exact(answer: str, fields: Mapping[str, Any]) -> float:
    """Grades by the right answer, character by character."""
    return float(answer == fields["answer"])


@dataclass(frozen=True)
class JudgedSums(Arithmetic):
    """Arithmetic behind a judge; held-out answers are graded at once, so that they never wait."""

    judge: Judge = field(default_factory=Judge)

    def reward(self) -> FunctionReward:
        return self.judge.reward(exact)

    def examination(self) -> Reward:
        """Returns the reward of held-out answers."""
        return super().reward()


def _judge(judge: Judge, grade: Grade, prompt: str, completion: str, **fields: Any) -> float:
    call = _Call(judge, prompt, completion)
    if call.seconds:
        time.sleep(call.seconds)
    return call.close(grade(completion, fields))


async def _judge_later(judge: Judge, grade: Grade, prompt: str, completion: str, **fields: Any) -> float:
    call = _Call(judge, prompt, completion)
    if call.seconds:
        await asyncio.sleep(call.seconds)
    return call.close(grade(completion, fields))


class _Call:
    """A call that is under way."""

    def __init__(self, judge: Judge, prompt: str, completion: str) -> None:
        self.seconds, self.end = judge.draw()
        self._folder, self._name = judge.log, os.urandom(8).hex()
        self._write([self._name, time.monotonic(), self.end, prompt, completion])

    def close(self, value: float) -> float:
        """Returns the verdict, once it is written down. Raises where this is a call that does."""
        self._write([self._name, time.monotonic(), None if self.end == "error" else value])
        if self.end == "error":
            raise RuntimeError("the judge fails, as it is set to")
        return value

    def _write(self, line: list[Any]) -> None:
        if self._folder is not None:
            os.write(_open_log(self._folder, os.getpid()), f"{json.dumps(line)}\n".encode())


@functools.lru_cache
def _open_log(folder: Path, process: int) -> int:
    """Returns the file of a process, to whose end each line is written at once."""
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / f"{process}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


@dataclass(frozen=True)
class Call:
    """One call, from the judge's log. Times are of `time.monotonic`."""

    prompt: str
    answer: str
    end: CallEnd  # how it ended, or was to end
    began: float
    ended: float | None = None  # None: it hangs, or was under way when its process ended
    value: float | None = None

    @property
    def graded(self) -> bool:
        """Returns whether it ended with a verdict."""
        return self.value is not None


def read_calls(folder: Path) -> list[Call]:
    """Returns the calls of all processes, in the order in which they began."""
    starts: dict[str, tuple[float, CallEnd, str, str]] = {}
    closings: dict[str, tuple[float, float | None]] = {}
    for file in folder.glob("*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, *values = json.loads(line)
            if len(values) == 4:
                starts[name] = (values[0], values[1], values[2], values[3])
            else:
                closings[name] = (values[0], values[1])
    calls = [
        Call(prompt, answer, end, start, *closings.get(name, ()))
        for name, (start, end, prompt, answer) in starts.items()
    ]
    return sorted(calls, key=lambda call: call.began)


@dataclass(frozen=True)
class Account:
    """What became of the verdicts, by the judge's log and the journal."""

    calls: int
    verdicts: int  # calls that ended with a value within the deadline
    rows: int  # answers in the journal
    lost: int  # verdicts without a row
    interrupted: int  # verdicts without a row, since the run was killed or stopped in that moment; not lost
    invented: int  # rows without a verdict
    late: int  # calls that ended beyond the deadline
    failed: int  # calls that raised
    hung: int  # calls that hang
    cut_off: int  # calls that were under way when their process ended, and not beyond the deadline


def account(
    rows: Counter[tuple[str, str]],
    calls: Sequence[Call],
    deadline: float = math.inf,
    spans: Sequence[tuple[float, float]] = (),
) -> Account:
    """Compares the journal's answers, by prompt and text, with the judge's calls.

    An answer that is asked about again after its verdict has a verdict without a row, as one that is missing has.
    spans: of time, in which a process ended, so that a verdict may not have reached the journal.
    """
    verdicts: dict[tuple[str, str], list[float]] = defaultdict(list)
    late_calls = 0
    for call in calls:
        if call.graded and call.ended is not None:
            if call.ended - call.began > deadline:
                late_calls += 1
            else:
                verdicts[call.prompt, call.answer].append(call.ended)
    lost_verdicts = interrupted = 0
    for answer, times in verdicts.items():
        surplus = max(0, len(times) - rows[answer])
        in_span = [any(span_start <= end <= span_end for span_start, span_end in spans) for end in times]
        excused_verdicts = min(surplus, sum(in_span))
        lost_verdicts, interrupted = lost_verdicts + surplus - excused_verdicts, interrupted + excused_verdicts
    last_seconds = max((call.ended or call.began for call in calls), default=0.0)
    unfinished_calls = [c for c in calls if c.ended is None and c.end != "hangs"]
    return Account(
        calls=len(calls),
        verdicts=sum(map(len, verdicts.values())),
        rows=rows.total(),
        lost=lost_verdicts,
        interrupted=interrupted,
        invented=sum(max(0, count - len(verdicts.get(answer, ()))) for answer, count in rows.items()),
        late=late_calls,
        failed=sum(call.end == "error" and call.ended is not None for call in calls),
        hung=sum(call.end == "hangs" for call in calls),
        cut_off=sum(
            min([*(end for _, end in spans if end > call.began), last_seconds]) - call.began <= deadline
            for call in unfinished_calls
        ),
    )
