"""Rewards made of plain functions: what they are given, what they may give back, and how several are weighed."""

import argparse
import asyncio
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tba.errors import UserError
from tba.grading import Grader
from tba.protocols import Reward
from tba.rewards.exact_answer import ExactAnswer, ExactText
from tba.rewards.functions import FunctionReward, WeightedFunctions, check_fields
from tba.types import Completion, Judgement, Problem, Prompt, StopReason, Version


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


@pytest.mark.parametrize("value", ["1", math.nan, 10**400, {}, {"value": 1.0}, math.inf, np.float32("nan"), 1j, [1.0]])
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


def test_parameters_are_matched_by_name_in_any_order() -> None:
    def reversed_(completion: str, prompt: str) -> float:
        return float((prompt, completion) == ("text 1", "x"))

    def one(completion: str, answer: str) -> float:
        return float((completion, answer) == ("x", "72"))

    def of_others(response: str, ground_truth: str) -> float:
        return float((response, ground_truth) == ("x", "72"))

    def with_default(solution_str: str, answer: str, prompt: str | None = None) -> float:
        return float((solution_str, answer, prompt) == ("x", "72", "text 1"))

    def alone(completion: str, /) -> float:
        return float(completion == "x")

    def spoken(messages: list[dict[str, str]]) -> float:
        return float(messages == [{"role": "user", "content": "text 1"}, {"role": "assistant", "content": "x"}])

    functions = (reversed_, one, of_others, with_default, alone, spoken)
    (judged,) = WeightedFunctions(tuple((f, 1.0) for f in functions)).judge([(prompt(answer="72"), completion("x"))])
    assert judged.parts == {f.__name__: 1.0 for f in functions}


CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"})


def test_trls_list_form_gets_a_batch_with_its_columns_and_message_lists_for_chats() -> None:
    seen: list[object] = []

    def trl(prompts: list[object], completions: list[object], **kwargs: object) -> list[float | None]:
        seen.append((prompts, completions, kwargs))
        return [float(i) for i in range(len(completions))]

    texts = [(prompt(1, answer="a", level=1), completion("x")), (prompt(2, answer="b"), completion("y"))]
    assert [j.reward for j in FunctionReward(trl).judge(texts)] == [0.0, 1.0]
    assert seen.pop() == (["text 1", "text 2"], ["x", "y"], {"answer": ["a", "b"], "level": [1, None]})

    chat = (replace(prompt(answer="2"), messages=CHAT), completion("x"))
    FunctionReward(trl).judge([chat])
    said = {"role": "assistant", "content": "x"}
    assert seen == [([list(CHAT)], [[said]], {"answer": ["2"]})]

    def spoken(messages: list[dict[str, str]]) -> float:
        return float(messages == [*CHAT, said])

    assert FunctionReward(spoken).judge([chat])[0].reward == 1.0


def test_verls_form_gets_its_four_arguments_and_may_give_a_score() -> None:
    seen: list[object] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> object:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": 0.5, "acc": True}

    own = prompt(data_source="gsm8k", reward_model={"ground_truth": "72", "style": "rule"}, extra_info={"index": 3})
    judged = FunctionReward(compute_score).judge([(own, completion("x")), (prompt(answer="5"), completion("y"))])
    assert [j.reward for j in judged] == [0.5, 0.5]
    assert seen == [("gsm8k", "x", "72", {"index": 3}), ("sums", "y", "5", {})]


