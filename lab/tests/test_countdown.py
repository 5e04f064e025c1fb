"""Countdown: its problems and all their right answers, by counting them another way."""

import ast
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.errors import UserError
from tba.protocols import Task
from tba.tasks.held_out import is_held_out
from tba.types import Completion, Problem, Prompt, StopReason, Version
from tba_lab.countdown import Countdown, value_of

SMALL = Countdown(digits=4, least_answers=12, train_problems=300, eval_problems=100)


def answers(problem: Problem, operations: str) -> set[str]:
    """All right answers, by trying every text."""
    digits, target = problem.fields["digits"], problem.fields["target"]
    texts = {
        "".join(itertools.chain(*zip(order, (*joined, ""), strict=True)))
        for order in itertools.permutations(digits)
        for joined in itertools.product(operations, repeat=len(digits) - 1)
    }
    return {text for text in texts if value_of(text) == target}


def rewards_of(task: Countdown, problem: Problem, texts: list[str]) -> list[float]:
    tokens = np.array([1], dtype=np.int32)
    prompt = Prompt(task.name, tokens, str(problem.prompt), problem.fields)
    completions = [Completion(tokens, text, StopReason.EOS, (Version(), Version())) for text in texts]
    return [mark.reward for mark in task.reward().judge([(prompt, c) for c in completions])]


@pytest.mark.parametrize("operations", ["+-", "+-*"])
def test_every_problem_has_at_least_as_many_right_answers_as_asked_for_and_is_shown_one_of_them(
    operations: str,
) -> None:
    task = Countdown(4, operations, 12, train_problems=300, eval_problems=100)
    for problem in task.problems("eval")[:40]:
        right = answers(problem, operations)
        assert len(right) >= 12
        assert problem.demonstration in right
        assert problem.prompt == f"{problem.fields['digits']}={problem.fields['target']}:"


def test_the_two_splits_together_are_every_problem_and_share_none() -> None:
    texts = {
        f"{a}{b}={value}"
        for a, b in itertools.combinations_with_replacement(range(1, 10), 2)
        for value in (a + b, b - a)
        if 1 <= value <= 9
    }
    held_out = {problem for problem in texts if is_held_out(problem, 0.3)}
    task = Countdown(2, "+-", 1, 9, train_problems=len(texts - held_out), eval_problems=len(held_out), held_out=0.3)
    assert {str(p.prompt).removesuffix(":") for p in task.problems("eval")} == held_out
    assert {str(p.prompt).removesuffix(":") for p in task.problems("train")} == texts - held_out


def test_a_text_that_two_equal_digits_give_twice_is_one_answer() -> None:
    two = Countdown(2, "+", least_answers=2, largest_target=4, train_problems=1, eval_problems=1, held_out=0.01)
    assert {p.prompt for p in replace(two, train_problems=2).problems("train")} == {"12=3:", "13=4:"}  # and not 22=4


def test_demonstrations_are_spread_evenly_over_the_right_answers() -> None:
    task = Countdown(3, "+", 6, 99, train_problems=60, eval_problems=1)
    prompt = next(p.prompt for p in task.problems("train"))
    counts = Counter(
        str(p.demonstration)
        for seed in range(120)
        for p in replace(task, seed=seed).problems("train")
        if p.prompt == prompt
    )
    expected = sum(counts.values()) / 6
    assert set(counts) == {"+".join(order) for order in itertools.permutations(str(prompt)[:3])}
    assert expected >= 10
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 20.5  # 1 in 1000 of chi squared, 5


def test_wrong_operations_come_at_the_rate_asked_for_and_the_reward_stays_right() -> None:
    task = Countdown(4, least_answers=6, train_problems=2000, eval_problems=1, wrong_operations=0.3)
    problems = task.problems("train")
    marks = [rewards_of(task, p, [str(p.demonstration)])[0] for p in problems]
    assert abs(marks.count(0.0) - 600) < 4 * (2000 * 0.3 * 0.7) ** 0.5  # four standard deviations
    assert all(sorted(str(p.demonstration)[::2]) == sorted(p.fields["digits"]) for p in problems)


def test_the_same_seed_gives_the_same_problems_and_another_seed_others() -> None:
    assert SMALL.problems("eval") == SMALL.problems("eval")
    assert SMALL.problems("eval") != replace(SMALL, seed=1).problems("eval")


def test_an_answer_is_right_when_it_uses_each_digit_once_and_reaches_the_target() -> None:
    task, problem = Countdown(digits=4, operations="+-*"), Problem("", {"digits": "2357", "target": 11})
    right = ["7+5+2-3", "5-3+7+2", "3*7-2*5"]
    wrong = [
        *("7+5+2+3", "7+5-2*3", "7+4", "7+5+2-3+0", "11", "", "+7+5+2-3", "7+5+2-", "7+5+2-3 ", "(7+5)+2-3"),
        *("7+5+2--3", "7/5+2+3", "9**9**9**9", "__import__('os')"),
    ]
    assert rewards_of(task, problem, right) == [1.0, 1.0, 1.0]
    assert rewards_of(task, problem, wrong) == [0.0] * len(wrong)
    assert rewards_of(replace(task, operations="+-"), problem, ["7+5+2-3", "3*7-2*5"]) == [1.0, 0.0]
    assert isinstance(task, Task)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_the_value_of_an_expression_is_pythons(digits: list[int], data: st.DataObject) -> None:
    operations = data.draw(st.lists(st.sampled_from("+-*"), min_size=len(digits) - 1, max_size=len(digits) - 1))
    text = "".join(f"{d}{o}" for d, o in zip(digits, [*operations, ""], strict=True))
    assert value_of(text) == ast_value(ast.parse(text, mode="eval").body)


def ast_value(node: ast.expr) -> int:
    """By Python's own parser, so that precedence is not ours."""
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return node.value
    assert isinstance(node, ast.BinOp)
    a, b = ast_value(node.left), ast_value(node.right)
    return {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}[type(node.op)]


def test_a_prompt_without_digits_and_target_is_refused() -> None:
    with pytest.raises(UserError, match="has no field 'digits'"):
        rewards_of(SMALL, Problem("", {}), ["1+2"])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Countdown(digits=1), "digits 1: give a number from 2 to 5"),
        (lambda: Countdown(operations="+/"), "operations '\\+/': give each of"),
        (lambda: Countdown(least_answers=0), "least_answers 0: give at least 1"),
        (lambda: Countdown(held_out=0.0), "held_out is 0.0: give the share"),
        (lambda: Countdown(operations="+", wrong_operations=0.5), "give a share from 0 to 1, and two operations"),
        (lambda: Countdown(digits=2).problems("train"), "countdown has only 0 train problems"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()
