"""When `tba check` has timed enough."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tba.batch import FetchedBatch, collate
from tba.models.huggingface import HuggingFace
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.runs.probe import (
    DRIFT_UPDATES,
    FEW_ANSWERS,
    FEW_PROMPTS,
    LEAST_ROUNDS,
    LONG_SECONDS,
    SCORED_ANSWERS,
    ProgressLines,
    _AnswerBatches,
    _batch_tokens,
    _extrapolated_step_seconds,
    _is_timed_enough,
    _without_warm_up,
    sample_answers,
    time_full_slots,
    time_steps,
)
from tba.schedules import Constant
from tba.settings import find
from tba.types import Group, Prompt


@pytest.mark.parametrize(
    ("seconds", "enough", "compiled"),
    [
        ([], False, False),
        ([0.1] * LEAST_ROUNDS, False, False),  # the first warms up
        ([0.1] * (LEAST_ROUNDS + 1), False, False),  # less than three seconds
        ([0.7] * (LEAST_ROUNDS + 1), True, True),
        ([LONG_SECONDS + 1], True, False),
        ([LONG_SECONDS + 1], False, True),  # most of it may be the compiler's
        ([LONG_SECONDS + 1, 0.1], True, True),
        ([LONG_SECONDS / 2], False, False),
    ],
)
def test_a_long_round_is_enough_and_of_short_ones_several(seconds: list[float], enough: bool, compiled: bool) -> None:
    quickstart = find("quickstart")
    assert isinstance(quickstart.model, HuggingFace)
    recipe = replace(quickstart, model=replace(quickstart.model, device="cpu", torch_compile=compiled))
    assert _is_timed_enough(seconds, 3.0, recipe) is enough


def test_the_first_is_left_out_unless_it_is_the_only_one() -> None:
    assert _without_warm_up([5.0, 1.0, 2.0]) == [1.0, 2.0]
    assert _without_warm_up([5.0]) == [5.0]


@dataclass(frozen=True)
class OnlySettings:
    """Cannot be called itself: `start` gives the objective of one run."""

    needs: frozenset[str] = frozenset()
    by_group: bool = True

    def start(self) -> Objective:
        return TrajectoryBalance(Constant(0.05)).start()


@pytest.mark.parametrize(("step_seconds", "updates"), [(1.0, DRIFT_UPDATES), (20.0, 1)])
def test_the_steps_are_of_a_run_and_as_many_as_show_the_drift_unless_they_take_minutes(
    step_seconds: float, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock on which each step takes `step_seconds`: after one of 20 s none is waited for."""
    recipe: Any = replace(find(str(Path(__file__).parents[1] / "tiny_sums.py")), objective=OnlySettings())
    answers = sample_answers(recipe, 0).answers
    now = count()
    monkeypatch.setattr("tba.runs.probe.time", SimpleNamespace(perf_counter=lambda: step_seconds * next(now)))
    monkeypatch.setattr("tba.runs.probe._SLOW_STEP_SECONDS", math.inf)
    timed_counts: list[int] = []

    def enough(seconds: Sequence[float], *_: object) -> bool:
        timed_counts.append(len(seconds))
        return len(seconds) > 0

    monkeypatch.setattr("tba.runs.probe._is_timed_enough", enough)
    figures = time_steps(recipe, 0.0, answers)
    assert figures.step_seconds == step_seconds
    assert timed_counts == list(range(updates + 1))
    assert (figures.effective is None) == (updates < DRIFT_UPDATES)


def test_what_an_environment_said_is_read_and_not_trained() -> None:
    recipe: Any = find(str(Path(__file__).parents[1] / "tiny_sums.py"))
    prompts = [Prompt("t", np.array([1], np.int32), "")]
    mask = [True, False, False, True]
    batches = _AnswerBatches(recipe, prompts, [], np.random.default_rng(0))
    trajectory = batches.trajectory(prompts[0], ([1, 2, 3, 4], mask, [-1.0, 0.0, 0.0, -1.0], 1.0, []))
    assert trajectory.completion.mask is not None
    assert trajectory.completion.mask.tolist() == mask
    assert collate([Group.of([trajectory])]).mask_BT.tolist() == [mask]


RECIPE: Any = find(str(Path(__file__).parents[1] / "tiny_sums.py"))
ROUND: Any = replace(RECIPE, prompts_per_round=3, samples_per_prompt=24)  # the defaults