def test_a_batch_that_gives_too_few_rewards_is_refused() -> None:
    def few(completions: list[str]) -> list[float]:
        return [1.0]

    asked = [(prompt(i), completion("x")) for i in range(3)]
    with pytest.raises(
        UserError, match="'few' gave 1 rewards for 3 answers: since it takes 'completions', return a list"
    ):
        FunctionReward(few).judge(asked)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_async_functions_are_awaited_at_most_so_many_at_once(concurrency: int) -> None:
    running, most = 0, 0

    async def slow(prompt: str, completion: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return float(len(completion))

    async def together(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    asked = [(prompt(i), completion("x" * i)) for i in range(9)]
    for function in (slow, together, lambda completion: slow("", completion)):
        reward = FunctionReward(function, concurrency)
        for judged in (Grader(reward).judge(asked), reward.judge(asked)):
            assert [j.reward for j in judged] == list(range(9))
    assert most == concurrency


def test_none_abstains_and_is_counted() -> None:
    def unsure(completion: str) -> float | None:
        return None if completion == "?" else 1.0

    asked = [(prompt(), completion("?")), (prompt(), completion("abc"))]
    first, second = WeightedFunctions(((unsure, 2.0), (length, 1.0))).judge(asked)
    assert (first.reward, first.parts) == (1.0, {"length": 1.0, "abstained": 1.0})
    assert (second.reward, second.parts) == (5.0, {"unsure": 1.0, "length": 3.0})
    assert FunctionReward(unsure).judge(asked[:1])[0].reward == 0.0


def test_a_function_that_exits_has_failed_like_any_other() -> None:
    def parses(completion: str) -> float:
        argparse.ArgumentParser(exit_on_error=True).parse_args(["--unknown"])
        return 1.0

    def exits(completions: list[str]) -> list[float]:
        sys.exit("enough")

    async def exits_later(completion: str) -> float:
        sys.exit(3)

    for function, said in ((parses, "SystemExit: 2"), (exits, "SystemExit: enough"), (exits_later, "SystemExit: 3")):
        with pytest.raises(UserError, match=rf"'{function.__name__}' failed on the answer 'x' .*{said}") as caught:
            FunctionReward(function).judge([(prompt(), completion("x"))])
        assert isinstance(caught.value.__cause__, SystemExit)


@pytest.mark.parametrize(
    "function", [lambda a, b: 1.0, lambda prompt, answer: 1.0, lambda *texts: 1.0, lambda: 1.0, max]
)
def test_a_function_that_does_not_say_which_is_the_answer_is_refused_where_it_is_made(
    function: Callable[..., float],
) -> None:
    with pytest.raises(UserError, match=r"write it as \(prompt, completion, \*\*fields\) -> float"):
        FunctionReward(function)


@dataclass(frozen=True)
class Around:
    """A reward around another."""

    reward: Reward

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        return [Judgement(-j.reward) for j in self.reward.judge(answered)]


def test_fields_are_checked_before_a_run() -> None:
    with pytest.raises(UserError, match=r"'right' asks for the field 'answer', which problem 0 of task t "):
        check_fields(FunctionReward(right), [Problem("?", {"question": "?"})], "t")
    good = Problem("?", {"answer": "1"})
    check_fields(FunctionReward(right), [good], "t")
    check_fields(ExactAnswer(), [Problem("?")], "t")
    for wrapped in (Around(FunctionReward(right)), Around(Around(WeightedFunctions(((right, 1.0),))))):
        check_fields(wrapped, [good], "t")
        with pytest.raises(UserError, match="asks for the field 'answer', which problem 1 of task t does not have"):
            check_fields(wrapped, [good, Problem("?")], "t")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: WeightedFunctions(()), "needs at least one"),
        (lambda: WeightedFunctions(((right, 1.0), (right, 2.0))), "both named 'right'"),
        (lambda: WeightedFunctions(((right, math.nan),)), "'right' has weight nan"),
        (lambda: FunctionReward(right, concurrency=0), "concurrency 0: give 1 or more calls at once"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_where_it_is_made(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_judgements_keep_their_order_at_any_concurrency(concurrency: int) -> None:
    answered = [(prompt(i), completion("x" * i)) for i in range(20)]
    assert [j.reward for j in Grader(FunctionReward(length, concurrency)).judge(answered)] == list(range(20))


def test_no_answers_give_no_judgements() -> None:
    assert FunctionReward(length, 4).judge([]) == Grader(FunctionReward(length, 4)).judge([]) == []


def test_exact_text_wants_every_character() -> None:
    answered = [(prompt(answer="3201"), completion(text)) for text in ("3201", "3201 ", "03201", "320", "")]
    assert [j.reward for j in ExactText().judge(answered)] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_function_that_never_gives_a_number_has_forgotten_to_return_one() -> None:
    def forgets(completion: str) -> None:
        float(completion == "x")

    with pytest.raises(UserError, match="'forgets' gave None for all 2 answers: return numbers"):
        FunctionReward(forgets).judge([(prompt(), completion("x")), (prompt(), completion("y"))])
