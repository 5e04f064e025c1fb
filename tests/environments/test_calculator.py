"""The calculator's world, and that a scripted player's dice tell nothing of the world that it plays in."""

from __future__ import annotations

import numpy as np
import pytest

from tba.environments.calculator import ASKS, COST, Calculator, overconfident
from tba.environments.task import EnvironmentTask


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


def test_no_product_is_both_trained_and_held_out() -> None:
    made = EnvironmentTask(Calculator, "calculator", turns=3, worlds=20_000, held_out=1000)
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
