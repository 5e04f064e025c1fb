"""Whether a recipe can learn, from what a few rounds say."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tba.errors import UserError
from tba.objectives.grpo import Grpo
from tba.objectives.raft import Raft
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.record.terminal import terminal
from tba.replay.buffer import BufferSettings
from tba.replay.selection import RecencyReward
from tba.runs.signal import Signal
from tba.schedules import Constant, WarmupConstant
from tba.settings import find

QUICKSTART = find("quickstart")
DISTINCT = replace(QUICKSTART, replay=replace(QUICKSTART.replay, buffer=BufferSettings(deduplicate=True)))


def probe(groups: list[list[float]], both: int = 0, **stopped: int) -> Any:
    examples = [{"prompt": "1+1=", "answers": [{"text": "2\x1b[2J", "mark": "1", "turns": []}]}]
    problems = {"train_problems": 10, "held_out": 4, "shared_problems": both}
    return SimpleNamespace(groups=groups, stop_counts=stopped, examples=examples, **problems)


def shown(signal: Signal) -> list[str]:
    console = terminal()
    with console.capture() as captured:
        console.print(signal.examples())
    return [line.strip() for line in captured.get().splitlines()]


def test_the_figures_are_those_of_the_answers() -> None:
    signal = Signal.of([probe([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.5, 0.0]], length=2, eos=6, empty=1)])
    assert (signal.answers, signal.mean_reward, signal.varied_share, signal.best_share) == (8, 3.5 / 8, 0.5, 0.25)
    assert (signal.truncated_share, signal.empty_share) == (0.25, 0.125)
    assert signal.advice(QUICKSTART) == []
    assert shown(signal) == ["1+1=", r"2\x1b[2J  reward 1"]


def test_what_several_looks_saw_is_added_up() -> None:
    signal = Signal.of([probe([[0.0, 1.0]], length=1, eos=1), probe([[1.0, 1.0]], eos=2)])
    assert (signal.train, signal.answers, signal.mean_reward) == (10, 4, 0.75)
    assert (signal.varied_share, signal.truncated_share) == (0.5, 0.25)


def test_an_episode_is_shown_with_its_turns_and_those_that_failed_are_counted_apart() -> None:
    found = probe([[0.0, 1.0]], failed=2, eos=4)
    turns = [(True, "h"), (False, "a-g?"), (True, "b"), (False, "c-g?"), (True, "")]
    found.examples[0]["answers"] = [{"text": "ha-g?bc-g?", "mark": "0.8 (turns 3)", "turns": turns}]
    signal = Signal.of([found])
    assert (signal.answers, signal.mean_reward, signal.failed_share) == (4, 0.5, 0.5)
    assert "50.0 % failed in their environments" in signal.facts()["answers"]
    assert shown(signal) == [
        *("1+1=", "reward 0.8 (turns 3)", "says  h", "reads a-g?", "says  b", "reads c-g?", "says  (nothing)"),
    ]
    with pytest.raises(UserError, match="failed in all of 3 episodes"):
        Signal.of([probe([], failed=3)])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (probe([[1.0, 1.0]] * 20, eos=40), ["every answer gets the same reward"]),
        (probe([[0.0, 0.0]] * 20, eos=40), ["every answer gets the same reward"]),
        (probe([[1.0, 1.0]] * 19 + [[0.0, 1.0]], eos=40), ["nearly all answers get the highest reward"]),
        (probe([[0.0, 0.0]] * 19 + [[0.0, 1.0]], eos=40), ["rewards differ in 5.0 % of the groups only"]),
        (probe([[0.0, 1.0]] * 20, length=20, eos=20), ["50.0 % of the answers are cut off"]),
        (probe([[0.0, 1.0]] * 20, eos=40, empty=30), ["75.0 % of the answers are empty"]),
        (probe([[0.0, 1.0]] * 20, eos=40, copies=21), ["52.5 % of the answers equal another one to their prompt"]),
        (probe([[0.0, 1.0]] * 20, eos=40, copies=20), []),
        (
            probe([[0.0, 0.0]] * 20, both=3, length=40, empty=40),
            ["every answer gets the same reward", "100.0 % of the answers are cut off"],
        ),
    ],
)
def test_what_stands_in_the_way_of_learning_is_said_with_what_to_change(found: dict[str, Any], said: list[str]) -> None:
    advice = Signal.of([found]).advice(DISTINCT)
    assert len(advice) == len(said)
    for line, beginning in zip(advice, said, strict=True):
        assert line.startswith(beginning)


@pytest.mark.parametrize(
    ("rewards", "threshold", "share"),
    [
        ([0.0, 0.5, 1.0, 0.0], 1.0, "25.0 %"),
        ([0.25, 0.5, 1.0, 0.9], 0.9, "50.0 %"),
        ([0.0, 1.0, 0.0, 1.0], 1.0, None),
        ([-1.0, 0.98, -1.0, 1.0], 0.98, None),
    ],
)
def test_raft_is_said_to_learn_answers_that_are_right_in_part(
    rewards: list[float], threshold: float, share: str | None
) -> None:
    signal = Signal.of([probe([rewards] * 5, eos=20)], threshold)
    advice = signal.advice(replace(QUICKSTART, objective=Raft()))
    assert len(advice) == (share is not None)
    assert all(f"also the {share} that are right in part only: set --objective.keep best" in line for line in advice)
    for objective in (Raft(keep="best"), Grpo()):
        assert signal.advice(replace(QUICKSTART, objective=objective)) == []


def with_selection(recipe: Recipe, selection: RecencyReward) -> Recipe:
    return replace(recipe, replay=replace(recipe.replay, selection=selection))


def test_what_is_worth_a_try_is_proposed_with_what_was_measured_and_never_what_the_recipe_has() -> None:
    rare = Signal.of([probe([[0.0] * 8] * 4 + [[0.0] * 7 + [1.0]], eos=40)])  # one in 40
    plain = replace(
        QUICKSTART, optimizer=replace(QUICKSTART.optimizer, weight_average=False, schedule=WarmupConstant(30))
    )
    ages, rate, averages = rare.proposals(plain, effective=0.883)
    assert ages.startswith("data of all ages: --replay.selection.m 0 (now 0.95), since success is rare, 2.5 % of 40")
    assert rate.startswith("a rate that decays: WarmupStableDecay(30, 270, 100) as the optimizer's schedule")
    assert "constant after 30 of 400 updates" in rate
    assert averages.startswith(
        "averaged weights: --optimizer.weight-average, since the policy moves fast: 6 updates leave"
    )
    assert "sample size of 88.3 %" in averages
    has_all = with_selection(QUICKSTART, RecencyReward(m=0.0))  # averaged, with a rate that decays
    assert rare.proposals(has_all, effective=0.1) == []
    assert rare.proposals(replace(plain, steps=3), effective=None) == [ages]  # no room for a decay; nothing measured
    assert len(rare.proposals(plain, effective=0.9)) == 2


@pytest.mark.parametrize(
    ("rewards", "threshold", "rare"),
    [
        ([0.0] * 19 + [1.0], 1.0, False),  # 5 %
        ([0.0] * 20 + [1.0], 1.0, True),
        ([0.0] * 21, 1.0, False),  # none at all: then there is other advice
        ([0.5] * 20 + [0.95], 1.0, False),  # nothing that counts as right
        ([0.5] * 20 + [0.95], 0.95, True),
    ],
)
def test_success_is_rare_below_one_right_answer_in_twenty(rewards: list[float], threshold: float, rare: bool) -> None:
    proposals = Signal.of([probe([rewards], eos=len(rewards))], threshold).proposals(QUICKSTART, None)
    assert [line.partition(":")[0] for line in proposals] == ["data of all ages"] * rare


@pytest.mark.parametrize(
    "recipe",
    [
        replace(QUICKSTART, objective=Grpo(Constant(0.05))),
        replace(QUICKSTART, objective=TrajectoryBalance(Constant(0.05), off_policy="none")),
        replace(QUICKSTART, offline=True),
        with_selection(QUICKSTART, RecencyReward(m=0.5, mix="group")),
        find("red_team_small"),
    ],
)
def test_old_data_are_not_proposed_where_they_were_not_measured(recipe: Recipe) -> None:
    rare = Signal.of([probe([[0.0] * 20 + [1.0]], eos=21)])
    assert not [line for line in rare.proposals(recipe, None) if line.startswith("data of all ages")]
