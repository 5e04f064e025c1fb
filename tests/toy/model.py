"""The enumerable toy as a recipe's model, so that any runtime can be compared with its exact ideal policy.

Invariant: policy and engine begin as the reference of the one `TabularTask`; at version 0 every log-ratio is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch

from tba.errors import UserError
from tba.protocols import HEADS, Engine, Policy, Task, Work
from tba.sharding import Sharding
from tba.types import Version
from toy.engine import TabularEngine
from toy.policy import WEIGHT, TabularPolicy, TabularReference, TabularTask, TabularTokenizer

MODEL = "model.safetensors"


@dataclass(frozen=True)
class TabularModel:
    """Engine, reference and policy of one task, each light enough to be made on the spot."""

    task: TabularTask = field(default_factory=TabularTask)  # has to be the recipe's task

    def prepared(self, task: Task, log: Callable[[str], None] = lambda line: None) -> TabularModel:
        """Returns itself; there is nothing to prepare. Raises `UserError` when the recipe's task is another."""
        if isinstance(task, TabularTask) and task != self.task:
            raise UserError(f"the tabular model is of {self.task}, but the recipe's task is {task}; make them equal.")
        return self

    def tokenizer(self) -> TabularTokenizer:
        return TabularTokenizer(self.task.symbols)

    @property
    def heads(self) -> frozenset[str]:
        return HEADS

    @property
    def max_completion_tokens(self) -> int:
        return self.task.length

    @property
    def positions(self) -> int | None:
        return None

    @property
    def never_sampled(self) -> tuple[str, ...]:
        return ()

    def policy(
        self,
        temperature: float,
        heads: frozenset[str] = frozenset(),
        saved: Path | None = None,
        sharding: Sharding | None = None,
        moments_on_host: bool = False,
        averaged: bool = False,
    ) -> TabularPolicy:
        if sharding is not None:
            raise UserError("a tabular policy is one small table: train it with --trainer.ranks 1")
        policy = TabularPolicy(self.task, temperature, heads=heads)
        if saved is not None:
            policy.load(safetensors.torch.load_file(saved / MODEL))
        return policy

    @property
    def compute(self) -> torch.dtype:
        return torch.float32

    @property
    def trainer_device(self) -> torch.device:
        return torch.device("cpu")

    def arithmetic(self) -> None:
        return None  # a table has no matrices

    @property
    def gpus_per_searcher(self) -> int:
        return 0

    def memory(self, work: Work) -> None:
        return None  # next to nothing

    def engine(self, version: Version, longest_prompt: int = 1) -> Engine:
        return TabularEngine(self.task, version)

    def reference(self, temperature: float, version: Version) -> TabularReference:
        return TabularReference(self.task, temperature, version)

    def save(self, policy: Policy, path: Path) -> None:
        """Write the one tensor as `model.safetensors` in the folder `path`."""
        path.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file({WEIGHT: policy.weights()[WEIGHT].contiguous()}, path / MODEL)
