"""Where the time of a trainer's step goes: attention, linear layers, head, optimizer, the rest.

    python lab/benchmarks/step_parts.py instruct --model.path smollm2 [--answer 32] [--repeats 3]

Steps of the recipe's own trainer (its model, objective, groups, passes and threads; no searcher), on answers of random
tokens to its own prompts, half of them `--answer` tokens long and half of them as long again. All options but these two
override the recipe, as those of `tba train` do. One step warms up, then torch's profiler adds up the time of each
operation without those within it. That slows the steps of a small model several times, and of a large one by little:
both times are printed. An operation belongs to the innermost of these parts around it:

- head: log-probabilities of tokens from hidden states, and products with a side of the vocabulary;
- attention: the fused kernels, and the merging of prompt and answer;
- linear layers: products of matrices, adapters with them;
- optimizer: all within its step;
- rest: norms, activations, rotary embeddings, copies, the loss, and Python between the operations.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import numpy as np
import torch
from torch.autograd.profiler_util import FunctionEvent

from tba.batch import FetchedBatch, collate
from tba.models.arithmetic import shape_of
from tba.runtime.prompt_sets import prompts_of
from tba.runtime.ranks.start import start_policy, start_ranks
from tba.settings import find, override
from tba.training.ranks.messages import RankSettings
from tba.training.trainer import Trainer
from tba.types import Completion, Group, Prompt, StopReason, Trajectory, Version
from tba.weights.directory import WeightDirectory

HEAD, ATTENTION, LINEAR, OPTIMIZER, REST = "head", "attention", "linear layers", "optimizer", "rest"
NAMES = {  # part -> what the names of its operations contain
    OPTIMIZER: ("Optimizer.step", "_foreach_", "clip_grad"),
    HEAD: ("TokenLogProbabilities",),
    ATTENTION: ("scaled_dot_product", "_flash_attention", "_Merged", "_Windowed"),
    LINEAR: (
        "_AdaptedLinear",
        "aten::linear",
        "aten::mm",
        "aten::addmm",
        "aten::matmul",
        "AddmmBackward",
        "MmBackward",
    ),
}


def part_of(event: FunctionEvent | None, vocabulary: int) -> str:
    """The part of the innermost operation around this one, or of itself, that has one."""
    while event is not None:
        shapes: Iterable[Any] = event.input_shapes or ()
        for part, names in NAMES.items():
            if any(name in event.name for name in names):
                sides = {side for shape in shapes if isinstance(shape, list) for side in shape}
                return HEAD if part == LINEAR and vocabulary in sides else part
        event = event.cpu_parent
    return REST


def batch(
    prompts: list[Prompt], vocabulary: int, groups: int, size: int, answer: int, rng: np.random.Generator
) -> FetchedBatch:
    batch_groups = []
    for i in rng.choice(len(prompts), groups):
        rows = []
        for j in range(size):
            length = answer * (1 + j % 2)
            tokens = rng.integers(1, vocabulary, length).astype(np.int32)
            completion = Completion(
                tokens, "", StopReason.EOS, (Version(), Version()), log_behavior=np.full(length, -1.0, np.float32)
            )
            log_reference = np.full(length, -1.0, np.float32)
            reward = float(rng.integers(2))
            rows.append(Trajectory(rng.bytes(16).hex(), prompts[int(i)], completion, reward, log_reference, Version()))
        batch_groups.append(Group.of(rows))
    return FetchedBatch(batch_groups, collate(batch_groups))


def measured(trainer: Trainer, batches: Iterable[FetchedBatch], vocabulary: int) -> tuple[dict[str, float], float]:
    """Seconds of each part over the steps, and of the steps whole."""
    parts = dict.fromkeys((*NAMES, REST), 0.0)
    began = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for fetched in batches:
            trainer.step(fetched)
    whole = time.perf_counter() - began
    for event in profile.events() or ():
        parts[part_of(event, vocabulary)] += event.self_cpu_time_total / 1e6
    parts[REST] += whole - sum(parts.values())
    return parts, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("recipe")
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    settings, options = parser.parse_known_args()
    recipe = override(find(settings.recipe), options, settings.recipe)
    torch.set_num_threads(recipe.run.threads)
    recipe = replace(recipe, model=recipe.model.prepared(recipe.task), trainer=RankSettings())
    prompts = prompts_of(recipe, recipe.model, "train")
    policy, optimizer = start_policy(recipe, start_ranks(recipe, 0), None)
    shape = shape_of(recipe.model)
    assert shape is not None
    vocabulary = shape.vocabulary
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            policy=policy,
            objective=recipe.objective,
            weights=WeightDirectory(Path(scratch) / "weights", dtype=recipe.model.compute),
            optimizer=optimizer,
            sync_every=recipe.sync_every,
            max_tokens_per_pass=recipe.max_tokens_per_pass,
            directory=Path(scratch),
        )
        batches = [
            batch(prompts, vocabulary, recipe.groups_per_step, recipe.group_size, settings.answer, rng)
            for _ in range(1 + settings.repeats)
        ]
        trainer.step(batches[0])
        began = time.perf_counter()
        for fetched in batches[1:]:
            trainer.step(fetched)
        plain = (time.perf_counter() - began) / settings.repeats
        parts, whole = measured(trainer, batches[1:], vocabulary)
    tokens = sum(int(f.batch.prompt_length_G.sum() + f.batch.length_B.sum()) for f in batches[1:]) / settings.repeats
    print(
        f"a step of {recipe.groups_per_step} x {recipe.group_size} answers, {tokens:,.0f} tokens with the prompts: "
        f"{plain:.3g} s ({whole / settings.repeats:.3g} s under the profiler)"
    )
    for part, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        print(f"{part:14} {seconds / settings.repeats:8.3f} s {100 * seconds / whole:5.1f} %")


if __name__ == "__main__":
    main()
