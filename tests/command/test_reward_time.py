"""What a reward's calls cost a round, and which setting is named for it: computed, on clocks that only calls move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tba.protocols import GradingCalls
from tba.runs.reward_time import MOST_CALLS, PartTime, RoundTime, TimedReward
from tba.types import Completion, Judgement, Prompt, StopReason, Version

PLAIN = PartTime("reward function 'judge'", "answer", 1, False, answers=8, seconds=2.0, processor=0.0)  # 0.25 s a call
STAGES = {"generation": 1.2, "environment": 0.0, "reference": 0.3}


def answered(count: int) -> tuple[Prompt, list[Completion]]:
    versions, token = (Version(), Version()), np.array([1], np.int32)
    answers = [
        Completion(token, str(i), StopReason.EOS, versions, log_behavior=np.zeros(1, np.float32)) for i in range(count)
    ]
    return Prompt("t", token, "p"), answers


@dataclass
class Sleeping:
    """A reward of one answer, each of whose calls moves its clock; the first, which loads things, by ten times more."""

    seconds: float
    computing: float = 0.0
    concurrency: int = 1
    asynchronous: bool = False
    now: float = 0.0
    processor: float = 0.0
    texts: list[str] = field(default_factory=list)

    def judge(self, answers: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        raise AssertionError("a reward of calls is not called by judge")

    def calls(self) -> list[GradingCalls]:
        grade: Callable[..., Any] = self.grade_later if self.asynchronous else self.grade
        return [GradingCalls("reward function 'judge'", grade, "answer", self.concurrency, self.asynchronous)]

    def judgement(self, values: Sequence[Any]) -> Judgement:
        return Judgement(values[0])

    def grade(self, answers: Sequence[tuple[Prompt, Completion]]) -> list[float]:
        ((_, completion),) = answers
        self.now += self.seconds * (1 if self.texts else 10)
        self.processor += self.computing
        self.texts.append(completion.text)
        return [float(completion.text)]

    async def grade_later(self, answers: Sequence[tuple[Prompt, Completion]]) -> list[float]:
        return self.grade(answers)

    def timed(self) -> TimedReward:
        return TimedReward(self, lambda: self.now, lambda: self.processor)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_answer_has_a_call_of_its_own_and_the_group_that_warms_up_is_not_timed(asynchronous: bool) -> None:
    reward = Sleeping(0.25, 0.1, asynchronous=asynchronous)
    timed = reward.timed()
    for _ in range(3):
        assert [mark.reward for mark in timed.judge(*answered(4))] == [0.0, 1.0, 2.0, 3.0]
    (part,) = timed.times()
    assert reward.texts == 3 * ["0", "1", "2", "3"]
    assert (part.answers, part.seconds) == (8, 2.0)
    assert part.processor == pytest.approx(0.8)
    assert timed.seconds == 0.25 * (12 + 9)
    timed.close()


def test_a_reward_without_calls_is_timed_by_its_answers() -> None:
    @dataclass(frozen=True)
    class Batch:
        def judge(self, answers: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
            return [Judgement(float(len(answers))) for _ in answers]

    timed = TimedReward(Batch())
    assert [mark.reward for mark in timed.judge(*answered(3))] == [3.0] * 3
    (part,) = timed.times()
    assert (part.name, part.unit, part.concurrency, part.answers) == ("the reward Batch", "waiting", 1, 3)


def test_the_rate_is_the_smaller_of_what_generates_and_what_the_window_grades() -> None:
    alone = RoundTime(136, STAGES, [PLAIN])
    assert alone.busy_seconds == pytest.approx(1.5)
    assert (alone.reward_seconds, alone.seconds, alone.rate) == (34.0, 34.0, 4.0)
    assert alone.sequential_seconds == pytest.approx(35.5)
    wide = replace(PLAIN, concurrency=64)
    assert RoundTime(136, STAGES, [wide]).rate == pytest.approx(136 / 1.5)
    narrow = replace(PLAIN, concurrency=8)
    # the window is the whole run's, generation is each searcher's
    assert [RoundTime(136, STAGES, [narrow], searchers).rate for searchers in (1, 4, 8)] == [32.0] * 3
    assert RoundTime(136, STAGES, [wide], 2).rate == pytest.approx(2 * 136 / 1.5)
    assert RoundTime(136, STAGES, [PLAIN], 3).rate == 12.0  # each searcher has a call at least
    slowest = [wide, replace(PLAIN, name="another", seconds=8.0, concurrency=64)]
    assert RoundTime(136, STAGES, slowest).rate == 64.0


def test_a_plain_function_that_waits_is_named_with_the_gain_of_more_calls_at_once() -> None:
    assert RoundTime(136, STAGES, [PLAIN]).advice() == [
        "reward function 'judge' takes 34 of a round's 34 s: it is a plain function called one at a time; if it may "
        "run in several threads at once, `concurrency=32` brings a round to about 1.5 s"
    ]
    (several,) = RoundTime(136, STAGES, [replace(PLAIN, concurrency=4)]).advice()
    assert "called in 4 threads at once; if what it asks takes as many, `concurrency=32` brings" in several
    (later,) = RoundTime(136, STAGES, [replace(PLAIN, concurrency=4, asynchronous=True)]).advice()
    assert "it is async, with 4 calls at once; if what it asks takes as many, `concurrency=32`" in later
    (batch,) = RoundTime(136, STAGES, [replace(PLAIN, unit="waiting")]).advice()
    assert "about all answers that wait" in batch
    (slow,) = RoundTime(136, STAGES, [replace(PLAIN, seconds=200.0)]).advice()
    assert f"`concurrency={MOST_CALLS}` brings a round to about 13 s" in slow
    (widest,) = RoundTime(136, STAGES, [replace(PLAIN, seconds=200.0, concurrency=MOST_CALLS)]).advice()
    assert f"waited for with {MOST_CALLS} calls at once: make it faster" in widest


def test_nothing_is_said_of_a_reward_that_is_a_small_share_or_keeps_up() -> None:
    for part in (replace(PLAIN, seconds=0.001), replace(PLAIN, concurrency=32), replace(PLAIN, seconds=0.1)):
        assert RoundTime(136, STAGES, [part]).advice() == []
    assert RoundTime(136, STAGES, []).advice() == []


def test_threads_are_not_advised_for_a_reward_that_computes() -> None:
    computing = replace(PLAIN, processor=1.9)
    slow = RoundTime(136, STAGES, [computing])
    assert slow.busy_seconds == pytest.approx(1.5 + 136 * 1.9 / 8)
    (line,) = slow.advice()
    assert "it computes: of its threads one computes at a time, so that `concurrency` would not help" in line
    assert RoundTime(136, STAGES, [replace(computing, concurrency=64)]).rate == pytest.approx(136 / slow.busy_seconds)
    assert RoundTime(136, STAGES, [replace(computing, seconds=0.01, processor=0.01)]).advice() == []


def test_the_stages_of_a_round_are_named_with_their_seconds() -> None:
    assert RoundTime(136, STAGES, [PLAIN]).facts() == "generation 1.2 s, reference 0.3 s, reward 34 s"
    wide = RoundTime(136, STAGES | {"environment": 2.0}, [replace(PLAIN, concurrency=64)])
    assert wide.facts() == "generation 1.2 s, environment 2 s, reference 0.3 s, reward 34 s (64 calls at once: 0.531 s)"
