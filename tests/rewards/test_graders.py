"""Both graders on pairs of right answer and response, by kind, with the verdict that a person would give."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tba.rewards.exact_answer import grade
from tba.rewards.math_answer import MathAnswer
from tba.rewards.math_text import last_boxed

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "fixtures" / "graders.jsonl").read_text(encoding="utf-8").splitlines()
]


def test_math_answers_of_every_kind_get_the_verdict_of_a_person() -> None:
    pairs = [pair for pair in PAIRS if pair["grader"] == "math"]
    reward = MathAnswer(processes=1, seconds=20.0)
    marks = reward.grade([(last_boxed(pair["response"]), pair["gold"]) for pair in pairs])
    reward.close()
    assert [pair for pair, mark in zip(pairs, marks, strict=True) if mark is not pair["right"]] == []
    assert len(pairs) > 500


def test_exact_answers_of_every_kind_get_the_verdict_of_a_person() -> None:
    pairs = [pair for pair in PAIRS if pair["grader"] == "exact"]
    assert [pair for pair in pairs if grade(pair["response"], pair["gold"]) is not pair["right"]] == []
    assert len(pairs) > 300


def test_hardly_a_kind_has_only_right_or_only_wrong_pairs() -> None:
    verdicts = defaultdict(set)
    for pair in PAIRS:
        verdicts[pair["grader"], pair["kind"]].add(pair["right"])
    assert {kind for kind, found in verdicts.items() if len(found) < 2} == set()


@pytest.mark.parametrize("gold", ["81, 256", "7, 200", "12, 144", "(4,200)", "1, 234, 567"])
def test_a_list_is_never_the_number_of_its_digits(gold: str) -> None:
    joined = "".join(c for c in gold if c.isdigit())
    reward = MathAnswer(processes=1, seconds=20.0)
    assert reward.grade([(joined, gold), (gold, joined), (gold, gold)]) == [False, False, True]
    reward.close()
    assert [grade(f"\\boxed{{{joined}}}", gold), grade(f"\\boxed{{{gold}}}", gold)] == [False, True]
