"""The task `instruct`: nothing is shared by training and evaluation, and every prompt can be fulfilled."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from tba.errors import UserError
from tba.rewards.instructions import is_fulfilled
from tba.tasks.ifeval import IfEval
from tba.tasks.instruct import HELD_OUT, QUESTIONS, TOPICS, Instruct
from tba.tasks.instruct_kinds import KINDS
from tba.types import Problem


def kinds_of(problems: list[Problem]) -> Counter[str]:
    return Counter(one["kind"] for p in problems for one in p.fields["instructions"])


def topics_of(problems: list[Problem]) -> set[str]:
    whole = {q.format(topic=t): t for q in QUESTIONS for t in TOPICS}
    return {whole[p.fields["question"]] for p in problems}


def test_training_shares_no_topic_with_evaluation_and_no_kind_with_the_held_out_ones() -> None:
    train, evaluation = Instruct().problems("train"), Instruct().problems("eval")
    new = Instruct(kinds="held_out").problems("eval")
    assert (len(train), len(evaluation), len(new)) == (4000, 400, 400)
    assert len({str(p.prompt) for p in train}) == 4000
    assert not topics_of(train) & (topics_of(evaluation) | topics_of(new))
    assert kinds_of(new).keys() == HELD_OUT
    assert kinds_of(train).keys() == kinds_of(evaluation).keys() == {kind.name for kind in KINDS} - HELD_OUT
    assert len(kinds_of(train)) == 21
    assert min(kinds_of(train).values()) >= 200


def test_the_kinds_held_out_are_those_of_the_smallest_digests() -> None:
    def digest(name: str) -> bytes:
        return hashlib.blake2b(name.encode(), digest_size=8).digest()

    assert set(sorted((kind.name for kind in KINDS), key=digest)[:5]) == HELD_OUT


def test_topics_and_kinds_stand_once() -> None:
    assert max(Counter(TOPICS).values()) == 1
    assert max(Counter(kind.name for kind in KINDS).values()) == 1
    assert len(TOPICS) > 200


def test_no_two_kinds_of_a_prompt_rule_the_same_part_of_the_answer() -> None:
    rules = {kind.name: kind.rules for kind in KINDS}
    for problem in Instruct().problems("train"):
        ruled = Counter(part for one in problem.fields["instructions"] for part in rules[one["kind"]])
        assert max(ruled.values(), default=0) <= 1
        assert 1 <= len(problem.fields["instructions"]) <= 3


def test_problems_are_those_of_their_seed() -> None:
    assert Instruct(train_problems=50).problems("train") == Instruct(train_problems=50).problems("train")
    assert Instruct(train_problems=50).problems("train") != Instruct(train_problems=50, seed=1).problems("train")


def test_a_least_number_of_words_is_one_more_instruction_of_training_where_no_other_rules_the_length() -> None:
    task = Instruct(train_problems=200, least_words=15)
    assert task.problems("eval") == Instruct(train_problems=200).problems("eval")
    ruling, more = {kind.name for kind in KINDS if "length" in kind.rules}, 0
    for plain, problem in zip(Instruct(train_problems=200).problems("train"), task.problems("train"), strict=True):
        assert problem.prompt == plain.prompt
        before, after = plain.fields["instructions"], problem.fields["instructions"]
        free = not ruling & {one["kind"] for one in before}
        assert after == [*before, *([{"kind": "least_words", "arguments": {"count": 15}}] if free else [])]
        more += free
    assert 50 < more < 150
    with pytest.raises(UserError, match="instruct has least_words -1: give a number of words, or 0 for none"):
        Instruct(least_words=-1)


def test_every_wording_and_every_argument_can_be_checked() -> None:
    for problem in [*Instruct().problems("train"), *Instruct(kinds="held_out").problems("eval")]:
        assert "{" not in problem.prompt[0]["content"]
        for one in problem.fields["instructions"]:
            assert is_fulfilled(one, problem.fields["question"], "Tea.") in (True, False)


def test_ifeval_is_read_as_it_is_published_and_is_never_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "input_data.jsonl"
    row = {"key": 1, "prompt": "Say it.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    path.write_text(json.dumps(row) + "\n")
    (problem,) = IfEval(str(path)).problems("eval")
    assert problem.prompt == ({"role": "user", "content": "Say it."},)
    assert problem.fields["instruction_id_list"] == ["punctuation:no_comma"]
    with pytest.raises(UserError, match="ifeval has no training prompts"):
        IfEval(str(path)).problems("train")
    for broken in ({"kwargs": []}, {"kwargs": None}, {"instruction_id_list": ["rhyme"]}, {"instruction_id_list": [1]}):
        path.write_text(json.dumps(row | broken) + "\n")
        with pytest.raises(UserError, match=r"line 1 of .* has no instructions of IFEval"):
            IfEval(str(path)).problems("eval")
