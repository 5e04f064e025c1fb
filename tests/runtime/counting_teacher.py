"""A tabular model as a teacher, which remembers what it scores: imported once, whoever loads the recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tba.protocols import Task
from tba.types import Completion, FloatArray, Prompt, Version
from toy.model import TabularModel
from toy.policy import TabularReference

SCORED: list[tuple[str, str]] = []  # by this process: prompt and answer


class Counting(TabularReference):
    """A tabular model that remembers what it has scored."""

    def log_probabilities_of(self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        SCORED.extend((prompt.key, c.digest) for prompt, completions in answered for c in completions)
        return super().log_probabilities_of(answered)


@dataclass(frozen=True)
class TabularTeacher(TabularModel):
    """A model of another task's logits."""

    def prepared(self, task: Task, log: Callable[[str], None] = lambda line: None) -> TabularTeacher:
        return self

    def reference(self, temperature: float, version: Version) -> TabularReference:
        return Counting(self.task, temperature, version)
