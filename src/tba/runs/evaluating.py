"""Measures the accuracy of any checkpoint on a recipe's task."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tba.errors import UserError
from tba.evaluation.accuracy import Assessment, EvaluationSettings, assess_accuracy
from tba.models.huggingface import HuggingFace
from tba.models.source import refuse_missing_model
from tba.protocols import Engine, path_of
from tba.recipe import Recipe
from tba.runtime.engines import engine_of
from tba.runtime.graders import grader_of
from tba.runtime.isolation import RecipeSource
from tba.runtime.prompt_sets import prompts_of
from tba.runtime.run_directory import RunDirectory
from tba.settings import find, override
from tba.training.checkpoint import RUN as CHECKPOINT
from tba.training.checkpoint import Checkpoint, newest_checkpoint
from tba.types import Prompt, Version


def recipe_of(name: str, overrides: Sequence[str], program: str, checkpoint: str | None) -> tuple[Recipe, str | None]:
    """Returns a recipe by name, path or the folder of a run, whose own newest checkpoint is meant if none is given."""
    if not (Path(name) / "recipe.json").is_file():
        return override(find(name), overrides, program), checkpoint
    return override(RunDirectory.open(Path(name)).recipe(), overrides, program), checkpoint or name


def with_checkpoint(recipe: Recipe, checkpoint: str | None) -> Recipe:
    """Returns the recipe with the weights of a folder, a run (its newest checkpoint) or a Hub name."""
    if checkpoint is None:
        return recipe
    if not isinstance(recipe.model, HuggingFace):
        raise UserError(f"recipe {recipe.name} does not use a Hugging Face model: leave --checkpoint out")
    path = Path(checkpoint)
    refuse_missing_model(checkpoint)
    if (path / "recipe.json").is_file():
        newest = newest_checkpoint(RunDirectory.open(path).checkpoints)
        if newest is None:
            raise UserError(f"the run at {path} has no checkpoint yet: give another, or wait for one")
        path = newest.path
    return replace(recipe, model=replace(recipe.model, path=str(path) if path.exists() else checkpoint))


def assess_recipe(
    recipe: Recipe,
    split: str,
    settings: EvaluationSettings,
    report: Callable[[int, int], object] = lambda answered, total: None,
    source: RecipeSource | None = None,
) -> tuple[Assessment, Engine, list[Prompt]]:
    """Returns the figures of a recipe's model on a split, the engine that answered, and the prompts.

    report: is called between two batches with how many questions of how many have been answered. source: what rebuilds
    the recipe in another process, should its reward have to run there.
    """
    if split not in ("train", "eval"):
        raise UserError(f"--split is {split!r}: give train or eval")
    torch.set_num_threads(recipe.run.threads)
    model = recipe.model.prepared(recipe.task)
    prompts = prompts_of(recipe, model, "train" if split == "train" else "eval")
    engine = engine_of(recipe, model, _version_at(path_of(model)))
    grader, start_time = grader_of(recipe, source, "eval"), time.monotonic()
    with chdir("."):  # the caller's paths begin where they began, wherever a reward goes
        assessment = assess_accuracy(
            engine,
            prompts,
            grader,
            settings,
            np.random.default_rng([recipe.seed, 7]),
            now=lambda: time.monotonic() - start_time,
            policy_temperature=recipe.policy_temperature,
            between_batches=_QuestionCount(len(prompts), settings, report),
        )
    return assessment, engine, prompts


def _version_at(path: str) -> Version:
    """Returns the version of the weights in a run's checkpoint; of a model that no run made, the first."""
    return Checkpoint.load(Path(path)).version if (Path(path) / CHECKPOINT).is_file() else Version()


class _QuestionCount:
    """Counts the questions of an evaluation, batch by batch."""

    def __init__(self, prompts: int, settings: EvaluationSettings, report: Callable[[int, int], object]) -> None:
        self.problems = min(prompts, settings.problems or prompts)
        self.passes = settings.greedy + (settings.draws > 0)
        self.batches_per_pass, self.batches = -(-self.problems // settings.batch_size), 0
        self.batch_size, self.report = settings.batch_size, report

    def __call__(self) -> None:
        self.batches += 1
        passes, batches = divmod(self.batches, self.batches_per_pass)
        self.report(passes * self.problems + batches * self.batch_size, self.problems * self.passes)
