"""`tba train`: runs a recipe from start to end, with a live view, a summary and suggestions what to do next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from tba.command.options import TrainOptions
from tba.errors import UserError
from tba.recipe import InitialFill, Recipe
from tba.record.live import View
from tba.record.run_record import RunRecord
from tba.record.show import closing_page
from tba.record.summary import Summary
from tba.record.terminal import terminal
from tba.runs.running import carry_out, steps_in
from tba.runs.validating import require_ray, validate
from tba.runtime.importing import is_prepared
from tba.runtime.run_directory import RunDirectory, new_path
from tba.settings import find, keep_last_values, override

WARM_UP = "--replay.pacing.warm-up"
_BUSY_LOAD = 0.5  # load per core, before the run begins, from which the machine counts as busy


def run_recipe(name: str, overrides: list[str], options: TrainOptions) -> int:
    """Returns exit code 0 when the run has made all its steps, 130 or 143 when Ctrl-C or SIGTERM ended it before."""
    console, data = terminal(), options.data
    view = View(console)
    overrides = keep_last_values(overrides)  # the rate is to last as long as the last --steps
    recipe = override(find(name), overrides, f"tba train {name}")
    if options.epochs is not None:
        if "--steps" in {word.partition("=")[0] for word in overrides}:
            raise UserError("--epochs and --steps both say how long the run is: give one of them")
        overrides = [*overrides, "--steps", str(steps_in(recipe, options.epochs))]
        recipe = override(find(name), overrides, f"tba train {name}")
    path = new_path(options.runs, recipe.name, options.run_name)
    code = _code_from_elsewhere(recipe, ["train", name, *overrides], path, options)
    if code is not None:
        return code
    if recipe.offline:
        recipe, overrides = _without_warm_up(recipe, name, overrides, path, data)
    for warning in validate(recipe):
        view.say(f"note: {warning}")
    console.print(": ".join(filter(None, (recipe.name, recipe.description))), highlight=False)
    warn_if_busy(console)
    run, summary, code = carry_out(recipe, name, overrides, path, view, data)
    return closing_words(console, recipe, [name, *overrides], run, summary, code)


def _code_from_elsewhere(recipe: Recipe, words: list[str], path: Path, options: TrainOptions) -> int | None:
    """Returns the exit code of the command on the node that can hold the trainer; None: it is to run here."""
    data = [] if options.data is None else ["--data", str(options.data)]
    return code_from_trainers_node(recipe, [*words, "--runs", str(path.parent), "--run-name", path.name, *data])


def code_from_trainers_node(recipe: Recipe, words: list[str]) -> int | None:
    """Runs `tba WORDS` on the node of a cluster that can hold the trainer, and returns its exit code; None: it is to
    run here.
    """
    if recipe.runtime != "cluster":
        return None
    require_ray()
    from tba.runtime.cluster.relocation import run_on_trainers_node

    show = partial(terminal().print, end="", markup=False, highlight=False, soft_wrap=True)
    return run_on_trainers_node(recipe, words, show)


def warn_if_busy(console: Console) -> None:
    """Print a note when other programs are using the processors."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if load > _BUSY_LOAD:
        console.print(f"note: this machine is busy (load {load:.1f} per core): it may take longer", style="yellow")


def closing_words(
    console: Console, recipe: Recipe, words: Sequence[str], run: RunDirectory, summary: Summary, code: int
) -> int:
    """Prints the summary, next steps and any ledger that does not close, and returns `code`."""
    console.print(closing_page(RunRecord.read(run.displayed_path)))
    console.print("\nWhat to try next", style="bold")
    for line in next_steps(recipe, words, run, summary, code):  # not wrapped, so that it can be copied
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    for unit, ledger in (("tokens", summary.tokens), ("trajectories", summary.trajectories)):
        if not ledger.closes():
            console.print(f"the ledger of {unit} does not close: {ledger.difference} unaccounted for", style="red")
    return code


def _without_warm_up(
    recipe: Recipe, name: str, overrides: list[str], path: Path, data: Path | None
) -> tuple[Recipe, list[str]]:
    """Returns the recipe without a warm-up, since no more data will arrive. Raises `UserError` when it has no data."""
    if data is None and not is_prepared(path) and recipe.fill == InitialFill():
        raise UserError(
            "--offline learns from trajectories that are there, but a new run has none: give --data FILE or --data "
            "RUN, or the --run-name of a run that `tba import` made, or have the recipe begin with some (--fill)"
        )
    if not any(argument.split("=")[0] == WARM_UP for argument in overrides):
        overrides = [*overrides, WARM_UP, "0"]
    return override(find(name), overrides, f"tba train {name}"), overrides


def next_steps(recipe: Recipe, words: Sequence[str], run: RunDirectory, summary: Summary, code: int) -> list[str]:
    """Returns what to try next, as commands that can be copied; `words` are the recipe's name and its settings."""
    path, inline_words = shlex.quote(str(run.displayed_path)), keep_last_values([*words, "--runtime", "inline"])
    commands = {
        f"tba show {path}": "this page again, its course and all counts",
        f"tba report {path}": "curves that zoom and all answers to read, as one page: report.html",
        f"tba eval {path}": "any figure on its newest checkpoint",
    }
    if recipe.runtime != "inline" and _is_a_recipe(inline_words):
        commands[f"tba train {shlex.join(inline_words)}"] = "the same in one process, taking turns"
    if not words[0].endswith(".py"):
        commands["tba example my_task"] = "your own task: a file to change"
    stop_point = "before its last step" if code else "in its last evaluation"
    resume_lines = [f"the run was stopped {stop_point}; this continues it:", f"tba resume {path}"]
    stop_lines = resume_lines if summary.faults.get("stopped") else []
    return [*stop_lines, *(line for command, meaning in commands.items() for line in (f"# {meaning}", command))]


def _is_a_recipe(words: Sequence[str]) -> bool:
    """Returns whether a recipe's name and its settings can be given to `tba train` as they are."""
    try:
        return override(find(words[0]), words[1:], "tba train") is not None
    except UserError:
        return False
