"""One half of a recipe, timed in a process of its own: `python -m tba.command.probe searcher|trainer RECIPE ...`.

A few rounds or steps on the recipe's own parts, with nothing written and nothing learnt that is kept. Prints one line
of JSON: seconds and peak memory as the half itself would have them.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tba.batch import collate
from tba.protocols import HEADS
from tba.recipe import Recipe
from tba.record.memory import peak_memory_bytes, resident_memory_bytes
from tba.replay.buffer import Buffer
from tba.replay.codec import decode_trajectory, encode_trajectory
from tba.runtime.searching import prompts_of
from tba.settings import find, override
from tba.train.batches import Fetched
from tba.train.trainer import Trainer
from tba.types import Completion, Group, Json, Prompt, StopReason, Trajectory, Version

ROUNDS = 5  # timed rounds or steps, after one that warms up; `check` knows
_KEPT = 10_000  # trajectories of which the memory is measured


def search(recipe: Recipe) -> dict[str, Json]:
    """Rounds: generate, judge, score under the reference, continue from steps if the recipe has a vine."""
    model = recipe.model.prepared(recipe.task)
    prompts = prompts_of(recipe, model.tokenizer(), "train")
    held_out = prompts_of(recipe, model.tokenizer(), "eval")
    engine, reward = model.engine(Version()), recipe.task.reward()
    vine = recipe.vine.start(engine, reward, model.tokenizer()) if recipe.vine else None
    reference = model.reference(recipe.policy_temperature, Version())
    rng = np.random.default_rng(0)
    seconds, generating, lengths = [], [], []
    for i in range(ROUNDS + 1):
        asked = [prompts[int(j)] for j in rng.integers(len(prompts), size=recipe.prompts_per_round)]
        began, sampling = time.perf_counter(), recipe.exploration.draw(rng)
        answered = engine.generate(asked, recipe.samples_per_prompt, sampling, rng)
        generating.append(time.perf_counter() - began)
        pairs = [(p, c) for p, row in zip(asked, answered, strict=True) for c in row]
        reward.judge(pairs)
        if vine is not None:
            unscored = [Trajectory("", p, c, 0.0, np.zeros(len(c.tokens), np.float32), Version()) for p, c in pairs]
            vine.grow(unscored, sampling, rng, Counter())
        reference.log_probabilities_of(list(zip(asked, answered, strict=True)))
        lengths += [len(c.tokens) for row in answered for c in row] if i else []
        seconds.append(time.perf_counter() - began)
    return {
        "round_seconds": statistics.median(seconds[1:]),
        "generation_seconds": statistics.median(generating[1:]),
        "lengths": lengths,
        "held_out": len(held_out),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def train(recipe: Recipe, lengths: list[int]) -> dict[str, Json]:
    """Steps on made-up answers of the given lengths, with rewards 0 and 1."""
    model = recipe.model.prepared(recipe.task)
    prompts = prompts_of(recipe, model.tokenizer(), "train")
    policy = model.policy(recipe.policy_temperature, recipe.objective.needs & HEADS)
    trainer = Trainer(
        policy=policy,
        objective=recipe.objective,
        batches=_MadeUp(recipe, prompts, lengths, np.random.default_rng(0)),
        weights=_Nowhere(),
        optimizer=recipe.optimizer.start(policy.parameters(), list(policy.heads.parameters())),
        sync_every=recipe.steps + 1,
        max_tokens_per_pass=recipe.max_tokens_per_pass,
        directory=Path(tempfile.gettempdir()),  # written to after three non-finite steps in a row only
    )
    seconds = [trainer.step()["seconds"] for _ in range(ROUNDS + 1)]
    peak = peak_memory_bytes()
    return {
        "step_seconds": statistics.median(seconds[1:]),
        "peak_memory_bytes": peak,
        "trajectory_bytes": _trajectory_bytes(recipe, prompts, lengths),
    }


def _trajectory_bytes(recipe: Recipe, prompts: list[Prompt], lengths: list[int]) -> float:
    """What a trajectory takes in the trainer's memory, as it comes out of the journal."""
    source = _MadeUp(recipe, prompts, lengths, np.random.default_rng(1))
    buffer = Buffer(replace(recipe.replay.buffer, distinct=False), 1)
    before = resident_memory_bytes() or 0
    for i in range(_KEPT):
        prompt = prompts[i % len(prompts)]
        buffer.add(decode_trajectory(encode_trajectory(source.answer(prompt)), prompt))
    return max(0, (resident_memory_bytes() or 0) - before) / _KEPT


@dataclass
class _MadeUp:
    """Batches of B prompts and K made-up answers."""

    recipe: Recipe
    prompts: list[Prompt]
    lengths: list[int]
    rng: np.random.Generator

    def next(self) -> Fetched:
        chosen = self.rng.choice(len(self.prompts), size=self.recipe.groups_per_step)
        groups = [Group.of([self.answer(self.prompts[int(i)]) for _ in range(self.recipe.group_size)]) for i in chosen]
        return Fetched(groups, collate(groups))

    def answer(self, prompt: Prompt) -> Trajectory:
        n = int(self.rng.choice(self.lengths))
        tokens, ones = self.rng.choice(prompt.tokens, size=n).astype(np.int32), np.ones(n, np.float32)
        completion = Completion(tokens, "", StopReason.EXTERNAL, (Version(), Version()), log_behavior=-ones)
        uid, reward = self.rng.bytes(16).hex(), float(self.rng.integers(2))
        steps: dict[str, npt.NDArray[Any]] = {"step_start": np.zeros(1, np.int64), "step_value": ones[:1]}
        arrays = steps if "step_value" in self.recipe.objective.needs else {}
        return Trajectory(uid, prompt, completion, reward, -ones, Version(), arrays=arrays)


class _Nowhere:
    """A weight publisher that drops what it is given."""

    def publish(self, weights: Mapping[str, torch.Tensor], version: Version, manifest: Mapping[str, Json]) -> None:
        return None


def main(arguments: list[str]) -> None:
    """The half's figures as a line of JSON."""
    half, name, overrides, lengths = arguments[0], arguments[1], json.loads(arguments[2]), json.loads(arguments[3])
    recipe = override(find(name), overrides, f"tba check {name}")
    torch.set_num_threads(recipe.run.threads)
    found = search(recipe) if half == "searcher" else train(recipe, lengths)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
