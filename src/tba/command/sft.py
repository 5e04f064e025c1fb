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

from tba.command.collecting import SmoothingOptions, began_with, collect, is_run, run_recipe_of
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
from tba.tasks.problem_rows import Row, read_rows
from tba.types import Json, Problem, Split
from tba.weights.atomic_dir import atomic_folder

_NONE = sys.float_info.min  # a share above 0, as `Jsonl` wants it, and below any digest


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
    asked = {"--help", "-h"} & set(overrides)  # what follows prints the fields, and ends
    out = Path() if asked else options.place()
    console = terminal()
    if is_run(Path(name)):
        made = _from_run(Path(name), overrides, console)
    else:
        task, start, model = (
            _from_file(name, overrides, console) if is_file_of_rows(name) else _from_recipe(name, overrides)
        )
        made = (
            teach_demonstrations(model.path, start.sft, task, console.print, model.template_arguments)
            if model.path
            else prepare_warm_start(replace(start, shipped=None), task, console.print)
        )
    with atomic_folder(out) as temporary:
        for file in made.iterdir():
            shutil.copy2(file, temporary / file.name)
    console.print(f"model in {out}: {_learned(json.loads((out / FACTS).read_text()))}", highlight=False)
    console.print("What to try next", style="bold")
    console.print(f"  tba train RECIPE --model.path {shlex.quote(str(out))}", highlight=False, soft_wrap=True)
    return 0


def _learned(facts: Mapping[str, Json]) -> str:
    """Returns how well the model predicts what it was taught, from the record beside it."""
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
    model, tokenizer, arguments = began_with(recipe, options)
    collected = collect(journal, options, recipe.replay.buffer.near)
    left_out = "".join(f", {count:,} {reason}" for reason, count in collected.left_out.items() if count)
    console.print(f"{len(collected.trajectories):,} answers to learn{left_out}", highlight=False, soft_wrap=True)
    pairs = collected.pairs(tokenizer, is_chat(recipe.task))
    return teach_pairs(model, options.sft, lambda _: pairs, console.print, arguments)


def _from_file(name: str, overrides: list[str], console: Console) -> tuple[Task, WarmStart, HuggingFace]:
    options = override(SftOptions(), overrides, f"tba sft {name}")
    model = HuggingFace(options.model, template_arguments=options.template_arguments)
    if not 0 <= options.held_out < 1:
        raise UserError(f"--held-out is {options.held_out}: give the share of prompts not to teach, 0 to below 1")
    rows = read_rows(Path(name))
    task = Jsonl(train=Path(name), eval_fraction=max(options.held_out, _NONE))
    _require_responses(rows, task)
    held_out = len(rows) - len(task.problems("train"))
    console.print(f"{len(rows):,} lines, {held_out:,} held out (--held-out)", highlight=False)
    if options.min_reward is None:
        return task, options.warm_start, model
    better = _Better(train=task.train, eval_fraction=task.eval_fraction, least=options.min_reward)
    learnt = len(better.problems("train"))
    console.print(f"{learnt:,} of the others have a reward of at least {options.min_reward:g}", highlight=False)
    return better, options.warm_start, model


def _require_responses(rows: Sequence[Row], task: Jsonl) -> None:
    for row in rows:
        if task.demonstration(row) is None:
            raise UserError(
                f"{row.place} has no field 'response' to learn: give lines of prompt and response, or of messages that "
                f"end with the assistant's; it has {', '.join(sorted(row.values)) or 'none'}"
            )


@dataclass(frozen=True)
class _Better(Jsonl):
    """Leaves out of a file's problems those whose reward is low."""

    least: float = 0.0

    def problems(self, split: Split) -> list[Problem]:
        kept = [p for p in super().problems(split) if self._is_good(p.fields.get("reward"))]
        if not kept and split == "train":
            raise UserError(
                f"{self.train} has no line to learn with a reward of at least {self.least:g}: give a lower --min-reward"
            )
        return kept

    def _is_good(self, reward: Json) -> bool:
        return isinstance(reward, int | float) and reward >= self.least


def _from_recipe(name: str, overrides: list[str]) -> tuple[Task, WarmStart, HuggingFace]:
    begun = find(name)
    if not isinstance(begun.model, HuggingFace) or begun.model.warm_start is None:
        raise UserError(
            f"recipe {name} has no warm start: give one to its model, a .jsonl file of prompt and response, or a run"
        )
    begun = replace(begun, model=replace(begun.model, path=""))  # --model.path says what to train further, not this
    recipe = override(begun, overrides, f"tba sft {name}", recorded=True)
    model = recipe.model
    assert isinstance(model, HuggingFace)
    assert model.warm_start is not None
    return recipe.task, model.warm_start, model
