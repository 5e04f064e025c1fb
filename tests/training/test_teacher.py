"""Teachers in the target: what Trajectory Balance settles on is known exactly, on the enumerable toy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toys import trainer_of

from tba.batch import Batch, FetchedBatch, collate
from tba.errors import UserError
from tba.objectives.distil import Distil
from tba.objectives.subtrajectory_balance import SubtrajectoryBalance
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective, start_objective
from tba.schedules import Constant, Linear
from tba.training.teacher import Teacher
from tba.types import TEACHER, Group, Sampling, Version, teacher_arrays
from toy.engine import TabularEngine, sample_groups, tabular_prompts
from toy.policy import (
    TabularPolicy,
    TabularReference,
    TabularTask,
    distribution,
    total_variation,
)

TASK = TabularTask(symbols=2, length=2, prompts=1)  # 7 outcomes
BETA = 0.5
TEACHERS = [replace(TASK, seed=seed) for seed in (7, 8)]  # as references: other logits
(PROMPT,) = tabular_prompts(TASK)
SOURCES = ("on-policy", "stale", "teacher", "mixed", "uniform")
STEPS = 150


def teacher(*weights: float, reward: bool = True) -> Teacher:
    """So many teachers; the parts of a run make models of the paths, here it is `sampled`."""
    return Teacher(tuple(f"teacher {i}" for i, _ in enumerate(weights)), weights, reward=reward)


def target(of: Teacher) -> Tensor:
    """[Q, O] pi_ref^(1 - a) p_1^a1 p_2^a2 exp(r / beta) / Z, written down."""
    logs = [distribution(TabularPolicy(task, 1.0, torch.float64)).log() for task in (TASK, *TEACHERS)]
    weights = [1 - sum(of.weights), *of.weights]
    energy = sum(weight * log for weight, log in zip(weights, logs, strict=False))
    assert isinstance(energy, Tensor)
    return (energy + of.reward * torch.from_numpy(TASK.rewards_QO) / BETA).softmax(1)


def sampled(of: Teacher, engine: TabularEngine, rng: np.random.Generator, temperature: float = 1.0) -> Group:
    """A group of 32 that the reference and the teachers have scored."""
    (group,) = sample_groups(TASK, [PROMPT], 32, Sampling(temperature), rng, engine)
    if of.top:
        ((*rows,),) = (
            TabularReference(TEACHERS[0])
            .with_top(of.top)
            .log_probabilities_of([(PROMPT, [t.completion for t in group.trajectories])])
        )
        scored = zip(group.trajectories, rows, strict=True)
        return Group(tuple(replace(t, arrays=teacher_arrays([row])) for t, row in scored))
    completions = [t.completion for t in group.trajectories]
    scores = [TabularReference(task).log_probabilities(PROMPT, completions) for task in TEACHERS[: of.count]]
    return Group(
        tuple(
            replace(t, arrays={TEACHER: np.stack(rows)}) for t, *rows in zip(group.trajectories, *scores, strict=True)
        )
    )


def settled(objective: Objective, of: Teacher, source: str) -> float:
    """How far (total variation) the policy is from the target after training on that source's data."""
    rng, policy, engine = np.random.default_rng(0), TabularPolicy(TASK), TabularEngine(TASK)
    taught, optimizer = TabularEngine(TEACHERS[0]), torch.optim.Adam(policy.parameters())
    objective = start_objective(objective)
    for step in range(1, STEPS + 1):
        if source == "on-policy" or (source in ("stale", "mixed") and step % 25 == 0):
            engine.load({name: tensor.clone() for name, tensor in policy.weights().items()}, Version(0, step))
        drawn = sampled(of, taught if source == "teacher" else engine, rng, 1e6 if source == "uniform" else 1.0)
        if source == "mixed":
            teacher_answers = sampled(of, taught, rng)
            drawn = Group((*drawn.trajectories[:16], *teacher_answers.trajectories[:16]), as_sampled=False)
        elif source == "teacher":
            drawn = replace(drawn, as_sampled=False)
        batch = of.with_teachers(collate([drawn]), step)
        optimizer.param_groups[0]["lr"] = 0.15 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        optimizer.zero_grad()
        objective(policy.evaluate(batch), batch, step)[0].backward()
        optimizer.step()
    return float(total_variation(distribution(policy), target(of))[0])


@pytest.mark.parametrize(
    ("source", "weights"),
    [
        *zip(SOURCES, ((0.5,), (1.0,), (1.5,), (0.5,), (1.0,)), strict=True),
        *zip(SOURCES, ((0.2, 0.3), (0.4, 0.6), (0.9, 0.6), (0.4, 0.6), (0.9, 0.6)), strict=True),
    ],
)
def test_whoever_sampled_the_answers_and_when_what_is_learnt_is_the_target_with_teachers(
    source: str, weights: tuple[float, ...]
) -> None:
    form = TrajectoryBalance(Constant(BETA), off_policy="exact")  # at rates this large the default forgets rare answers
    assert settled(form, teacher(*weights), source) <= 0.02


@pytest.mark.parametrize("source", SOURCES)
def test_a_teacher_alone_is_learnt_token_by_token_from_the_same_data(source: str) -> None:
    alone = teacher(1.0, reward=False)
    assert alone.is_target
    assert settled(SubtrajectoryBalance(Constant(2.0), flow="one"), alone, source) <= 0.02


@pytest.mark.parametrize("divergence", ["reverse", "forward", "js"])
@pytest.mark.parametrize("source", SOURCES)
def test_the_teacher_s_whole_distribution_is_learnt_from_texts_of_any_origin(source: str, divergence: Any) -> None:
    whole = replace(teacher(1.0, reward=False), top=TASK.symbols + 1)
    assert settled(Distil(divergence), whole, source) <= 0.02


