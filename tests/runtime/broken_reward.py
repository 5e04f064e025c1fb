"""The toy with a reward that raises: a recipe file as a user might write one, with a mistake in it."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tba.settings import find
from tba.types import Completion, Judgement, Problem, Prompt, Split
from toy.policy import TabularTask


@dataclass(frozen=True)
class Broken:
    deadly: bool

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        if self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        marks = [1.0 / (len(completion.text) - len(completion.text)) for _, completion in answered]
        return [Judgement(mark) for mark in marks]


@dataclass(frozen=True)
class Task:
    name: str = "tabular"
    deadly: bool = False  # it does not raise, it kills its process

    def problems(self, split: Split) -> Sequence[Problem]:
        return TabularTask().problems(split)

    def reward(self) -> Broken:
        return Broken(self.deadly)


recipe = replace(find(str(Path(__file__).parents[1] / "toy" / "recipe.py")), task=Task())
