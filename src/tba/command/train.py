"""`tba train`: runs a recipe from start to end, with a live view, a summary and suggestions what to do next."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from tba.command.check import notes_on_data, notes_on_prompts, validate
from tba.command.importing import fill, refuse, take_in
from tba.command.options import ImportOptions, TrainOptions
from tba.command.weights import with_weights
from tba.errors import PartFailed, TbaError, UserError
from tba.foreign import problems_of
from tba.recipe import InitialFill, Recipe
from tba.record.callbacks import Callbacks
from tba.record.failure import Failure
from tba.record.live import STATUS_SECONDS, LiveView
from tba.record.recorder import TensorBoardEvents
from tba.record.run_record import RunRecord
from tba.record.show import closing_page
from tba.record.summary import Summary
from tba.record.terminal import terminal
from tba.replay.database import suspect_mark
from tba.runtime.checkpointing import loss_of, note_recoveries
from tba.runtime.disk import outside_cause
from tba.runtime.importing import is_prepared, take_over
from tba.runtime.inline import Inline
from tba.runtime.local.forkserver import prepare
from tba.runtime.local.processes import Processes
from tba.runtime.reporting import Progress, summarise
from tba.runtime.run_directory import RunDirectory, new_path
from tba.runtime.sizing import Machine, places_on, refuse_what_cannot_fit, sized, unused
from tba.runtime.supervisor import Driver
from tba.settings import find, newest_of_each, override

_LOOK = 0.5  # seconds between two updates of the live view
WARM_UP = "--replay.pacing.warm-up"
_BUSY = 0.5  # load per core, before the run begins, from which the machine counts as busy


def run_recipe(name: str, overrides: list[str], options: TrainOptions) -> int:
    """Returns exit code 0 when the run has made all its steps, 130 or 143 when Ctrl-C or SIGTERM ended it before."""
    console, data = terminal(), options.data
    recipe = override(find(name), overrides, f"tba train {name}")
    if options.epochs is not None:
        if "--steps" in {word.partition("=")[0] for word in overrides}:
            raise UserError("--epochs and --steps both say how long the run is: give one of them")
        overrides = [*overrides, "--steps", str(steps_in(recipe, options.epochs))]
        recipe = override(find(name), overrides, f"tba train {name}")
    path = new_path(options.runs, recipe.name, options.run_name)
    if recipe.offline:
        recipe, overrides = _offline(recipe, name, overrides, path, data)
    for warning in validate(recipe):
        console.print(f"note: {warning}", style="yellow")
    console.print(": ".join(filter(None, (recipe.name, recipe.description))), highlight=False)
    warn_if_busy(console)
    run, summary, code = carry_out(recipe, name, overrides, path, console, data)
    return closing_words(console, recipe, [name, *overrides], run, summary, code)


def steps_in(recipe: Recipe, epochs: float) -> int:
    """Returns how many optimizer steps have as many groups as `epochs` passes over the training prompts."""
    if not 0 < epochs < math.inf:
        raise UserError(f"--epochs is {epochs}: give a number above 0")
    prompts = len(problems_of(recipe.task, "train")[: recipe.prompts.limit])
    return math.ceil(round(epochs * prompts / recipe.groups_per_step, 6))


def warn_if_busy(console: Console) -> None:
    """Print a note when other programs are using the processors."""
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    if busy > _BUSY:
        console.print(
            f"note: this machine is busy (load {busy:.1f} per core): expect it to take longer", style="yellow"
        )


def closing_words(
    console: Console, recipe: Recipe, given: Sequence[str], run: RunDirectory, summary: Summary, code: int
) -> int:
    """Print the summary and next steps, and a ledger that does not close; returns `code`."""
    console.print(closing_page(RunRecord.read(run.path)))
    console.print("\nWhat to try next", style="bold")
    for line in next_steps(recipe, given, run, summary, code):  # never wrapped: it is to be copied
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    for unit, ledger in (("tokens", summary.tokens), ("trajectories", summary.trajectories)):
        if not ledger.closes():
            console.print(f"the ledger of {unit} does not close: {ledger.difference} unaccounted for", style="red")
    return code


def carry_out(
    recipe: Recipe,
    name: str,
    overrides: list[str],
    path: Path,
    console: Console,
    data: Path | None = None,
    callbacks: Callbacks | None = None,
) -> tuple[RunDirectory, Summary, int]:
    """Makes one run, from the warm start to its summary; returns the summary and the exit code.

    It begins with what is imported from `data`, or has been imported to `path`. callbacks: are told what it records.
    """
    began = time.monotonic()
    if recipe.runtime == "processes":
        prepare()
    said: list[str] = []  # a warm start that is made now says so

    def say(line: str) -> None:
        said.append(line)
        console.print(line, highlight=False)

    recipe, overrides = with_weights(recipe, name, overrides, say)
    sft_seconds = time.monotonic() - began if said else 0.0
    recipe, overrides = with_sizes(recipe, name, overrides, console)
    for warning in [*notes_on_prompts(recipe), *notes_on_data(recipe, recipe.model.prepared(recipe.task))]:
        console.print(f"note: {warning}", style="yellow")
    refuse(recipe, [*recipe.fill.files, *([] if data is None else [data])])
    if prepared := is_prepared(path):
        take_over(path, recipe)
    run = RunDirectory.create(path, name, overrides, recipe, began, sft_seconds)
    console.print(f"run {run.path}", highlight=False)
    with run.held(0.0) as held:
        try:
            with _failure_recorded(recipe, run):
                fill(recipe, run, console)
                if data is not None:
                    take_in(recipe, run, [data], ImportOptions(), console)
        except UserError:
            if not prepared:  # nothing of it is of use
                shutil.rmtree(run.path)
            raise
        return run, *go(recipe, held, console, callbacks)


def with_sizes(recipe: Recipe, name: str, overrides: list[str], console: Console) -> tuple[Recipe, list[str]]:
    """Returns the recipe and its overrides, with as many ranks and searchers as this machine's GPUs are for, where the
    recipe leaves that open. Raises `UserError` where it cannot fit; nothing has been loaded yet.
    """
    machine, prepared = Machine.here(), replace(recipe, model=recipe.model.prepared(recipe.task))
    decided = sized(prepared, machine)
    sized_too = override(prepared, decided, f"tba train {name}", recorded=True)
    refuse_what_cannot_fit(sized_too, machine)
    if decided:
        places = ", ".join(f"{worker} on {place}" for worker, place in places_on(sized_too, machine).items())
        console.print(f"where it runs: {places}", highlight=False)
    if (idle := unused(sized_too, machine)) is not None:
        console.print(f"note: {idle}", style="yellow")
    return override(recipe, decided, f"tba train {name}", recorded=True), [*overrides, *decided]


def go(recipe: Recipe, run: RunDirectory, console: Console, callbacks: Callbacks | None = None) -> tuple[Summary, int]:
    """Returns the run's summary and the exit code. The run's folder is locked meanwhile."""
    progress, callbacks = Progress(recipe, run), callbacks or Callbacks()
    with LiveView(console, STATUS_SECONDS, recipe.name) as view:
        every = _LOOK if console.is_terminal else STATUS_SECONDS / 4
        show = Throttled(lambda phase, note: view.update(progress.status(phase, note)), every)

        def tell(phase: str, note: str) -> None:
            callbacks.look(run.path)
            show(phase, note)

        runtime = _runtime(recipe)(recipe, run, tell)
        with _failure_recorded(recipe, run):
            faults = runtime.go()
            callbacks.look(run.path)
        with _failure_recorded(recipe, run):
            summary = summarise(recipe, run, runtime.searchers, faults, run.facts.get("sft_seconds", 0.0))
    if recipe.record.has_tensorboard():  # the last evaluation came after the trainer had closed its events
        with closing(TensorBoardEvents(run.path)) as events:
            for e in summary.evaluations:
                if e.version.step == summary.steps:
                    events.write(e.version.step, time.time(), {f"eval/{e.metric}": e.value})
    return summary, runtime.exit_code


def _runtime(recipe: Recipe) -> type[Inline | Driver]:
    """Returns the function that runs it. Raises `UserError` when a library is missing."""
    if recipe.runtime == "cluster":
        from tba.runtime.cluster.driver import Cluster  # needs Ray

        return Cluster
    return Inline if recipe.runtime == "inline" else Processes


def _offline(
    recipe: Recipe, name: str, overrides: list[str], path: Path, data: Path | None
) -> tuple[Recipe, list[str]]:
    """Returns the recipe without a warm-up, since no more data will arrive. Raises `UserError` when there are none."""
    if data is None and not is_prepared(path) and recipe.fill == InitialFill():
        raise UserError(
            "--offline learns from trajectories that are there, but a new run has none: give --data FILE or --data "
            "RUN, or the --run-name of a run that `tba import` made, or have the recipe begin with some (--fill)"
        )
    if not any(argument.split("=")[0] == WARM_UP for argument in overrides):
        overrides = [*overrides, WARM_UP, "0"]
    return override(find(name), overrides, f"tba train {name}"), overrides


@contextmanager
def _failure_recorded(recipe: Recipe, run: RunDirectory) -> Iterator[None]:
    """Records an error that ends the run in its folder. A full disk becomes a `UserError`; a damaged journal is
    recovered, and the error says what that gave.
    """
    try:
        yield
    except Exception as error:
        moved = not (run.path / "recipe.json").exists()
        told = outside_cause(error, run.path) or _recovered(recipe, run, error)
        if told is None and not isinstance(error, TbaError):
            raise
        with suppress(OSError):  # there may be no room for it
            if not moved:
                Failure.record(run.path, told or error, explained=told is not None)
        if told is None:
            raise
        raise told from error


def _recovered(recipe: Recipe, run: RunDirectory, error: Exception) -> UserError | None:
    """Returns what was recovered of a journal that was damaged while it was in use; None for other errors.

    One that nobody has explained may come of it: what is read in a file that another program writes into is anything.
    """
    journal = run.journal(recipe)
    explained = isinstance(error, TbaError) and not isinstance(error, PartFailed)
    if explained and not suspect_mark(journal).exists():
        return None
    try:
        found = "; ".join(str(what) for what in (*note_recoveries(run, journal), loss_of(run, journal)) if what)
    except TbaError:  # it cannot be recovered, or somebody else has it open: the error stands
        return None
    again = f"continue with `tba resume {shlex.quote(str(run.path))}`"
    return UserError(f"{journal} was damaged while it was in use: {found}; {again}") if found else None


@dataclass
class Throttled:
    """Limits how often a function is called: reading the run's files costs more than a tiny step."""

    view: Callable[[str, str], None]
    every: float
    _next: float = field(default=0.0)

    def __call__(self, phase: str, note: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self.every
            self.view(phase, note)


def next_steps(recipe: Recipe, given: Sequence[str], run: RunDirectory, summary: Summary, code: int) -> list[str]:
    """Returns what to try next, as commands that can be copied; given: the recipe as named, and settings."""
    path, inline = shlex.quote(str(run.path)), newest_of_each([*given, "--runtime", "inline"])
    commands = {
        f"tba show {path}": "this page again, its course and all counts",
        f"tba report {path}": "curves that zoom and all answers to read, as one page: report.html",
        f"tba eval {path}": "any figure on its newest checkpoint",
    }
    if recipe.runtime != "inline" and _is_a_recipe(inline):
        commands[f"tba train {shlex.join(inline)}"] = "the same in one process, taking turns"
    if not given[0].endswith(".py"):
        commands["tba example my_task"] = "your own task: a file to change"
    where = "before its last step" if code else "in its last evaluation"
    left = [f"the run was stopped {where}; this continues it:", f"tba resume {path}"]
    first = left if summary.faults.get("stopped") else []
    return [*first, *(line for command, why in commands.items() for line in (f"# {why}", command))]


def _is_a_recipe(words: Sequence[str]) -> bool:
    """Whether a recipe's name and its settings can be given to `tba train` as they are."""
    try:
        return override(find(words[0]), words[1:], "tba train") is not None
    except UserError:
        return False