@pytest.mark.parametrize("source", SOURCES)
def test_with_few_top_tokens_the_policy_is_as_near_as_the_rest_of_the_teacher_s_probability(source: str) -> None:
    few = replace(teacher(1.0, reward=False), top=1)
    taught = TabularPolicy(TEACHERS[0], 1.0, torch.float64)
    next_NV = taught.logits_QNV.detach()[0].softmax(-1)  # of the empty answer, then of each first symbol
    rest_N = 1 - next_NV.max(-1).values
    bound = float(rest_N[0] + next_NV[0, 1:] @ rest_N[1:])  # expected over the teacher's own answers
    assert 0.02 < settled(Distil(), few, source) <= bound + 0.02


@cache
def batch_of(count: int) -> Batch:
    of = teacher(*(1.0,) * count)
    return collate([sampled(of, TabularEngine(TASK), np.random.default_rng(3))])


def test_token_by_token_the_loss_is_the_mean_square_of_the_log_ratio_to_the_teacher() -> None:
    policy = TabularPolicy(TASK, 1.0, torch.float64)
    batch = teacher(1.0, reward=False).with_teachers(batch_of(1), 1)
    loss, _ = SubtrajectoryBalance(Constant(2.0), flow="one")(policy.evaluate(batch), batch, 1)
    reference, teacher_reference = TabularReference(TASK), TabularReference(TEACHERS[0])
    squares = []
    for t in sampled(teacher(1.0), TabularEngine(TASK), np.random.default_rng(3)).trajectories:
        logs = [scorer.log_probabilities(PROMPT, [t.completion])[0] for scorer in (reference, teacher_reference)]
        squares.append(float(np.mean((logs[0] - logs[1]).astype(np.float64) ** 2)))
    assert loss.item() == pytest.approx(np.mean(squares), rel=1e-5)


def test_the_weights_follow_their_schedule_and_a_weight_of_zero_leaves_the_reference() -> None:
    rising = replace(teacher(1.0), schedule=Linear(0.0, 1.0, 10))
    batch = batch_of(1)
    assert batch.log_teacher_BTN is not None
    for step, share in ((1, 0.0), (6, 0.5), (11, 1.0), (50, 1.0)):
        mixed = rising.with_teachers(batch, step).log_reference_BT
        expected = (1 - share) * batch.log_reference_BT + share * batch.log_teacher_BTN[:, :, 0]
        torch.testing.assert_close(mixed, expected, rtol=1e-6, atol=1e-6)
    assert not rising.is_target


def test_without_the_reward_the_loss_does_not_see_it() -> None:
    mixed = teacher(1.0, reward=False).with_teachers(batch_of(1), 1)
    assert batch_of(1).reward_B.std() > 0
    assert mixed.reward_B.tolist() == [0.0] * mixed.rows


def test_several_teachers_without_weights_share_one() -> None:
    assert Teacher(("a", "b")).shares(5) == [0.5, 0.5]
    assert Teacher().shares(5) == []


def test_what_no_teacher_has_scored_is_refused_in_a_sentence() -> None:
    bare = replace(batch_of(1), log_teacher_BTN=None)
    for batch, of in ((bare, teacher(1.0)), (batch_of(1), teacher(0.5, 0.5))):
        with pytest.raises(UserError, match=f"was not scored by the recipe's {of.count} teachers"):
            of.with_teachers(batch, 1)
    assert Teacher().with_teachers(bare, 1) is bare


def test_selected_rows_keep_their_teachers_scores() -> None:
    batch = batch_of(2)
    rows = batch.length_B.argsort()[:5]
    part = batch.select(rows)
    assert part.log_teacher_BTN is not None
    assert batch.log_teacher_BTN is not None
    width = part.completion_BT.shape[1]
    assert torch.equal(part.log_teacher_BTN, batch.log_teacher_BTN[rows, :width])


def test_weights_that_cannot_be_are_refused() -> None:
    for weights in ((1.0, 1.0), (-1.0,), (math.inf,)):
        with pytest.raises(UserError, match=r"--teacher\.weights"):
            Teacher(("a",), weights)
    with pytest.raises(UserError, match=r"nothing to learn from without --teacher\.paths"):
        Teacher(reward=False)


def test_with_a_teacher_answers_of_equal_rewards_are_no_lack_of_signal_and_rewards_are_still_recorded(
    tmp_path: Path,
) -> None:
    half = replace(teacher(0.5), reward=False)
    alike = sampled(half, TabularEngine(TASK), np.random.default_rng(3))
    alike = Group(tuple(replace(t, reward=0.25) for t in alike.trajectories))
    for of, without in ((half, 0.0), (teacher(1.0, reward=False), 0.0), (Teacher(), 1.0)):
        trainer = trainer_of(TabularPolicy(TASK), TrajectoryBalance(Constant(BETA)), tmp_path, teacher=of)
        metrics = trainer.step(FetchedBatch([alike], collate([alike])))
        assert metrics["without_signal"] == without
        if of.count:  # the policy is still the reference: at no distance from it, and as far from the teacher
            apart = [of.weights[0] * float(t.log_reference.sum() - t.arrays[TEACHER].sum()) for t in alike.trajectories]
            assert metrics["log_ratio"] == pytest.approx(np.mean(apart), abs=1e-5)
        if of == half:
            assert metrics["log_ratio_reference"] == pytest.approx(0, abs=1e-5)
        else:  # where the reference has no part in the target, it may not have been scored
            assert "log_ratio_reference" not in metrics
        assert metrics["reward"] == 0.25