def test_a_slow_model_answers_forty_times_and_scores_ten_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.runs.probe.SLOW_SECONDS", 0.0)
    figures = sample_answers(ROUND, 0)
    assert figures.small == FEW_PROMPTS * FEW_ANSWERS == 40
    assert [len(rewards) for rewards in figures.groups] == [FEW_ANSWERS] * FEW_PROMPTS
    assert [len(rows) for _, rows in figures.answers] == [SCORED_ANSWERS] * FEW_PROMPTS
    assert figures.reward[0]["answers"] == 40 - FEW_ANSWERS  # the first group warms up
    prompts, answers = figures.tokens  # those of a whole round
    assert prompts == 3 * len("1+1=")
    assert 72 <= answers <= 72 * ROUND.model.max_completion_tokens


def test_a_quick_model_answers_whole_rounds_after_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.runs.probe.SLOW_SECONDS", math.inf)
    figures = sample_answers(ROUND, 0)
    assert figures.small == 0
    sizes = [len(rewards) for rewards in figures.groups]
    assert sizes[:FEW_PROMPTS] == [FEW_ANSWERS] * FEW_PROMPTS
    assert sizes[FEW_PROMPTS:] == [24] * (3 * LEAST_ROUNDS)


def test_a_round_of_few_answers_is_whole_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.runs.probe.SLOW_SECONDS", 0.0)
    figures = sample_answers(replace(ROUND, samples_per_prompt=8), 0)
    assert figures.small == 0
    assert {len(rewards) for rewards in figures.groups} == {8}


def test_a_slow_reward_grades_the_first_round_only_and_of_that_two_prompts_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tba.runs.probe.SLOW_SECONDS", math.inf)
    monkeypatch.setattr("tba.runs.probe.SLOW_REWARD_SECONDS", 0.0)
    figures = sample_answers(ROUND, 0)
    assert len(figures.groups) == len(figures.answers) == FEW_PROMPTS
    monkeypatch.setattr("tba.runs.probe.MOST_GRADING_SECONDS", 0.0)
    assert len(sample_answers(ROUND, 0).groups) == 2


def test_full_slots_are_timed_by_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.runs.probe._STEADY_SECONDS", 0.01)
    figures = time_full_slots(ROUND, 0)
    assert 0 < figures.token_seconds < 1
    assert 0 < figures.prompt_seconds < 10


def test_a_step_is_extrapolated_from_two_sizes_by_what_does_not_grow_and_what_each_token_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that only the trainer moves: by 0.5 s for an update, 0.01 s for a token, 3 s for publishing."""
    monkeypatch.setattr("tba.runs.probe.SLOW_SECONDS", 0.0)
    prompts = [Prompt("t", np.array([1, 2], np.int32), "")]
    answer: Any = ([1, 2, 3], None, [-1.0, -1.0, -1.0], 1.0, [])
    source = _AnswerBatches(ROUND, prompts, [(0, [answer] * 4)] * LEAST_ROUNDS, np.random.default_rng(0))
    now, sizes = [100.0], list[int]()

    def step(fetched: FetchedBatch) -> None:
        sizes.append(len(fetched.groups))
        now[0] += (50.0 if len(sizes) == 1 else 0.5) + 0.01 * _batch_tokens(fetched)

    def publish() -> None:
        now[0] += 3.0

    monkeypatch.setattr("tba.runs.probe.time", SimpleNamespace(perf_counter=lambda: now[0]))
    trainer: Any = SimpleNamespace(step=step, publish=publish, sync_every=2)
    tokens = ROUND.groups_per_step * (2 + 3 * ROUND.group_size)
    assert source.tokens_per_step == tokens
    assert _extrapolated_step_seconds(trainer, source, lambda line: None) == pytest.approx(
        0.5 + 0.01 * tokens + 3.0 / 2
    )
    assert sizes == [1, 1, LEAST_ROUNDS]


def test_a_slow_step_is_not_made_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.runs.probe._SLOW_STEP_SECONDS", 0.0)
    figures = time_steps(RECIPE, 0.0, sample_answers(RECIPE, 0).answers)
    assert figures.small == f"{SCORED_ANSWERS} and {SCORED_ANSWERS * LEAST_ROUNDS}"
    assert figures.step_seconds > 0
    assert figures.effective is None
    assert figures.tokens[0] == RECIPE.groups_per_step * len("1+1=")


def test_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = count()  # seconds
    monkeypatch.setattr("tba.runs.probe.time", SimpleNamespace(perf_counter=lambda: next(now)))
    say = ProgressLines()
    for i in range(6):
        say(f"sampled {i} of 6 answers")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"progress": f"sampled {i} of 6 answers"} for i in (1, 3, 5)]
