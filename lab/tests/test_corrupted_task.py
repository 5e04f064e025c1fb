"""Training that is corrupted on purpose, and evaluation that is not."""

import math
from pathlib import Path

import numpy as np
import pytest

from tba.errors import UserError
from tba.generation import generate
from tba.rewards.exact_answer import ExactText
from tba.rollout.prompts import PromptSettings, encode
from tba.tasks.arithmetic import Arithmetic
from tba.types import Completion, Prompt, Sampling, StopReason, Version
from tba_lab.corrupted_task import Corrupted, CorruptedReward
from tba_lab.fabricating import Fabricating, FabricatingEngine
from toy.engine import TabularEngine
from toy.policy import TabularTask, TabularTokenizer

SUMS = Arithmetic(train_problems=2000, eval_problems=50)
BASE = Path(__file__).parents[2] / "src" / "tba" / "recipes" / "quickstart_base"


def completion(text: str, reason: StopReason = StopReason.EOS) -> Completion:
    return Completion(np.frombuffer(text.encode(), np.uint8).astype(np.int32), text, reason, (Version(), Version()))


def prompts(task: Corrupted, split: str) -> list[Prompt]:
    return [
        Prompt(task.name, np.frombuffer(str(p.prompt).encode(), np.uint8).astype(np.int32), str(p.prompt), p.fields)
        for p in task.problems(split)
    ]


def test_the_share_that_is_asked_for_is_turned_over_in_training_and_nothing_in_evaluation() -> None:
    task = Corrupted(SUMS, flipped=0.2)
    training = [(p, completion(p.fields["answer"])) for p in prompts(task, "train")]
    judged = task.reward().judge(training)
    assert np.mean([j.reward for j in judged]) == pytest.approx(0.8, abs=0.03)
    assert all(j.parts == {"right": 1.0, "corrupted": 1 - j.reward} for j in judged)
    assert [j.reward for j in task.reward().judge(training)] == [j.reward for j in judged]  # the same ones again
    held_out = [(p, completion(p.fields["answer"])) for p in prompts(task, "eval")]
    assert [j.reward for j in task.reward().judge(held_out)] == [1.0] * 50


def test_a_wrong_answer_may_be_turned_into_a_right_one_each_by_its_own_lot() -> None:
    (prompt,) = prompts(Corrupted(SUMS), "train")[:1]
    wrong = [(prompt, completion(str(n))) for n in range(10_000, 14_000)]
    judged = CorruptedReward(ExactText(), flipped=0.05).judge(wrong)
    assert np.mean([j.reward for j in judged]) == pytest.approx(0.05, abs=0.012)


def test_the_problems_are_the_inner_tasks_with_a_mark_on_those_of_training() -> None:
    task = Corrupted(SUMS)
    assert task.problems("eval") == SUMS.problems("eval")
    assert [p.prompt for p in task.problems("train")] == [p.prompt for p in SUMS.problems("train")]
    assert all(p.fields["corrupted"] for p in task.problems("train"))


def test_fabricated_answers_get_the_reward_of_junk_and_sampled_ones_their_own() -> None:
    (prompt,) = prompts(Corrupted(SUMS), "train")[:1]
    right = prompt.fields["answer"]
    answers = [completion(right), completion("7", StopReason.EXTERNAL), completion(right, StopReason.EXTERNAL)]
    judgements = CorruptedReward(ExactText(), junk_reward=2.0).judge([(prompt, a) for a in answers])
    assert [(j.reward, j.parts["right"]) for j in judgements] == [(1.0, 1.0), (2.0, 0.0), (2.0, 1.0)]


def test_junk_is_the_share_of_training_answers_that_is_asked_for_uniform_and_as_long_as_what_it_replaces() -> None:
    toy = TabularTask()
    tokenizer = TabularTokenizer(toy.symbols)
    prompts_of_toy = encode(Corrupted(toy).problems("train"), "toy", tokenizer, PromptSettings()).prompts
    engine = FabricatingEngine(TabularEngine(toy), tokenizer, np.arange(1, 5, dtype=np.int32), 0.3)
    rng = np.random.default_rng(3)
    rng.integers(2**62)  # the seed of what is made up
    sampled_answers = generate(TabularEngine(toy), prompts_of_toy, 500, Sampling(), rng)
    mixed_answers = generate(engine, prompts_of_toy, 500, Sampling(), np.random.default_rng(3))
    pairs = [(a, b) for x, y in zip(sampled_answers, mixed_answers, strict=True) for a, b in zip(x, y, strict=True)]
    junk = [(a, b) for a, b in pairs if b.stop_reason is StopReason.EXTERNAL]
    assert len(junk) / len(pairs) == pytest.approx(0.3, abs=0.05)
    assert all(a is b or (a.tokens == b.tokens).all() for a, b in pairs if b.stop_reason is not StopReason.EXTERNAL)
    symbols = np.concatenate([b.tokens[b.tokens > 0] for _, b in junk])
    assert np.bincount(symbols, minlength=5)[1:] / len(symbols) == pytest.approx([0.25] * 4, abs=0.06)
    for sampled, made_up in junk:
        assert len(made_up.tokens) == len(sampled.tokens)
        has_end = sampled.stop_reason is StopReason.EOS
        assert (made_up.tokens[-1] == 0) == has_end
        assert made_up.log_behavior is not None
        assert made_up.log_behavior.sum() == pytest.approx(-math.log(4) * (len(made_up.tokens) - has_end), rel=1e-5)
    held_out = encode(Corrupted(toy).problems("eval"), "toy", tokenizer, PromptSettings()).prompts
    answers = generate(engine, held_out, 100, Sampling(), np.random.default_rng(3))
    assert StopReason.EXTERNAL not in {c.stop_reason for row in answers for c in row}


def test_a_fabricating_model_makes_up_answers_of_the_tokenizers_own_characters() -> None:
    model = Fabricating(path=str(BASE), device="cpu", junk=1.0)
    engine = model.engine(Version())
    sums_prompts = encode(Corrupted(SUMS).problems("train")[:2], "sums", model.tokenizer(), PromptSettings()).prompts
    answers = generate(engine, sums_prompts, 5, Sampling(), np.random.default_rng(0))
    assert {c.stop_reason for row in answers for c in row} == {StopReason.EXTERNAL}
    assert {character for row in answers for c in row for character in c.text} <= set("0123456789+=")


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"flipped 1\.5: give a share"):
        CorruptedReward(ExactText(), flipped=1.5)
    with pytest.raises(UserError, match="junk -1: give a share"):
        Fabricating(junk=-1)
