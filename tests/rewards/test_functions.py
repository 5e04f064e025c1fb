"""Rewards made of plain functions: what they are given, what they may give back, and how several are weighed."""

import functools
import math
import threading
from collections.abc import Callable

import numpy as np
import pytest

from tba.errors import DeadlineExceeded, UserError
from tba.rewards.delayed import Delayed
from tba.rewards.end_of_text import EosPenalty
from tba.rewards.exact_answer import ExactAnswer, ExactText
from tba.rewards.functions import FunctionReward, WeightedFunctions
from tba.types import Completion, Prompt, StopReason, Version


def completion(text: str, stop_reason: StopReason = StopReason.EOS) -> Completion:
    return Completion(np.array([1], dtype=np.int32), text, stop_reason, (Version(), Version()))


def prompt(token: int = 1, **fields: object) -> Prompt:
    return Prompt("sums", np.array([token], dtype=np.int32), f"text {token}", fields)


def right(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)


def length(prompt: str, completion: str) -> int:
    return len(completion)


def test_the_reward_is_the_weighted_sum_and_its_parts_are_the_unweighted_values() -> None:
    reward = WeightedFunctions(((right, 2.0), (length, -0.25)))
    first, second = reward.judge([(prompt(answer="72"), completion("72")), (prompt(answer="5"), completion("abcd"))])
    assert (first.reward, first.parts) == (1.5, {"right": 1.0, "length": 2.0})
    assert (second.reward, second.parts) == (-1.0, {"right": 0.0, "length": 4.0})


def test_a_function_gets_the_texts_and_the_fields_its_signature_names() -> None:
    seen = []

    def named(prompt: str, completion: str, answer: str, unit: str = "km") -> float:
        seen.append((prompt, completion, answer, unit))
        return 0.0

    FunctionReward(named).judge([(prompt(7, answer="1", other=2), completion("x"))])
    assert seen == [("text 7", "x", "1", "km")]


def test_a_function_with_double_starred_fields_gets_all_of_them() -> None:
    seen = []

    def everything(prompt: str, completion: str, **fields: object) -> float:
        seen.append(fields)
        return 0.0

    FunctionReward(everything).judge([(prompt(answer="1", other=2, prompt="no", completion="no"), completion("x"))])
    assert seen == [{"answer": "1", "other": 2}]


def test_partials_and_callable_objects_are_functions_too() -> None:
    class Longer:
        def __call__(self, prompt: str, completion: str, than: int) -> bool:
            return len(completion) > than

    reward = WeightedFunctions(((functools.partial(right, answer="ab"), 1.0), (Longer(), 1.0)))
    (judged,) = reward.judge([(prompt(than=1), completion("ab"))])
    assert (judged.reward, judged.parts) == (2.0, {"right": 1.0, "Longer": 1.0})


@pytest.mark.parametrize("value", [1, True, 0.5, np.float32(0.5), np.int64(3), np.bool_(True)])
def test_every_finite_number_is_a_reward(value: float) -> None:
    (judged,) = FunctionReward(lambda prompt, completion: value).judge([(prompt(), completion("x"))])
    assert judged.reward == float(value)
    assert type(judged.reward) is float


@pytest.mark.parametrize("value", [None, "1", math.nan, math.inf, np.float32("nan"), 1j, [1.0]])
def test_anything_else_names_the_function_and_the_prompt(value: object) -> None:
    def broken(prompt: str, completion: str) -> object:
        return value

    asked = prompt()
    with pytest.raises(UserError, match=rf"'broken' gave .* for prompt {asked.key} of task sums: return a finite"):
        FunctionReward(broken).judge([(asked, completion("x"))])


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_function_that_raises_is_named_with_the_prompt_and_its_own_error(concurrency: int) -> None:
    def divides(prompt: str, completion: str) -> float:
        return 1 / len(completion)

    good, bad = prompt(1), prompt(2)
    said = r"'divides' failed on the answer '' to prompt 'text 2' of task sums: ZeroDivision.*return 1 / len"
    with pytest.raises(UserError, match=said) as caught:
        FunctionReward(divides, concurrency).judge([(good, completion("x")), (bad, completion(""))])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_missing_field_is_named_with_those_that_are_there() -> None:
    with pytest.raises(UserError, match=r"'right' asks for the field 'answer', which prompt .* it has question$"):
        FunctionReward(right).judge([(prompt(question="?"), completion("x"))])


