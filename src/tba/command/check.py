"""`tba check`: resolve a recipe, validate it, estimate its memory and time; run nothing.

The estimate times a few rounds and steps of the recipe's own parts on made-up answers and multiplies: no run directory,
no journal, no learning.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console

from tba.errors import UserError
from tba.recipe import Recipe
from tba.record.memory import machine_memory_bytes, peak_memory_bytes, resident_memory_bytes
from tba.record.text import duration, size
from tba.runtime.searching import prompts_of
from tba.settings import find, override
from tba.types import Version

_PROBES = 3  # steps timed, after one that warms up


def validate(recipe: Recipe) -> list[str]:
    """Warnings. Raises `UserError` for what cannot run."""
    warnings = []
    if not recipe.exploration.full_support:
        warnings.append(
            "no searcher's sampling has full support (top-p below 1 or temperature 0): Trajectory Balance determines "
            "the policy only on what can be sampled; set --exploration.top-p 1 to determine it everywhere"
        )
    if recipe.samples_per_prompt < recipe.group_size:
        warnings.append(
            f"S = {recipe.samples_per_prompt} samples per prompt are fewer than K = {recipe.group_size}: groups stay "
            "ragged until a prompt comes round again; set --samples-per-prompt higher"
        )
    missing = recipe.objective.needs - {"log_behavior"}
    if missing:
        warnings.append(f"the objective needs {', '.join(sorted(missing))} of the policy")
    parts = recipe.searchers + 1
    cores = os.cpu_count() or 1
    if recipe.runtime == "processes" and parts * recipe.run.threads > cores and not torch.cuda.is_available():
        warnings.append(f"{parts} processes share {cores} cores: the halves will slow each other down")
    return warnings


def check_recipe(name: str, overrides: list[str]) -> int:
    """Prints the recipe, warnings and the estimate."""
    recipe = override(find(name), overrides, f"tba check {name}")
    console = Console()
    console.print(f"{recipe.name}: {recipe.description}", highlight=False)
    for warning in validate(recipe):
        console.print(f"warning: {warning}", style="yellow")
    e = estimate(recipe)
    own = machine_memory_bytes()
    console.print(
        f"a round generates {e.tokens_per_round:.0f} tokens in {duration(e.round_seconds)}, "
        f"a step takes {duration(e.step_seconds)}\n"
        f"uses per trajectory at these speeds: {e.uses:.1f} (limit {recipe.replay.pacing.max_mean_uses:g})\n"
        f"time: {duration(e.total_seconds)} for {recipe.steps} steps, of which start-up {duration(e.start_seconds)} "
        f"and evaluation {duration(e.evaluation_seconds)}\n"
        f"peak memory: trainer {size(e.trainer_bytes)}, each searcher {size(e.searcher_bytes)}"
        + (f"; this machine has {size(own)}" if own else ""),
        highlight=False,
    )
    total = e.trainer_bytes + recipe.searchers * e.searcher_bytes
    if own and total > own:
        raise UserError(
            f"the run needs about {size(total)} of memory and this machine has {size(own)}: "
            "use a smaller model, fewer searchers or a smaller --max-tokens-per-pass"
        )
    return 0


@dataclass(frozen=True)
class Estimate:
    """Seconds and bytes, measured on a few rounds and steps and multiplied."""

    start_seconds: float
    round_seconds: float
    step_seconds: float
    tokens_per_round: float
    evaluation_seconds: float
    total_seconds: float
    uses: float
    trainer_bytes: int
    searcher_bytes: int


def estimate(recipe: Recipe) -> Estimate:
    """Both halves in this process, one after the other. Raises `UserError` for a missing model, file or field."""
    began = time.perf_counter()
    torch.set_num_threads(recipe.run.threads)
    model = recipe.model.prepared(recipe.task)
    tokenizer = model.tokenizer()
    prompts = prompts_of(recipe, tokenizer, "train")
    prompts_of(recipe, tokenizer, "eval")
    libraries = resident_memory_bytes() or 0
    engine = model.engine(Version())
    reference = model.reference(recipe.policy_temperature, Version())
    start_seconds = time.perf_counter() - began + _IMPORT_SECONDS
    rng = np.random.default_rng(0)
    round_seconds, trajectories = _time_round(recipe, engine, reference, prompts, rng)
    searcher_bytes = peak_memory_bytes()
    batch_seconds, trainer_bytes = _time_step(recipe, prompts, trajectories, libraries)
    tokens = sum(t.length for t in trajectories) / max(1, _PROBES)
    per_round = recipe.prompts_per_round * recipe.samples_per_prompt
    per_step = recipe.groups_per_step * recipe.group_size
    settings = recipe.evaluation
    answers = (settings.problems or len(prompts)) * (int(settings.greedy) + settings.draws)
    evaluations = 2 + (recipe.steps - 1) // settings.every if settings.every else 2
    evaluation_seconds = evaluations * answers * round_seconds / per_round
    warm_up = recipe.replay.pacing.warm_up / per_round * round_seconds
    searching = recipe.steps * per_step / recipe.replay.pacing.max_mean_uses / per_round * round_seconds
    if recipe.runtime == "inline":
        rounds = recipe.steps / recipe.sync_every * recipe.run.inline_rounds_per_sync
        working = recipe.steps * batch_seconds + rounds * round_seconds + evaluation_seconds
    else:
        working = max(recipe.steps * batch_seconds, searching / recipe.searchers) + 2 * evaluation_seconds / evaluations
    inserted = working / round_seconds * per_round * recipe.searchers
    return Estimate(
        start_seconds=start_seconds,
        round_seconds=round_seconds,
        step_seconds=batch_seconds,
        tokens_per_round=tokens,
        evaluation_seconds=evaluation_seconds,
        total_seconds=start_seconds + warm_up + working,
        uses=min(recipe.steps * per_step / max(inserted, 1), recipe.replay.pacing.max_mean_uses),
        trainer_bytes=trainer_bytes,
        searcher_bytes=searcher_bytes,
    )
