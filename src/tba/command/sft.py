"""`tba sft`: supervised training on a recipe's own demonstrations, lines of prompt and response, or what a run found.

Of a file, the tenth that the `jsonl` task holds out (by a digest of the prompt) is not trained on.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from tba.command.collecting import SmoothingOptions, began_with, collect, is_run, run_recipe_of
from tba.errors import UserError
from tba.models.huggingface import FACTS, HuggingFace, WarmStart, continued, taught, warm_started
from tba.protocols import Task
from tba.settings import find, override
from tba.tasks.jsonl import Jsonl
from tba.weights.beside import folder_beside


@dataclass(frozen=True)
class SftOptions:
    """`tba sft FILE.jsonl`: which model, and how it is trained."""

    model: str = ""  # a folder or a Hub name to go on from; empty: a new small one
    warm_start: WarmStart = field(default_factory=WarmStart)


def make_model(name: str, overrides: list[str], out: Path) -> int:
    """Writes the model, its tokenizer and what it was made of to `out`. Raises `UserError` when that is not empty."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is there already: choose another --out, or remove it")
    console = Console()
    if is_run(Path(name)):
        made = _from_run(Path(name), overrides, console)
    else:
        task, start, path = _from_file(name, overrides) if name.endswith(".jsonl") else _from_recipe(name, overrides)
        made = (
            continued(path, start.sft, task, console.print)
            if path
            else warm_started(replace(start, shipped=None), task, console.print)
        )
    with folder_beside(out) as beside:
        for file in made.iterdir():
            shutil.copy2(file, beside / file.name)
    console.print(f"model in {out} ({(out / FACTS).read_text().strip()})", highlight=False)
    return 0


def _from_run(path: Path, overrides: list[str], console: Console) -> Path:
    options = override(SmoothingOptions(), overrides, f"tba sft {path}")
    recipe, journal = run_recipe_of(path)
    model, tokenizer = began_with(recipe, options)
    collected = collect(journal, options)
    left_out = "".join(f", {count:,} {reason}" for reason, count in collected.left_out.items() if count)
    console.print(f"{len(collected.trajectories):,} answers to learn{left_out}", highlight=False, soft_wrap=True)
    pairs = collected.pairs(tokenizer.eos_token_id)
    return taught(model, options.sft, lambda _: pairs, console.print)


def _from_file(name: str, overrides: list[str]) -> tuple[Task, WarmStart, str]:
    options = override(SftOptions(), overrides, f"tba sft {name}")
    task = Jsonl(train=Path(name))  # what it holds out for evaluation is not learnt here either
    return task, options.warm_start, options.model


def _from_recipe(name: str, overrides: list[str]) -> tuple[Task, WarmStart, str]:
    recipe = override(find(name), overrides, f"tba sft {name}")
    model = recipe.model
    if not isinstance(model, HuggingFace) or model.warm_start is None:
        raise UserError(
            f"recipe {name} has no warm start: give one to its model, a .jsonl file of prompt and response, or a run"
        )
    chosen = model.path if "--model.path" in [a.split("=")[0] for a in overrides] else ""
    return recipe.task, model.warm_start, chosen