def test_a_function_of_one_text_is_refused() -> None:
    with pytest.raises(UserError, match="'<lambda>' takes 1 positional arguments: write it as"):
        FunctionReward(lambda completion: 1.0).judge([(prompt(), completion("x"))])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: WeightedFunctions(()), "needs at least one"),
        (lambda: WeightedFunctions(((right, 1.0), (right, 2.0))), "both named 'right'"),
        (lambda: WeightedFunctions(((right, math.nan),)), "'right' has weight nan"),
        (lambda: FunctionReward(right, concurrency=0), "concurrency 0: give the number of calls at once"),
        (lambda: FunctionReward(right, deadline_seconds=0), "deadline_seconds 0: give seconds above 0"),
        (lambda: Delayed(ExactText(), seconds=-1), "seconds -1: give the seconds of one answer"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_where_it_is_made(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_judgements_keep_their_order_at_any_concurrency(concurrency: int) -> None:
    answered = [(prompt(i), completion("x" * i)) for i in range(20)]
    assert [j.reward for j in FunctionReward(length, concurrency).judge(answered)] == list(range(20))


def test_no_answers_give_no_judgements() -> None:
    assert FunctionReward(length, 4).judge([]) == []
    assert EosPenalty(ExactText()).judge([]) == []
    assert Delayed(ExactText()).judge([]) == []


def test_as_many_calls_as_the_concurrency_wait_at_once() -> None:
    meeting = threading.Barrier(4, timeout=30)  # breaks, and with it the test, unless four calls are in it together

    def meets(prompt: str, completion: str) -> float:
        return float(meeting.wait() >= 0)

    answered = [(prompt(i), completion("x")) for i in range(8)]
    assert [j.reward for j in FunctionReward(meets, concurrency=4).judge(answered)] == [1.0] * 8


def test_never_more_calls_than_the_concurrency_run_at_once() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def counted(prompt: str, completion: str) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1
        return 0.0

    FunctionReward(counted, concurrency=3).judge([(prompt(i), completion("x")) for i in range(200)])
    assert 1 <= most <= 3


def test_a_call_that_never_returns_ends_at_the_deadline_with_its_name() -> None:
    released = threading.Event()

    def hangs(prompt: str, completion: str) -> float:
        released.wait()
        return 0.0

    asked = [(prompt(i), completion("x")) for i in range(3)]
    try:
        with pytest.raises(DeadlineExceeded, match=f"'hangs' on prompt {asked[0][0].key}: 3 of 3 calls are unfinished"):
            FunctionReward(hangs, concurrency=2, deadline_seconds=0.05).judge(asked)
    finally:
        released.set()


def test_a_truncated_completion_gets_the_penalty_in_place_of_its_reward() -> None:
    answered = [
        (prompt(answer="72"), completion("72")),
        (prompt(answer="72"), completion("72", StopReason.LENGTH)),
        (prompt(answer="72"), completion("71", StopReason.STOP_STRING)),
    ]
    judged = EosPenalty(ExactAnswer(), penalty=-1.0).judge(answered)
    assert [j.reward for j in judged] == [1.0, -1.0, 0.0]
    assert [j.parts["truncated"] for j in judged] == [0.0, 1.0, 0.0]


def test_a_truncated_completion_is_not_shown_to_the_inner_reward() -> None:
    seen = []

    def watched(prompt: str, completion: str) -> float:
        seen.append(completion)
        return 0.5

    answered = [(prompt(), completion("cut", StopReason.LENGTH)), (prompt(), completion("whole"))]
    second = EosPenalty(FunctionReward(watched)).judge(answered)[1]
    assert seen == ["whole"]
    assert second.parts == {"watched": 0.5, "truncated": 0.0}


@pytest.mark.parametrize("concurrency", [1, 16])
def test_a_delayed_reward_judges_as_its_inner_reward(concurrency: int) -> None:
    answered = [(prompt(i, answer=str(i % 3)), completion("1")) for i in range(40)]
    delayed = Delayed(ExactText(), seconds=0.0, concurrency=concurrency)
    assert delayed.judge(answered) == ExactText().judge(answered)


def test_a_delayed_reward_waits_once_for_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("tba.rewards.delayed.time.sleep", slept.append)
    Delayed(ExactText(), seconds=0.2, concurrency=2).judge([(prompt(i, answer="1"), completion("1")) for i in range(5)])
    assert slept == [0.2] * 5


def test_exact_text_wants_every_character() -> None:
    answered = [(prompt(answer="3201"), completion(text)) for text in ("3201", "3201 ", "03201", "320", "")]
    assert [j.reward for j in ExactText().judge(answered)] == [1.0, 0.0, 0.0, 0.0, 0.0]
