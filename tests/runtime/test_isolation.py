"""Which reward the processes have that grade in a run's name: the one that all its parts rebuild."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import TOY, made

from tba.errors import UserError
from tba.recipe_source import write_recipe
from tba.rewards.exact_answer import ExactAnswer
from tba.runtime.grading_child import load
from tba.runtime.isolation import RecipeSource, command_of, isolated_reward
from tba.runtime.run_directory import RunDirectory
from tba.settings import find
from tba.types import SPLITS, Completion, Prompt, StopReason, Version
from toy.policy import TabularTask

LONG = 60.0  # seconds: a call that is to end by itself


def answer(text: str, **fields: Any) -> tuple[Prompt, Completion]:
    prompt = Prompt("sums", np.array([1], np.int32), "1 + 1 =", fields)
    return prompt, Completion(np.array([1], np.int32), text, StopReason.EOS, (Version(), Version()))


OWN = """
from dataclasses import dataclass, replace
import tba
from tba.settings import find
from tba.types import Problem


@dataclass(frozen=True)
class Sums:
    name: str = "sums"
    bonus: float = 0.0

    def problems(self, split):
        return [Problem("1 + 1 =", {"answer": "2"})]

    def reward(self):
        bonus = self.bonus

        def mark(completion, answer):
            return float(completion == answer) + bonus

        return tba.FunctionReward(mark)

    def examination(self):
        return tba.ExactAnswer()


recipe = replace(find({toy!r}), task=Sums())
"""


@pytest.fixture
def own_recipe(tmp_path: Path) -> Path:
    path = tmp_path / "own_recipe.py"
    path.write_text(OWN.replace("{toy!r}", repr(str(TOY))))
    return path


def test_a_process_has_the_reward_of_a_run_with_its_overrides_and_another_for_evaluations(own_recipe: Path) -> None:
    _, run = made(own_recipe.parent / "run", "--task.bonus", "0.25", source=own_recipe)
    right = answer("2", answer="2")
    for source in (run, RecipeSource(str(own_recipe), ["--task.bonus", "0.25"])):
        spec = json.loads(command_of(source, "train")[-1])
        assert [j.reward for j in load(spec)().judge([right])] == [1.25]
        assert type(load({**spec, "split": "eval"})()) is ExactAnswer
    grader = isolated_reward(run, LONG)()
    assert grader.grade([right]) == load(json.loads(command_of(run, "train")[-1]))().judge([right])
    grader.graders.close()


def test_a_recipe_object_that_was_written_for_other_processes_is_rebuilt_too(own_recipe: Path, tmp_path: Path) -> None:
    recipe = replace(find(str(own_recipe)), task=TabularTask())
    write_recipe(recipe, tmp_path / "recipe.py")
    run = RunDirectory.create(tmp_path / "run", str(tmp_path / "recipe.py"), [], recipe)
    (reward, again) = (load(json.loads(command_of(run, split)[-1]))() for split in SPLITS)
    assert reward == again == TabularTask().reward()


def test_a_recipe_that_no_other_process_can_make_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"put what it is made of into a \.py file"):
        isolated_reward(None, LONG)()
    path = tmp_path / "recipe.py"
    path.write_text("raise RuntimeError('the recipe toy was made where it ran, inline')\n")
    with pytest.raises(UserError, match=r"recipe.py, line 1: RuntimeError: the recipe toy was made where it ran"):
        load(json.loads(command_of(RecipeSource(str(path)), "train")[-1]))


def test_the_program_itself_loads_no_model_library() -> None:
    """What a recipe imports comes on top, once for all processes of a nursery."""
    look = "import sys, tba.runtime.grading_child; print({'torch', 'transformers', 'tba.recipe'} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "set()\n"
