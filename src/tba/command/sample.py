"""`tba sample`: samples answers of a recipe's model to its own prompts, graded by its reward, one answer per line.

    tba sample RECIPE --out FILE [--samples 4] [--prompts N] [--split train] [--field value ...]

`tba import`, `tba sft` and `tba reward-model` read such a file; with a gold model as the reward, the answers to one
prompt are the pairs that a proxy is trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import chdir

import numpy as np
import torch

from tba.command.options import SampleOptions
from tba.errors import UserError
from tba.generation import generate
from tba.grading import Grader
from tba.protocols import Engine
from tba.recipe import Recipe
from tba.record.jsonl import atomic_replacement
from tba.record.terminal import terminal
from tba.runs.evaluating import recipe_of, with_checkpoint
from tba.runtime.engines import engine_of
from tba.runtime.graders import grader_of
from tba.runtime.isolation import RecipeSource
from tba.runtime.prompt_sets import prompts_of
from tba.types import Json, Prompt, Sampling, Version


def write_samples(name: str, overrides: list[str], options: SampleOptions) -> int:
    """Writes the answers; their file appears once it is complete. Raises `UserError` when it exists already, or no
    --out is given.
    """
    recipe = with_checkpoint(*recipe_of(name, overrides, f"tba sample {name}", options.checkpoint))
    if options.out is None:
        raise UserError("tba sample needs --out FILE: where the answers go, as JSON Lines")
    if options.out.exists():
        raise UserError(f"{options.out} is there already: choose another --out, or remove it")
    torch.set_num_threads(recipe.run.threads)
    model = recipe.model.prepared(recipe.task)
    prompts = prompts_of(recipe, model, "train" if options.split == "train" else "eval")
    prompts = prompts[: options.prompts] if options.prompts else prompts
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rewards: list[float] = []
    with (
        atomic_replacement(options.out) as temporary_path,
        temporary_path.open("w", encoding="utf-8") as file,
        chdir("."),
    ):
        grader = grader_of(recipe, RecipeSource(name, overrides))
        for line in _lines(recipe, grader, engine_of(recipe, model, Version()), prompts, options.samples):
            rewards += [] if line["reward"] is None else [line["reward"]]
            file.write(json.dumps(line) + "\n")
    mean, deviation = (float(np.mean(rewards)), float(np.std(rewards))) if rewards else (math.nan, math.nan)
    terminal().print(
        f"{options.samples} answers to each of {len(prompts):,} prompts in {options.out}: reward {mean:.3f} "
        f"± {deviation:.3f}",
        highlight=False,
    )
    return 0


def _lines(
    recipe: Recipe, grader: Grader, engine: Engine, prompts: list[Prompt], samples: int
) -> Iterator[dict[str, Json]]:
    """Yields one line per answer, prompt by prompt in order; a reward that is not finite is null."""
    rng = np.random.default_rng([recipe.seed, 13])
    for start in range(0, len(prompts), recipe.evaluation.batch_size):
        chunk = prompts[start : start + recipe.evaluation.batch_size]
        completions = generate(engine, chunk, samples, Sampling(recipe.policy_temperature), rng)
        grades = iter(grader.judge([(p, c) for p, row in zip(chunk, completions, strict=True) for c in row]))
        for prompt, row in zip(chunk, completions, strict=True):
            for completion in row:
                reward = next(grades).reward
                yield {
                    "prompt": prompt.text,
                    "response": completion.text,
                    "reward": reward if math.isfinite(reward) else None,
                    "stop_reason": completion.stop_reason.value,
                }
