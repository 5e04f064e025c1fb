"""Teachers with another tokenizer score the text of an answer, and what is learnt from that is the teacher's odds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
import torch
from pair_teacher import PairTeacher
from runs import inline
from test_teaching import model_at, of_models, trajectories
from tests.chat_families import FAMILIES, tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.batch import collate
from tba.chat_prompts import chat_markup
from tba.errors import UserError
from tba.objectives.subtrajectory_balance import SubtrajectoryBalance
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.runtime.prompt_sets import prompts_of
from tba.runtime.teaching import ScoredByText, reference_of, require_scorers, teachers_of
from tba.schedules import Constant
from tba.tasks.arithmetic import Arithmetic
from tba.training.teacher import Teacher
from tba.types import TEACHER, Completion, FloatArray, Group, Prompt, Sampling, StopReason, Version
from toy.engine import TabularEngine, sample_groups, tabular_prompts
from toy.model import TabularModel
from toy.policy import (
    TabularPolicy,
    TabularReference,
    TabularTask,
    TabularTokenizer,
    distribution,
    total_variation,
)
from toy.recipe import recipe as toy

TASK = TabularTask(symbols=2, length=4, prompts=1)  # 31 outcomes, the cut ones of two whole pairs
(PROMPT,) = tabular_prompts(TASK)
SOURCES = ("on-policy", "stale", "teacher", "mixed", "uniform")
BETA, STEPS = 0.5, 300


def taught(weight: float, reward: bool) -> Recipe:
    teacher = Teacher(weights=(weight,), models=(PairTeacher(TASK),), reward=reward)
    return replace(toy, task=TASK, model=TabularModel(TASK), teacher=teacher)


def completion(outcome: int) -> Completion:
    tokens = TASK.tokens(outcome)
    reason = StopReason.EOS if outcome < TASK.nodes else StopReason.LENGTH
    return Completion(np.array(tokens, np.int32), "", reason, (Version(), Version()))


def scores_of(scorer: Any, prompt: Prompt, completions: Sequence[Completion]) -> list[FloatArray]:
    scores: list[FloatArray] = scorer.log_probabilities_of([(prompt, completions)])[0]
    return scores


def log_teacher(scorer: Any) -> Tensor:
    """[O] of every text there is."""
    scores = scores_of(scorer, PROMPT, [completion(o) for o in range(TASK.outcomes)])
    return torch.tensor([float(log_T.sum()) for log_T in scores], dtype=torch.float64)


def sampled(engine: TabularEngine, scorer: Any, rng: np.random.Generator, temperature: float = 1.0) -> Group:
    (group,) = sample_groups(TASK, [PROMPT], 48, Sampling(temperature), rng, engine)
    scores = scores_of(scorer, PROMPT, [t.completion for t in group.trajectories])
    scored = zip(group.trajectories, scores, strict=True)
    return Group(tuple(replace(t, arrays={TEACHER: row[None]}) for t, row in scored))


def test_characters_learnt_from_pairs_of_characters_have_every_text_s_odds_once() -> None:
    (scorer,) = teachers_of(taught(1.0, False), TabularModel(TASK), TabularReference(TASK))
    assert isinstance(scorer, ScoredByText)
    assert float(log_teacher(scorer).exp().sum()) == pytest.approx(1, abs=1e-6)
    (of_aab,) = scores_of(scorer, PROMPT, [completion(TASK.outcome([1, 1, 2]))])
    tokens = scorer.teacher_tokenizer.encode("AAB$")
    assert len(tokens) == 3
    teacher_prompt = replace(PROMPT, tokens=np.array(scorer.teacher_tokenizer.encode(PROMPT.text), np.int32))
    whole = replace(completion(0), tokens=np.array(tokens, np.int32))
    (expected,) = scores_of(PairTeacher(TASK).reference(1.0, Version()), teacher_prompt, [whole])
    assert of_aab.tolist() == [0, 0, 0, pytest.approx(float(expected.sum()), rel=1e-6)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("weight", "reward"), [(1.0, False), (0.5, True)])
def test_whoever_sampled_the_answers_a_teacher_of_other_tokens_is_learnt(
    source: str, weight: float, reward: bool
) -> None:
    recipe = taught(weight, reward)
    (scorer,) = teachers_of(recipe, recipe.model, reference_of(recipe, recipe.model))
    start = distribution(TabularPolicy(TASK, 1.0, torch.float64)).log()[0]
    energy = (1 - weight) * start + weight * log_teacher(scorer) + reward * torch.from_numpy(TASK.rewards_QO[0]) / BETA
    policy, teacher_policy, rng = TabularPolicy(TASK), TabularPolicy(TASK), np.random.default_rng(0)
    teacher_policy.become(log_teacher(scorer).softmax(0).expand(TASK.questions, -1))
    engine, teacher = TabularEngine(TASK), TabularEngine(TASK)
    teacher.load(teacher_policy.weights(), Version())
    objective, optimizer = TrajectoryBalance(Constant(BETA), off_policy="exact"), torch.optim.Adam(policy.parameters())
    for step in range(1, STEPS + 1):
        if source == "on-policy" or (source in ("stale", "mixed") and step % 25 == 0):
            engine.load({name: tensor.clone() for name, tensor in policy.weights().items()}, Version(0, step))
        sampler = teacher if source == "teacher" else engine
        drawn = sampled(sampler, scorer, rng, 1e6 if source == "uniform" else 1.0)
        if source == "mixed":
            drawn = Group((*drawn.trajectories[:24], *sampled(teacher, scorer, rng).trajectories[:24]))
        drawn = replace(drawn, as_sampled=source not in ("teacher", "mixed"))
        batch = recipe.teachers.with_teachers(collate([drawn]), step)
        optimizer.param_groups[0]["lr"] = 0.15 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        optimizer.zero_grad()
        objective(policy.evaluate(batch), batch, step)[0].backward()
        optimizer.step()
    learnt = distribution(policy)[:1]
    assert float(total_variation(learnt, energy.softmax(0)[None])[0]) <= 0.02


def renamed(path: str, folder: Path) -> str:
    """A model whose tokens have other numbers, and which is the same otherwise."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    model_at(folder, 1, "".join(sorted(Arithmetic(digits=1).alphabet, reverse=True)))
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    order = [tokenizer.get_vocab()[text] for text in sorted(vocabulary, key=vocabulary.__getitem__)]
    for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
        weight.data = weight.data[order]
    model.save_pretrained(folder)
    return str(folder)


