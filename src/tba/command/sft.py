"""`tba sft`: supervised training on a recipe's demonstrations, a file of prompts and responses, or a run's best
answers.

The share of a file that the task `Jsonl` holds out (a tenth, by a digest of the prompt) is not trained on, unless
`--held-out 0` is given.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from tba.command.collecting import SmoothingOptions, collect, initial_model, is_run, run_recipe_of
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.models.warm_start import FACTS, WarmStart, prepare_warm_start, teach_demonstrations, teach_pairs
from tba.protocols import Task
from tba.record.terminal import terminal
from tba.runs.output import OutOptions
from tba.runtime.teaching import is_chat
from tba.settings import find, override
from tba.tables import is_file_of_rows
from tba.tasks.jsonl import Jsonl
from tba.tasks.problem_rows import ProblemRow, read_rows
from tba.types import Json, Problem, Split
from tba.weights.atomic_dir import atomic_folder

_SMALLEST_SHARE = sys.float_info.min  # a share above 0, as `Jsonl` wants it, and below any digest


@dataclass(frozen=True)
class SftOptions:
    """Says which model is trained on a file, and how."""

    model: str = ""  # a folder or Hub name of the model to train further; empty: a new small one
    template_arguments: tuple[str, ...] = ()  # of its chat template, each name=value, such as enable_thinking=false
    held_out: float = 0.1  # share of prompts that are not trained on, the same that `Jsonl` holds out; 0: none
    min_reward: float | None = None  # leave out lines whose field `reward` is lower; none: learn all
    warm_start: WarmStart = field(default_factory=WarmStart)

    @property
    def unused(self) -> Mapping[str, str]:
        """Names the field without effect: a new small model has no chat template."""
        return {} if self.model else {"template_arguments": "model"}


def make_model(name: str, overrides: list[str], options: OutOptions) -> int:
    """Writes the model, its tokenizer and a record of how it was made to `--out`, which must be empty or new."""
    asks_for_help = {"--help", "-h"} & set(overrides)  # what follows prints the fields, and ends
    out = Path() if asks_for_help else options.new_folder()
    console = terminal()
    if is_run(Path(name)):
        model_folder = _from_run(Path(name), overrides, console)
    else:
        task, warm_start, model = (
            _from_file(name, overrides, console) if is_file_of_rows(name) else _from_recipe(name, overrides)
        )
        model_folder = (
            teach_demonstrations(model.path, warm_start.sft, task, console.print, model.template_arguments)
            if model.path
            else prepare_warm_start(replace(warm_start, shipped=None), task, console.print)
        )
    with atomic_folder(out) as temporary_folder:
        for file in model_folder.iterdir():
            shutil.copy2(file, temporary_folder / file.name)
    console.print(f"model in {out}: {_loss_sentence(json.loads((out / FACTS).read_text()))}", highlight=False)
    console.print("What to try next", style="bold")
    console.print(f"  tba train RECIPE --model.path {shlex.quote(str(out))}", highlight=False, soft_wrap=True)
    return 0


def _loss_sentence(facts: Mapping[str, Json]) -> str:
    """Returns a sentence on the losses of a trained model, from the record in its folder."""
    held_out, too_long = facts["held_out_loss"], facts["too_long"]
    return (
        f"loss {facts['loss']:.3f} at the last step, "
        + ("nothing held out" if held_out is None else f"{held_out:.3f} on what was held out")
        + (f"; {too_long:,} too long to be learnt" if too_long else "")
        + f" ({FACTS} says how it was made)"
    )


def _from_run(path: Path, overrides: list[str], console: Console) -> Path:
    options = override(SmoothingOptions(), overrides, f"tba sft {path}")
    recipe, journal = run_recipe_of(path, options.trust)
    model, tokenizer, arguments = initial_model(recipe, options)
    collection = collect(journal, options, recipe.replay.buffer.near_duplicates)
    omissions = "".join(f", {count:,} {reason}" for reason, count in collection.omissions.items() if count)
    console.print(f"{len(collection.trajectories):,} answers to learn{omissions}", highlight=False, soft_wrap=True)
    pairs = collection.pairs(tokenizer, is_chat(recipe.task))
    return teach_pairs(model, options.sft, lambda _: pairs, console.print, arguments)


def _from_file(name: str, overrides: list[str], console: Console) -> tuple[Task, WarmStart, HuggingFace]:
    options = override(SftOptions(), overrides, f"tba sft {name}")
    model = HuggingFace(options.model, template_arguments=options.template_arguments)
    if not 0 <= options.held_out < 1:
        raise UserError(f"--held-out is {options.held_out}: give the share of prompts not to teach, 0 to below 1")
    rows = read_rows(Path(name))
    task = Jsonl(train=Path(name), eval_fraction=max(options.held_out, _SMALLEST_SHARE))
    _require_responses(rows, task)
    held_out = len(rows) - len(task.problems("train"))
    console.print(f"{len(rows):,} lines, {held_out:,} held out (--held-out)", highlight=False)
    if options.min_reward is None:
        return task, options.warm_start, model
    filtered_task = _HighReward(train=task.train, eval_fraction=task.eval_fraction, min_reward=options.min_reward)
    learnt_count = len(filtered_task.problems("train"))
    console.print(f"{learnt_count:,} of the others have a reward of at least {options.min_reward:g}", highlight=False)
    return filtered_task, options.warm_start, model


def _require_responses(rows: Sequence[ProblemRow], task: Jsonl) -> None:
    for row in rows:
        if task.demonstration(row) is None:
            raise UserError(
                f"{row.place} has no field 'response' to learn: give lines of prompt and response, or of messages that "
                f"end with the assistant's; it has {', '.join(sorted(row.values)) or 'none'}"
            )


@dataclass(frozen=True)
class _HighReward(Jsonl):
    """Leaves out the problems of a file whose reward is below `min_reward`."""

    min_reward: float = 0.0

    def problems(self, split: Split) -> list[Problem]:
        rewards = ((p, p.fields.get("reward")) for p in super().problems(split))
        problems = [p for p, reward in rewards if isinstance(reward, int | float) and reward >= self.min_reward]
        if not problems and split == "train":
            raise UserError(
                f"{self.train} has no line to learn with a reward of at least {self.min_reward:g}: give a lower "
                "--min-reward"
            )
        return problems


def _from_recipe(name: str, overrides: list[str]) -> tuple[Task, WarmStart, HuggingFace]:
    recipe = find(name)
    if not isinstance(recipe.model, HuggingFace) or recipe.model.warm_start is None:
        raise UserError(
            f"recipe {name} has no warm start: give one to its model, a .jsonl file of prompt and response, or a run"
        )
    untrained_model = replace(recipe.model, path="")  # only --model.path says what to train further
    recipe = override(replace(recipe, model=untrained_model), overrides, f"tba sft {name}", recorded=True)
    model = recipe.model
    assert isinstance(model, HuggingFace)
    assert model.warm_start is not None
    return recipe.task, model.warm_start, model
