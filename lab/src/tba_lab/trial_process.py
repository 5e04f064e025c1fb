"""One run of a study in a process of its own: `tba train`, then the measurements on its final weights.

    python -m tba_lab.trial_process '{"source": "FILE.py::tb-k4", "overrides": ["--seed", "1"], ...}'

Invariant: it shuts down in order when its study asks for it or has died: in both cases its standard input closes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tba.errors import TbaError, UserError
from tba.evaluation.divergence import divergence
from tba.protocols import Engine
from tba.recipe import Recipe
from tba.record.jsonl import write_json
from tba.record.live import View
from tba.record.run_record import RunRecord
from tba.record.show import closing_page
from tba.record.summary import Summary
from tba.record.terminal import terminal
from tba.runs.running import carry_out as make_run
from tba.runs.validating import validate
from tba.runtime.local.forkserver import prepare_forkserver
from tba.runtime.prompt_sets import prompts_of
from tba.runtime.run_directory import RunDirectory
from tba.settings import find, override
from tba.types import Json, Prompt, Version
from tba.weights.directory import WeightDirectory
from tba_lab.diversity import diversity
from tba_lab.figures import DIVERGENCE_FILE, DIVERSITY_FILE


def carry_out(order: dict[str, Any]) -> int:
    """Returns the exit code: 0, also when the run was stopped, 1 when it failed, 2 when it cannot be made."""
    source, overrides, path = order["source"], order["overrides"], Path(order["path"])
    try:
        if Summary.read(path) is None:
            recipe, view = override(find(source), overrides, f"tba train {source}"), View(terminal())
            for warning in validate(recipe):
                view.say(f"note: {warning}")
            make_run(recipe, source, overrides, path, view)
            view.console.print(closing_page(RunRecord.read(path)))
        summary = Summary.read(path)
        if summary is not None and not summary.faults.get("stopped"):
            recipe = override(find(source), overrides, f"tba train {source}")
            measure(recipe, RunDirectory.open(path), order["divergence"], order["diversity"])
    except TbaError as error:
        print(f"tba: {error}", file=sys.stderr)  # noqa: T201 - it is the study's log of this run
        return 2 if isinstance(error, UserError) else 1
    return 0


def measure(recipe: Recipe, run: RunDirectory, divergence_of: Sequence[int], diversity_of: Sequence[int]) -> None:
    """Writes `divergence.json` and `diversity.json` of a finished run, measured on the first held-out prompts.

    Each takes (prompts, samples of each), and is left out where one of them is 0.
    """
    if not (all(divergence_of) or all(diversity_of)):
        return
    torch.set_num_threads(recipe.run.threads)
    model = recipe.model.prepared(recipe.task)
    engine = model.engine(Version(), recipe.prompts.max_tokens)
    prompts = prompts_of(recipe, model, "eval")
    diversities = {}
    if all(diversity_of):
        diversities["before"] = _diversity(recipe, engine, prompts, diversity_of)
    weights = WeightDirectory(run.weights).newer_than(None)
    assert weights is not None  # a run that has finished has published its last weights
    engine.load(weights.read(), weights.version)
    if all(diversity_of):
        diversities["after"] = _diversity(recipe, engine, prompts, diversity_of)
        write_json(run.path / DIVERSITY_FILE, diversities)
    if all(divergence_of):
        figures = divergence(
            engine,
            model.reference(recipe.policy_temperature, Version()),
            recipe.task.reward(),
            prompts[: divergence_of[0]],
            divergence_of[1],
            np.random.default_rng([recipe.seed, 11]),
            policy_temperature=recipe.policy_temperature,
            chunk=recipe.evaluation.batch_size,
        )
        write_json(run.path / DIVERGENCE_FILE, asdict(figures))


def _diversity(recipe: Recipe, engine: Engine, prompts: Sequence[Prompt], size: Sequence[int]) -> dict[str, Json]:
    """Measures the diversity, with the same random numbers in every call."""
    figures = diversity(
        engine,
        recipe.task.reward(),
        prompts[: size[0]],
        size[1],
        np.random.default_rng([recipe.seed, 12]),
        threshold=recipe.evaluation.threshold,
        policy_temperature=recipe.policy_temperature,
        chunk=recipe.evaluation.batch_size,
    )
    return asdict(figures)


def _watch() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: the run ends where it is whole


def run(arguments: Sequence[str]) -> int:
    """Carries out the order in the only argument, JSON; returns the exit code."""
    prepare_forkserver()  # while there is one thread
    threading.Thread(target=_watch, name="study-watch", daemon=True).start()
    return carry_out(json.loads(arguments[0]))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