def test_a_model_with_renamed_tokens_scores_a_text_as_the_policy_s_own_does_token_by_token(tmp_path: Path) -> None:
    path = model_at(tmp_path / "own", 0)
    renamed_path = renamed(path, tmp_path / "other")
    recipe = replace(of_models(path), teacher=Teacher((renamed_path,)), objective=TrajectoryBalance(Constant(1.0)))
    lines: list[str] = []
    require_scorers(recipe, recipe.model, lines.append)
    assert lines == ["teacher 1 has another tokenizer than the policy (the vocabularies differ): it scores the text of "
                    "each answer"]  # fmt: skip
    (scorer,) = teachers_of(recipe, recipe.model, reference_of(recipe, recipe.model))
    prompts, digits = prompts_of(recipe, recipe.model, "train")[:2], recipe.model.tokenizer().encode("1427")
    end = recipe.model.tokenizer().eos_token_id
    assert end is not None
    answers = [
        Completion(np.array(tokens, np.int32), "", reason, (Version(), Version()))
        for tokens, reason in (
            ([*digits[:2], end], StopReason.EOS),
            (digits, StopReason.LENGTH),
            ([end], StopReason.EOS),
        )
    ]
    pairs = [(prompts[0], answers), (prompts[1], answers[:0]), (prompts[1], answers)]
    expected = recipe.model.reference(1.0, Version()).log_probabilities_of(pairs)
    for scores, expected_scores in zip(scorer.log_probabilities_of(pairs), expected, strict=True):
        for by_text, by_token in zip(scores, expected_scores, strict=True):
            assert by_text.shape == by_token.shape
            assert not by_text[:-1].any()
            assert float(by_text[-1]) == pytest.approx(float(by_token.sum()), abs=1e-5)  # of about 10
    long = replace(answers[1], tokens=np.array(digits * 4, np.int32))  # 16 positions do not hold it and its prompt
    assert math.isnan(scores_of(scorer, prompts[0], [answers[0], long])[1][-1])


