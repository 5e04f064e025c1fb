"""Functions of one line: a gold passes its tests, each variant fails one, and no kind is on both sides."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tba.errors import UserError
from tba.recipes.one_liners import recipe
from tba.rewards.code_reward import CodeReward
from tba.rewards.sandbox import strongest_level
from tba.runs.validating import notes_on_prompts
from tba.tasks.one_liners import OneLiner, OneLiners, all_one_liners
from tba_lab.code_attacks import answered

TASK = OneLiners()


def test_descriptions_are_distinct_and_no_kind_is_on_both_sides() -> None:
    sides = {split: {str(p.prompt) for p in TASK.problems(split)} for split in ("train", "eval")}  # type: ignore[arg-type]
    golds = list(all_one_liners())
    assert len({gold.prompt for gold in golds}) == len(golds) == len(sides["train"]) + len(sides["eval"])
    kinds = {split: {gold.kind for gold in golds if gold.prompt in prompts} for split, prompts in sides.items()}
    assert not kinds["train"] & kinds["eval"]
    assert len(kinds["eval"]) > 10


@pytest.mark.parametrize("gold", list(all_one_liners())[::61], ids=lambda gold: gold.kind)
def test_each_variant_fails_a_test_that_the_gold_passes(gold: OneLiner) -> None:
    tests = gold.tests(Random(1))
    assert all(gold.value(*test["arguments"]) == test["expected"] for test in tests)
    for variant in gold.variants():
        assert any(variant.value(*test["arguments"]) != test["expected"] for test in tests)


def test_the_code_of_a_gold_earns_its_reward_and_that_of_its_variants_none() -> None:
    if strongest_level()[0] is None:
        pytest.skip("this machine isolates no programs")
    reward = CodeReward(seconds=20.0)
    for gold in list(all_one_liners())[::307]:
        fields = {"tests": gold.tests(Random(1)), "entry_point": "f"}
        prompt, completion = answered(fields, gold.code)
        prompt = replace(prompt, text=gold.prompt)  # which the answer goes on from
        wrong = [replace(completion, text=variant.code) for variant in list(gold.variants())[::4]]
        judgements = reward.judge([(prompt, c) for c in (completion, *wrong)])
        assert [judgement.reward for judgement in judgements] == [1.0, *[0.0] * len(wrong)]


def test_demonstrations_forget_so_many_conditions() -> None:
    golds = {gold.prompt: gold.code for gold in all_one_liners() if gold.condition}
    problems = [p for p in OneLiners(forgotten_conditions=0.25).problems("train") if p.prompt in golds]
    wrong = sum(p.demonstration != golds[str(p.prompt)] for p in problems)
    assert wrong / len(problems) == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / len(problems)) ** 0.5)
    right = [p for p in OneLiners(forgotten_conditions=0.0).problems("train") if p.prompt in golds]
    assert all(p.demonstration == golds[str(p.prompt)] for p in right)


def test_a_run_says_at_which_level_programs_run() -> None:
    if strongest_level()[0] is None:
        pytest.skip("this machine isolates no programs")
    (note,) = notes_on_prompts(recipe)
    assert note.startswith("programs run at the level")


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings in ({"forgotten_conditions": 2.0}, {"seed": -1}, {"held_out": 0.0}):
        with pytest.raises(UserError):
            OneLiners(**settings)  # type: ignore[arg-type]
