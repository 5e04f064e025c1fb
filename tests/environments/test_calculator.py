"""The calculator's world, and that a scripted player's dice tell nothing of the world that it plays in."""

from __future__ import annotations

import numpy as np
import pytest

from tba.environments.calculator import ASKS, COST, EXAMPLE, Calculator, Multiplication, factors, overconfident
from tba.environments.episode import Episode
from tba.environments.task import EnvironmentTask
from tba.types import Judgement, Message


def begun(seed: int) -> tuple[Calculator, int, int]:
    world = Calculator()
    a, b = map(int, world.reset(seed).removesuffix("=").split("*"))
    return world, a, b


def test_the_calculator_answers_products_and_each_question_costs() -> None:
    world, a, b = begun(0)
    assert world.step(f"?{a}*{b}") == f"{a * b}="
    assert world.step("?12*12") == "144="
    assert world.step(str(a * b)) is None
    assert world.get_reward() == pytest.approx(1 - 2 * COST)


@pytest.mark.parametrize("asked", ["?", "?1+1", "?2**9", "?9999*9999", "?1*1\n", "?__import__('os')", "?٣*٣"])
def test_what_is_no_product_is_not_evaluated(asked: str) -> None:
    world, a, b = begun(1)
    assert world.step(asked) == "?="
    assert world.step(str(a * b + 1)) is None
    assert world.get_reward() == pytest.approx(-COST)


@pytest.mark.parametrize(("answer", "reward"), [("It is {}.", 1.0), ("{}0", 0.0), ("no idea", 0.0)])
def test_a_language_model_asks_by_a_call_and_then_answers(answer: str, reward: float) -> None:
    episode = Episode(Multiplication, {}, 0, turns=3)
    a, b = factors(0)
    assert episode.opening == f"What is {a} * {b}?"
    call = f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    told = episode.say(call)
    assert told is not None
    assert told.results == (("multiply", str(a * b)),)
    assert episode.say(answer.format(a * b)) is None
    assert episode.judgement() == Judgement(reward, {"turns": 2.0, "wrong_calls": 0.0})


def test_a_call_that_is_never_answered_is_worth_nothing() -> None:
    episode = Episode(Multiplication, {}, 0, turns=1)
    assert episode.say('<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>') is None
    assert episode.judgement().reward == 0.0


@pytest.mark.parametrize(("environment", "prompt"), [(Calculator, ""), (Multiplication, EXAMPLE)])
def test_no_product_is_both_trained_and_held_out(environment: type, prompt: str | tuple[Message, ...]) -> None:
    made = EnvironmentTask(environment, "calculator", prompt, turns=3, worlds=20_000, held_out=1000)
    train, held_out = ({str(p.prompt) for p in made.problems(split)} for split in ("train", "eval"))
    assert len(held_out) > 900
    assert not train & held_out


def test_whether_the_player_asks_does_not_depend_on_the_numbers() -> None:
    made = EnvironmentTask(Calculator, "calculator", turns=3, worlds=2000, held_out=1, player=overconfident)
    problems = made.problems("train")
    asks = np.array([str((p.demonstration or ("",))[0]).startswith("?") for p in problems])
    large = np.array([int(str(p.prompt).split("*")[0]) >= 550 for p in problems])
    for half in (large, ~large):
        assert asks[half].mean() == pytest.approx(ASKS, abs=4 * (ASKS * (1 - ASKS) / half.sum()) ** 0.5)