class Reading:
    """A teacher that keeps what it is to score."""

    def __init__(self) -> None:
        self.read: list[tuple[Prompt, Completion]] = []

    def log_probabilities_of(self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        self.read += [(prompt, c) for prompt, completions in answered for c in completions]
        return [[np.zeros(len(c.tokens), np.float32) for c in completions] for _, completions in answered]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_is_read_as_the_teacher_s_own_template_writes_it_and_a_cut_answer_has_no_end(name: str) -> None:
    family, teacher_tokenizer, policy_tokenizer = FAMILIES[name], tokenizer(name, "chat"), tokenizer("smollm2", "chat")
    teacher, messages = Reading(), [{"role": "user", "content": "There is a note: what is in it?"}]
    scorer = ScoredByText(teacher, Reading(), policy_tokenizer, teacher_tokenizer, chat=True)
    text = chat_markup(policy_tokenizer, messages)
    prompt = Prompt(
        "t", np.array(policy_tokenizer.encode(text, add_special_tokens=False), np.int32), text, messages=tuple(messages)
    )
    answer = "It is rent, caf\u00e9"
    tokens = policy_tokenizer.encode(answer, add_special_tokens=False)
    end = policy_tokenizer.encode(FAMILIES["smollm2"].end, add_special_tokens=False)
    at = (Version(), Version())
    whole = Completion(np.array([*tokens, *end], np.int32), answer, StopReason.EOS, at)
    cut = Completion(np.array(tokens[:-1], np.int32), "", StopReason.LENGTH, at)  # in the middle of a character
    scores_of(scorer, prompt, [whole, cut])
    (teacher_prompt, whole_answer), (_, cut_answer) = teacher.read
    answered = chat_markup(teacher_tokenizer, [*messages, {"role": "assistant", "content": answer}], answered=True)
    answered += family.end if family.end == "<|user|>" else ""  # GLM's end is the next message's header
    expected = teacher_tokenizer.encode(answered, add_special_tokens=False)
    assert [*teacher_prompt.tokens, *whole_answer.tokens] == expected[
        : len(teacher_prompt.tokens) + len(whole_answer.tokens)
    ]
    assert teacher_tokenizer.decode([int(whole_answer.tokens[-1])]) == family.end
    assert (
        teacher_tokenizer.decode(cut_answer.tokens.tolist(), skip_special_tokens=True)
        .strip()
        .endswith("It is rent, caf")
    )


def test_where_tokens_are_scored_or_messages_are_unknown_another_tokenizer_is_refused(tmp_path: Path) -> None:
    alone = taught(1.0, False)
    by_token = replace(alone, objective=SubtrajectoryBalance(Constant(1.0), flow="one"))
    with pytest.raises(UserError, match="the objective needs the log-probability of each token"):
        require_scorers(by_token, by_token.model, lambda line: None)
    scorer = ScoredByText(Reading(), Reading(), None, None, chat=True)
    with pytest.raises(UserError, match="needs the messages of a chat"):
        scores_of(scorer, PROMPT, [completion(0)])


def test_an_episode_of_several_segments_is_no_text_for_another_tokenizer() -> None:
    scorer = ScoredByText(Reading(), Reading(), TabularTokenizer(2), TabularTokenizer(1), chat=False)
    mask, begins = np.array([True, False]), np.array([1], np.int32)
    episode = replace(completion(0), tokens=np.array([1, 2], np.int32), mask=mask, begins=begins)
    with pytest.raises(UserError, match=r"2 segments, .* but a teacher with another tokenizer scores one"):
        scores_of(scorer, PROMPT, [episode])


def test_a_run_with_a_teacher_of_other_tokens_keeps_one_score_for_each_answer(tmp_path: Path) -> None:
    policy_path = model_at(tmp_path / "own", 0)
    recipe = replace(of_models(policy_path), teacher=Teacher((renamed(policy_path, tmp_path / "other"),), reward=False))
    changes: dict[str, Any] = {name: getattr(recipe, name) for name in ("task", "model", "teacher")}
    inline(tmp_path / "run", "--steps", "4", "--replay.pacing.warm-up", "32", **changes)
    rows = trajectories(tmp_path / "run")
    assert len(rows) >= 64
    assert {t.completion.stop_reason for t in rows} == {StopReason.EOS, StopReason.LENGTH}
    # the teacher is the policy's start, which is the reference: also of answers with padding, that no text shows
    assert any(recipe.model.tokenizer().pad_token_id in t.completion.tokens for t in rows)
    reference = recipe.model.reference(recipe.policy_temperature, Version())
    for t in rows:
        (log_T,) = t.arrays[TEACHER]
        ((score,),) = reference.log_probabilities_of([(t.prompt, [t.completion])])
        assert not log_T[:-1].any()
        assert float(log_T[-1]) == pytest.approx(float(score.sum()), abs=1e-4)
        assert not t.has_reference  # it has no part in the target


class Ways(TabularTokenizer):
    """Writes "A" or "AA" at a time: "AAA" can be A, AA as well as the usual AA, A."""

    texts = ("$", "A", "AA")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if text in ascii_lowercase:
            return super().encode(text)
        return [2] * (len(text) // 2) + [1] * (len(text) % 2)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        ids = [i for i in token_ids if i or not skip_special_tokens]
        return "".join(self.texts[i] if i < 3 else super(Ways, self).decode([i]) for i in ids)


def test_of_the_ways_to_write_a_text_the_reference_decides_and_of_texts_the_teacher() -> None:
    """Were every way as likely as its text, a policy would learn the most numerous ones."""
    short, letters = TabularTask(symbols=2, length=2, prompts=1), TabularTask(symbols=1, length=4, prompts=1, seed=7)
    reference, teacher = TabularReference(short), TabularReference(letters)
    scorer = ScoredByText(teacher, reference, Ways(2), TabularTokenizer(1), chat=False)
    (prompt,), (teacher_prompt,) = tabular_prompts(short), tabular_prompts(letters)

    def log_of(reference: Any, prompt: Prompt, *tokens: int) -> float:
        whole = Completion(np.array(tokens, np.int32), "", StopReason.LENGTH, (Version(), Version()))
        return float(scores_of(reference, prompt, [whole])[0].sum())

    for tokens, usual, text in (
        ([2, 0], [2, 0], [1, 1, 0]),
        ([2, 1], [2, 1], [1, 1, 1]),
        ([1, 2], [2, 1], [1, 1, 1]),
        ([1, 1], [2], [1, 1]),
    ):
        expected = (
            log_of(teacher, teacher_prompt, *text)
            + log_of(reference, prompt, *tokens)
            - log_of(reference, prompt, *usual)
        )
        reason = StopReason.EOS if tokens[-1] == 0 else StopReason.LENGTH
        sampled = Completion(np.array(tokens, np.int32), "", reason, (Version(), Version()))
        assert float(scores_of(scorer, prompt, [sampled])[0].sum()) == pytest.approx(expected, abs=1e-5)
