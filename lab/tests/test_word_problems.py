"""The task `word_problems`: its sums are right, and nothing is shared by training and evaluation."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from tba.errors import UserError
from tba.rewards.exact_answer import grade
from tba.types import Problem
from tba_lab.word_problems import TEMPLATES, WordProblems, held_out

EVALUATED = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}


def of_templates(problems: list[Problem]) -> set[str]:
    patterns = {t.text: re.compile(re.sub(r"\\\{[^}]*\\\}", "[^ ]+", re.escape(t.text))) for t in TEMPLATES}
    return {text for p in problems for text, like in patterns.items() if like.fullmatch(str(p.fields["question"]))}


def test_training_and_evaluation_share_no_problem_and_the_held_out_templates_are_never_trained() -> None:
    train, evaluation = WordProblems().problems("train"), WordProblems().problems("eval")
    other_templates = WordProblems(templates="held_out").problems("eval")
    assert (len(train), len(evaluation), len(other_templates)) == (4000, 1000, 1000)
    questions = [{p.fields["question"] for p in part} for part in (train, evaluation, other_templates)]
    assert [len(part) for part in questions] == [4000, 1000, 1000]
    assert not questions[0] & (questions[1] | questions[2])
    assert of_templates(other_templates) == held_out()
    assert of_templates(train) == of_templates(evaluation) == {t.text for t in TEMPLATES} - held_out()
    assert len(TEMPLATES) == 36
    assert len(held_out()) == 10


@pytest.mark.parametrize("largest", [10, 30, 500])
def test_every_worked_answer_is_arithmetic_and_ends_with_the_answer(largest: int) -> None:
    task = WordProblems(largest=largest, train_problems=1500, eval_problems=300)
    every = task.problems("train") + WordProblems("held_out", largest, eval_problems=300).problems("eval")
    for problem in every:
        worked, answer = str(problem.demonstration), str(problem.fields["answer"])
        for line in worked.split(", "):
            a, operation, b, _, result = line.split()
            assert EVALUATED[operation](Fraction(a), Fraction(b)) == Fraction(result), worked
        assert grade(worked, answer)
        assert not grade(worked, str(int(answer) + 1))
        numbers = re.findall(r"-?[0-9]+", str(problem.fields["question"]))
        assert all(int(number) > 1 for number in numbers), problem


def test_what_it_cannot_be_is_one_sentence() -> None:
    with pytest.raises(UserError, match="largest 9 and seed 0: give at least 1 of each, 10 to 1,000,000 and a seed"):
        WordProblems(largest=9)
