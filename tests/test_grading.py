"""The window of calls: every answer comes back once, whatever the calls about others do."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tba.errors import PartFailed, UserError
from tba.grading import MAX_ABANDONED, Grade, Grader, searcher_limit
from tba.protocols import GradingCalls
from tba.rewards.functions import FunctionReward, WeightedFunctions
from tba.types import Completion, Judgement, Prompt, StopReason, Version

LONG = 30.0  # seconds for what happens at once


def completion(text: str) -> Completion:
    return Completion(np.array([1], np.int32), text, StopReason.EOS, (Version(), Version()))


def prompt(token: int) -> Prompt:
    return Prompt("sums", np.array([token], np.int32), f"text {token}")


def answers(count: int, each: int = 4) -> list[tuple[Prompt, Completion]]:
    return [(prompt(i // each), completion("x" * i)) for i in range(count)]


def rewards(judgements: Sequence[Judgement]) -> list[float]:
    return [judgement.reward for judgement in judgements]


def length(completion: str) -> float:
    return float(len(completion))


def batch(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


async def later(completion: str) -> float:
    await asyncio.sleep(0)
    return float(len(completion))


def test_as_many_calls_as_the_concurrency_are_under_way_at_once_and_never_more() -> None:
    meeting = threading.Barrier(4, timeout=LONG)  # breaks, and with it the test, unless four calls are in it together
    running, most, lock = 0, 0, threading.Lock()

    def meets(completion: str) -> float:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        meeting.wait()
        with lock:
            running -= 1
        return 1.0

    assert rewards(Grader(FunctionReward(meets, concurrency=4)).judge(answers(32))) == [1.0] * 32
    assert most == 4


def test_parts_of_every_kind_are_called_side_by_side_and_add_up() -> None:
    reward = WeightedFunctions(((length, 1.0), (batch, 10.0), (later, 100.0)), concurrency=3)
    judged = Grader(reward).judge(answers(20))
    assert rewards(judged) == [111.0 * i for i in range(20)]
    assert judged[7].parts == {"length": 7.0, "batch": 7.0, "later": 7.0}
    assert judged == reward.judge(answers(20))


class ByGroup:
    """A reward of whole groups, which says how many answers each call got."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def calls(self) -> list[GradingCalls]:
        return [GradingCalls("the groups", self.grade, "group", 2)]

    def judgement(self, values: Sequence[float]) -> Judgement:
        return Judgement(values[0])

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        return [Judgement(value) for value in self.grade(answered)]

    def grade(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[float]:
        assert len({prompt.key for prompt, _ in answered}) == 1
        self.sizes.append(len(answered))
        return [float(len(completion.text)) for _, completion in answered]


def test_a_call_gets_one_answer_a_group_or_all_that_wait() -> None:
    groups = ByGroup()
    assert rewards(Grader(groups).judge(answers(12))) == list(range(12))
    assert groups.sizes == [4, 4, 4]
    sizes: list[int] = []

    def seen(completions: list[str]) -> list[float]:
        sizes.append(len(completions))
        return batch(completions)

    assert rewards(Grader(FunctionReward(seen)).judge(answers(12))) == list(range(12))
    assert sizes == [12]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_answer_whose_call_hangs_comes_back_without_a_judgement_and_holds_up_no_other(asynchronous: bool) -> None:
    released = threading.Event()

    def hangs(completion: str) -> float:
        if completion == "xx":
            released.wait(LONG)
        return float(len(completion))

    async def hangs_later(completion: str) -> float:
        if completion == "xx":
            await asyncio.sleep(LONG)
        return float(len(completion))

    grader = Grader(FunctionReward(hangs_later if asynchronous else hangs, concurrency=2), deadline=1.0)
    finished: list[Grade] = []
    (grades,) = grader.submit([(prompt(0), [completion("x" * i) for i in range(6)])], finished)
    while len(finished) < 5:
        grader.wait(LONG)
    assert {len(grade.completion.text) for grade in finished[:5]} >= {0, 1, 3}
    while len(finished) < 6:
        grader.wait(LONG)
    released.set()
    assert [grade.has_expired for grade in grades] == [False, False, True, False, False, False]
    assert [None if g.judgement is None else g.judgement.reward for g in grades] == [0.0, 1.0, None, 3.0, 4.0, 5.0]
    assert grader.unfinished_count == 0
    grader.poll()
    assert len(finished) == 6  # what it gave later is dropped


def test_a_call_that_raises_is_repeated_alone_and_what_it_raises_last_is_raised_after_all_others_came_back() -> None:
    calls: Counter[str] = Counter()

    def unsteady(completion: str) -> float:
        calls[completion] += 1
        if completion == "x" and calls[completion] < 3:
            raise OSError("not now")
        return float(len(completion))

    reports: list[str] = []
    grader = Grader(FunctionReward(unsteady, concurrency=8), report=reports.append)
    assert rewards(grader.judge(answers(4))) == [0.0, 1.0, 2.0, 3.0]
    assert calls == {"": 1, "x": 3, "xx": 1, "xxx": 1}
    assert len(reports) == 2
    assert "OSError: not now" in reports[0]

    def broken(completion: str) -> float:
        if completion == "x":
            raise OSError("never")
        return float(len(completion))

    grader, finished = Grader(FunctionReward(broken), retries=0), list[Grade]()
    grader.submit([(prompt(0), [completion("x" * i) for i in range(4)])], finished)

    def to_the_end() -> None:
        while grader.unfinished_count:
            grader.wait(LONG)

    with pytest.raises(UserError, match="OSError: never"):
        to_the_end()
    assert sorted(len(grade.completion.text) for grade in finished) == [0, 2, 3]


@pytest.mark.parametrize("plain", [False, True])
def test_a_reward_gets_copies_so_that_no_call_sees_what_another_has_changed(plain: bool) -> None:
    class Pops:
        """A reward that takes what it reads out of a field, as a class with `calls` or with `judge` alone."""

        def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
            return [Judgement(float(prompt.fields["values"].pop())) for prompt, _ in answered]

    class PopsByCalls(Pops):
        def calls(self) -> list[GradingCalls]:
            return [GradingCalls("the pops", self.judge, "answer", 2)]

        def judgement(self, values: Sequence[Judgement]) -> Judgement:
            return values[0]

    asked = Prompt("sums", np.array([1], np.int32), "text", {"values": [1, 2]})
    grader = Grader(Pops() if plain else PopsByCalls())
    for _ in range(3):
        assert rewards(grader.judge([(asked, completion("x"))])) == [2.0]
    assert asked.fields == {"values": [1, 2]}


def test_bad_input_is_not_asked_again() -> None:
    calls: list[int] = []

    class Wrong:
        def judge(self, answered: Any) -> Any:
            calls.append(1)
            raise UserError("the answer key has no such problem")

    with pytest.raises(UserError, match="no such problem"):
        Grader(Wrong()).judge(answers(1))
    assert calls == [1]


def test_threads_that_hang_are_bounded_and_then_calls_go_to_processes() -> None:
    released = threading.Event()

    def hangs(completion: str) -> float:
        released.wait(LONG)
        return 0.0

    class Process:
        """Stands for a process that answers at once; what it is made of is tested in `runtime/test_isolation.py`."""

        def grade(self, answered: Sequence[tuple[Prompt, Completion]], part: int | None = None) -> list[float]:
            assert part == 0
            return [float(len(completion.text)) for _, completion in answered]

        def close(self) -> None:
            pass

    count = 8 * MAX_ABANDONED
    try:
        grader = Grader(FunctionReward(hangs, concurrency=MAX_ABANDONED + 1), deadline=0.05, isolate=Process)
        judged = grader.judge(answers(count))
        alone = Grader(FunctionReward(hangs, concurrency=MAX_ABANDONED + 1), deadline=0.05)
        with pytest.raises(
            PartFailed, match=r"has to run in processes of its own, but cannot here \(\d+ of its calls hang"
        ):
            alone.judge(answers(count))
    finally:
        released.set()
    hung = sum(math.isnan(judgement.reward) for judgement in judged)
    assert MAX_ABANDONED < hung < count
    assert all(judgement.reward in (i, math.nan) or math.isnan(judgement.reward) for i, judgement in enumerate(judged))


@pytest.mark.parametrize(("limit", "count"), [(1, 3), (7, 3), (256, 7), (2, 2)])
def test_searchers_share_the_calls_of_a_run_and_each_has_at_least_one(limit: int, count: int) -> None:
    shares = [searcher_limit(limit, index, count) for index in range(count)]
    assert sum(shares) == max(limit, count)
    assert max(shares) - min(shares) <= 1


def test_evaluations_go_before_what_waits() -> None:
    released, order = threading.Event(), list[str]()

    def noted(completion: str) -> float:
        if not order:
            order.append(completion)
            released.wait(LONG)
        else:
            order.append(completion)
        return 0.0

    grader, finished = Grader(FunctionReward(noted)), list[Grade]()
    grader.submit([(prompt(0), [completion(f"training {i}") for i in range(3)])], finished)
    threading.Timer(0.1, released.set).start()
    grader.judge([(prompt(1), completion("held out"))])
    while len(finished) < 3:
        grader.wait(LONG)
    assert order.index("held out") <= 1


@pytest.mark.parametrize("make", [functools.partial(FunctionReward, length), functools.partial(FunctionReward, batch)])
def test_no_answers_give_no_judgements_and_a_closed_grader_has_no_threads(make: Callable[[], FunctionReward]) -> None:
    before = set(threading.enumerate())
    grader = Grader(make())
    assert grader.judge([]) == []
    grader.judge(answers(3))
    (thread,) = set(threading.enumerate()) - before
    grader.close()
    thread.join(LONG)
    assert not thread.is_alive()
