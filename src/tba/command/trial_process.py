"""One run of a study in a process of its own: `tba train`, then the distance to the reference that it has come to.

    python -m tba.command.trial_process '{"source": "staleness::tb-k4", "overrides": ["--seed", "1"], ...}'

Invariant: it ends, in order, when its study asks or is gone: either way its standard input comes to an end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tba.command.train import run_recipe
from tba.errors import TbaError, UserError
from tba.evaluate.divergence import divergence
from tba.recipe import Recipe
from tba.record.figures import DIVERGENCE_FILE
from tba.record.jsonl import write_json
from tba.record.summary import Summary
from tba.runtime.directory import RunDirectory
from tba.runtime.searching import prompts_of
from tba.settings import find, override
from tba.types import Version
from tba.weights.directory import WeightDirectory


def carry_out(order: dict[str, Any]) -> int:
    """The exit code: 0, also when the run was stopped, 1 when it failed, 2 when it cannot be made."""
    source, overrides, path = order["source"], order["overrides"], Path(order["path"])
    try:
        if Summary.read(path) is None:
            run_recipe(source, overrides, path.parent, path.name)
        summary = Summary.read(path)
        if order["prompts"] and summary is not None and not summary.faults.get("stopped"):
            recipe = override(find(source), overrides, f"tba train {source}")
            measure(recipe, RunDirectory.open(path), order["prompts"], order["samples"])
    except TbaError as error:
        print(f"tba: {error}", file=sys.stderr)  # noqa: T201 - it is the study's log of this run
        return 2 if isinstance(error, UserError) else 1
    return 0


def measure(recipe: Recipe, run: RunDirectory, prompts: int, samples: int) -> None:
    """`divergence.json` of a run that has finished: its last weights on the first held-out prompts."""
    torch.set_num_threads(recipe.run.threads)
    model = recipe.model.prepared(recipe.task)
    engine = model.engine(Version())
    weights = WeightDirectory(run.weights).newer_than(None)
    assert weights is not None  # a run that has finished has published its last weights
    engine.load(weights.read(), weights.version)
    found = divergence(
        engine,
        model.reference(recipe.policy_temperature, Version()),
        recipe.task.reward(),
        prompts_of(recipe, model.tokenizer(), "eval")[:prompts],
        samples,
        np.random.default_rng([recipe.seed, 11]),
        policy_temperature=recipe.policy_temperature,
        chunk=recipe.evaluation.chunk,
    )
    write_json(run.path / DIVERGENCE_FILE, asdict(found))


def _watch() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: the run ends where it is whole


if __name__ == "__main__":
    threading.Thread(target=_watch, name="study-watch", daemon=True).start()
    sys.exit(carry_out(json.loads(sys.argv[1])))
