"""`tba eval`: the held-out (or training) accuracy of any checkpoint on a recipe's task."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from tba.errors import UserError
from tba.evaluate.accuracy import evaluate
from tba.evaluate.estimators import wilson_interval
from tba.models.huggingface import HuggingFace
from tba.recipe import Recipe
from tba.record.jsonl import write_json
from tba.runtime.directory import RunDirectory
from tba.runtime.searching import prompts_of
from tba.settings import find, override
from tba.train.checkpoint import newest_checkpoint
from tba.types import Version


def evaluate_model(name: str, overrides: list[str], checkpoint: str | None, split: str, out: Path | None) -> int:
    """Prints each metric with its 95 % interval; per-problem scores go to `out`."""
    if split not in ("train", "eval"):
        raise UserError(f"--split is {split!r}: give train or eval")
    recipe = override(find(name), overrides, f"tba eval {name}")
    recipe = with_checkpoint(recipe, checkpoint)
    torch.set_num_threads(recipe.run.threads)
    model = recipe.model.prepared(recipe.task)
    prompts = prompts_of(recipe, model.tokenizer(), "train" if split == "train" else "eval")
    found = evaluate(
        model.engine(Version()),
        prompts,
        recipe.task.reward(),
        recipe.evaluation,
        np.random.default_rng([recipe.seed, 7]),
        now=time.monotonic,
        policy_temperature=recipe.policy_temperature,
    )
    console = Console()
    for e in found.evaluations:
        interval = wilson_interval(round(e.value * e.n), e.n)
        console.print(
            f"{e.metric:16} {e.value:7.2%}   95 % interval {interval.low:.2%} to {interval.high:.2%}   "
            f"{e.n} {split} problems",
            highlight=False,
        )
    console.print(f"{found.tokens} tokens in {found.seconds:.1f} s", highlight=False)
    if out is not None:
        scores = {metric: [float(v) for v in values] for metric, values in found.scores.items()}
        write_json(
            out, {"recipe": name, "overrides": overrides, "checkpoint": checkpoint, "split": split, "scores": scores}
        )
    return 0


def with_checkpoint(recipe: Recipe, checkpoint: str | None) -> Recipe:
    """The recipe with the weights of a folder, a run (its newest checkpoint) or a Hub name."""
    if checkpoint is None:
        return recipe
    if not isinstance(recipe.model, HuggingFace):
        raise UserError(f"recipe {recipe.name} is not of a Hugging Face model: leave --checkpoint out")
    path = Path(checkpoint)
    if (path / "recipe.json").is_file():
        newest = newest_checkpoint(RunDirectory.open(path).checkpoints)
        if newest is None:
            raise UserError(f"the run at {path} has no checkpoint yet: give another, or let it go on")
        path = newest.path
    return replace(recipe, model=replace(recipe.model, path=str(path) if path.exists() else checkpoint))
