"""Sums as MATH asks and marks them."""

from __future__ import annotations

import numpy as np
import pytest

from tba.errors import UserError
from tba.protocols import Task
from tba.rewards.math_text import last_boxed
from tba.types import Completion, Prompt, StopReason, Version
from tba_lab.boxed_sums import BoxedSums

TASK = BoxedSums(train_problems=200, eval_problems=50)


def test_demonstrations_work_the_sum_out_and_box_it() -> None:
    task: Task = TASK
    for problem in task.problems("train"):
        question = str(problem.prompt)
        a, b = map(int, question.removeprefix("What is $").removesuffix("$?").split("+"))
        assert problem.fields["answer"] == str(a + b)
        assert problem.demonstration == f"{str(a + b)[::-1]} \\boxed{{{a + b}}}"


def test_careless_demonstrations_box_what_they_worked_out_and_the_answer_stays_right() -> None:
    careless = BoxedSums(train_problems=200, eval_problems=50, forgotten_carries=1.0).problems("train")
    right = TASK.problems("train")
    assert [p.fields for p in careless] == [p.fields for p in right]
    wrong_count = 0
    for problem in careless:
        digits, _, box = str(problem.demonstration).partition(" ")
        assert last_boxed(box) == digits[::-1]
        wrong_count += digits[::-1] != problem.fields["answer"]
    assert 100 < wrong_count < 200  # most sums of three digits have a carry


def test_only_the_box_counts_and_its_spelling_does_not() -> None:
    pytest.importorskip("math_verify", reason="needs the package math-verify (the extra tba[math])")
    problem = TASK.problems("eval")[0]
    answer = str(problem.fields["answer"])
    tokens = np.array([1], dtype=np.int32)
    prompt = Prompt(TASK.name, tokens, str(problem.prompt), problem.fields)
    texts = {
        f"\\boxed{{{answer}}}": 1.0,
        f"0 \\boxed{{{answer}.0}}": 1.0,
        answer: 0.0,
        f"{answer} \\boxed{{{int(answer) + 1}}}": 0.0,
    }
    reward = TASK.reward()
    marks = reward.judge([(prompt, Completion(tokens, t, StopReason.EOS, (Version(), Version()))) for t in texts])
    reward.close()
    assert [mark.reward for mark in marks] == list(texts.values())


def test_what_arithmetic_refuses_is_refused() -> None:
    with pytest.raises(UserError, match="give a number from 1 to 9"):
        BoxedSums(digits=0)
