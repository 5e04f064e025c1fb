"""A tabular model as a teacher, which remembers what it scores: imported once, whoever loads the recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tba.protocols import Task
from tba.types import Completion, FloatArray, Prompt, Version
from toy.model import TabularModel
from toy.policy import TabularReference

SCORED: list[tuple[str, str]] = []  # by this process: prompt and answer
FILE = "COUNTING_TEACHER"  # the environment variable with a file that all processes write them to


class Counting(TabularReference):
    """A tabular model that remembers what it has scored."""

    def log_probabilities_of(self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        scored = [(prompt.key, c.digest) for prompt, completions in answered for c in completions]
        SCORED.extend(scored)
        if path := os.environ.get(FILE):
            with open(path, "ab", buffering=0) as file:  # one write: lines of several processes do not mix
                file.write("".join(f"{key} {digest}\n" for key, digest in scored).encode())
        return super().log_probabilities_of(answered)


@dataclass(frozen=True)
class TabularTeacher(TabularModel):
    """A model of another task's logits."""

    def prepared(self, task: Task, log: Callable[[str], None] = lambda line: None) -> TabularTeacher:
        return self

    def reference(self, temperature: float, version: Version) -> TabularReference:
        return Counting(self.task, temperature, version)
