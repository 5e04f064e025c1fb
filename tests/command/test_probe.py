"""When `tba check` has timed enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tba.batch import collate
from tba.models.huggingface import HuggingFace
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.runs.probe import LONG, ROUNDS, UPDATES, _Answered, _enough, _timed, search, train
from tba.schedules import Constant
from tba.settings import find
from tba.types import Group, Prompt


@pytest.mark.parametrize(
    ("seconds", "enough", "compiled"),
    [
        ([], False, False),
        ([0.1] * ROUNDS, False, False),  # the first warms up
        ([0.1] * (ROUNDS + 1), False, False),  # less than three seconds
        ([0.7] * (ROUNDS + 1), True, True),
        ([LONG + 1], True, False),
        ([LONG + 1], False, True),  # most of it may be the compiler's
        ([LONG + 1, 0.1], True, True),
        ([LONG / 2], False, False),
    ],
)
def test_a_long_round_is_enough_and_of_short_ones_several(seconds: list[float], enough: bool, compiled: bool) -> None:
    quickstart = find("quickstart")
    assert isinstance(quickstart.model, HuggingFace)
    recipe = replace(quickstart, model=replace(quickstart.model, device="cpu", compiled=compiled))
    assert _enough(seconds, 3.0, recipe) is enough


def test_the_first_is_left_out_unless_it_is_the_only_one() -> None:
    assert _timed([5.0, 1.0, 2.0]) == [1.0, 2.0]
    assert _timed([5.0]) == [5.0]


@dataclass(frozen=True)
class OnlySettings:
    """Cannot be called itself: `start` gives the objective of one run."""

    needs: frozenset[str] = frozenset()
    by_group: bool = True

    def start(self) -> Objective:
        return TrajectoryBalance(Constant(0.05)).start()


@pytest.mark.parametrize(("slow", "updates"), [(1.0, UPDATES), (20.0, 1)])
def test_the_steps_are_of_a_run_and_as_many_as_show_the_drift_unless_they_take_minutes(
    slow: float, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock on which each step takes `slow` seconds: after one of 20 s none is waited for."""
    recipe: Any = replace(find(str(Path(__file__).parents[1] / "tiny_sums.py")), objective=OnlySettings())
    answers = search(recipe, 0.0, 0)["answers"]
    now = count()
    monkeypatch.setattr("tba.runs.probe.time", SimpleNamespace(perf_counter=lambda: slow * next(now)))
    asked: list[int] = []

    def enough(seconds: Sequence[float], *_: object) -> bool:
        asked.append(len(seconds))
        return len(seconds) > 0

    monkeypatch.setattr("tba.runs.probe._enough", enough)
    found = train(recipe, 0.0, answers)
    assert found["step_seconds"] == slow
    assert asked == list(range(updates + 1))
    assert (found["effective"] is None) == (updates < UPDATES)


def test_what_an_environment_said_is_read_and_not_trained() -> None:
    recipe: Any = find(str(Path(__file__).parents[1] / "tiny_sums.py"))
    prompts = [Prompt("t", np.array([1], np.int32), "")]
    mask = [True, False, False, True]
    answered = _Answered(recipe, prompts, [], np.random.default_rng(0))
    found = answered.trajectory(prompts[0], ([1, 2, 3, 4], mask, [-1.0, 0.0, 0.0, -1.0], 1.0, []))
    assert found.completion.mask is not None
    assert found.completion.mask.tolist() == mask
    assert collate([Group.of([found])]).mask_BT.tolist() == [mask]
