"""Carries out a run, from what the recipe leaves open to its summary.

Invariant: nothing is printed here: a `View` is told the lines for people, and shown the state of the run.
"""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tba.errors import PartFailed, TbaError, UserError
from tba.recipe import Recipe
from tba.record.callbacks import Callbacks
from tba.record.failure import Failure
from tba.record.live import View
from tba.record.recorder import TensorBoardEvents
from tba.record.summary import Summary
from tba.replay.database import suspect_mark
from tba.runs.importing import import_answers, import_initial_answers, refuse_files
from tba.runs.recipe_resolution import hardware_of, with_device, with_sizes, with_weights
from tba.runs.validating import notes_on_data, notes_on_prompts
from tba.runtime.backup import back_up_once
from tba.runtime.checkpointing import loss_of, note_recoveries
from tba.runtime.disk import outside_cause
from tba.runtime.importing import adopt_imports, is_prepared
from tba.runtime.inline import Inline
from tba.runtime.local.forkserver import prepare_forkserver
from tba.runtime.local.processes import Processes
from tba.runtime.reporting import RunProgress, summarise
from tba.runtime.run_directory import SCORERS, RunDirectory, setting
from tba.runtime.supervisor import Driver
from tba.runtime.teaching import fingerprints_of
from tba.user_code import problems_of


def carry_out(
    recipe: Recipe,
    name: str,
    overrides: list[str],
    path: Path,
    view: View,
    data: Path | None = None,
    callbacks: Callbacks | None = None,
) -> tuple[RunDirectory, Summary, int]:
    """Makes one run, from the warm start to its summary; returns the run, the summary and the exit code.

    It begins with what is imported from `data`, or has been imported to `path`. callbacks: are told what it records.
    """
    start_time = time.monotonic()
    if recipe.runtime == "processes":
        prepare_forkserver()
    warm_start_lines: list[str] = []  # a warm start that is made now says so

    def say(line: str) -> None:
        warm_start_lines.append(line)
        view.say(line)

    is_prepared_run = is_prepared(path)
    day = setting(RunDirectory.open(path).facts["resolved"], "model", "day") if is_prepared_run else None
    hardware = hardware_of(recipe)
    recipe, overrides = with_device(recipe, overrides, hardware)
    recipe, overrides = with_weights(recipe, overrides, say, day if isinstance(day, str) else "")
    sft_seconds = time.monotonic() - start_time if warm_start_lines else 0.0
    recipe, overrides = with_sizes(recipe, overrides, hardware, view.say)
    for warning in [*notes_on_prompts(recipe), *notes_on_data(recipe, recipe.model.prepared(recipe.task))]:
        view.say(f"note: {warning}")
    refuse_files(recipe, [*recipe.fill.files, *([] if data is None else [data])])
    if is_prepared_run:
        adopt_imports(path, recipe)
    run = RunDirectory.create(path, name, overrides, recipe, start_time, sft_seconds)
    run.write_facts({**run.facts, SCORERS: fingerprints_of(recipe, recipe.model.prepared(recipe.task))})
    view.say(f"run {run.displayed_path}")
    with run.hold_lock(0.0) as locked_run:
        try:
            with failure_recorded(recipe, run):
                import_initial_answers(recipe, run, view.say)
                if data is not None:
                    import_answers(recipe, run, [data], view.say)
        except UserError:
            if not is_prepared_run:  # nothing of it is of use
                shutil.rmtree(run.path)
            raise
        return run, *execute(recipe, locked_run, view, callbacks)


def execute(recipe: Recipe, run: RunDirectory, view: View, callbacks: Callbacks | None = None) -> tuple[Summary, int]:
    """Carries out a run whose folder is locked; returns its summary and the exit code."""
    progress, callbacks = RunProgress(recipe, run), callbacks or Callbacks()
    with recipe.record.prometheus.serve(run.path, view.say), view.live(recipe.name) as live_view:

        def report(phase: str, note: str) -> None:
            callbacks.notify(run.path)
            if live_view.is_due():
                live_view.update(progress.status(phase, note))

        runtime = _runtime(recipe)(recipe, run, report)
        try:
            with failure_recorded(recipe, run):
                faults = runtime.go()
                callbacks.notify(run.path)
        except Exception:
            back_up_once(recipe, run)
            raise
        with failure_recorded(recipe, run):
            summary = summarise(recipe, run, runtime.searchers, faults, run.facts.get("sft_seconds", 0.0))
    if recipe.record.has_tensorboard():  # the last evaluation came after the trainer had closed its events
        with closing(TensorBoardEvents(run.path)) as events:
            for e in summary.evaluations:
                if e.version.step == summary.steps:
                    events.write(e.version.step, time.time(), {f"eval/{e.metric}": e.value})
    back_up_once(recipe, run)
    return summary, runtime.exit_code


def steps_in(recipe: Recipe, epochs: float) -> int:
    """Returns how many optimizer steps have as many groups as `epochs` passes over the training prompts."""
    if not 0 < epochs < math.inf:
        raise UserError(f"--epochs is {epochs}: give a number above 0")
    prompts = len(problems_of(recipe.task, "train")[: recipe.prompts.limit])
    return math.ceil(round(epochs * prompts / recipe.groups_per_step, 6))


def _runtime(recipe: Recipe) -> type[Inline | Driver]:
    """Returns the class of its runtime. Raises `UserError` when a library is missing."""
    if recipe.runtime == "cluster":
        from tba.runtime.cluster.driver import Cluster  # needs Ray

        return Cluster
    return Inline if recipe.runtime == "inline" else Processes


@contextmanager
def failure_recorded(recipe: Recipe, run: RunDirectory) -> Iterator[None]:
    """Records an error that ends the run in its folder. A full disk becomes a `UserError`; a damaged journal is
    recovered, and the error says what that gave.
    """
    try:
        yield
    except Exception as error:
        is_moved = not (run.path / "recipe.json").exists()
        explanation = outside_cause(error, run.path) or _recovered_journal_error(recipe, run, error)
        if explanation is None and not isinstance(error, TbaError):
            raise
        with suppress(OSError):  # there may be no room for it
            if not is_moved:
                Failure.record(run.path, explanation or error, explained=explanation is not None)
        if explanation is None:
            raise
        raise explanation from error


def _recovered_journal_error(recipe: Recipe, run: RunDirectory, error: Exception) -> UserError | None:
    """Returns an error that says what was recovered of a journal damaged while in use; None for other errors.

    An unexplained error may come of such damage: a file that another program writes into can read as anything.
    """
    journal = run.journal(recipe)
    is_explained = isinstance(error, TbaError) and not isinstance(error, PartFailed)
    if is_explained and not suspect_mark(journal).exists():
        return None
    try:
        findings = "; ".join(str(part) for part in (*note_recoveries(run, journal), loss_of(run, journal)) if part)
    except TbaError:  # it cannot be recovered, or somebody else has it open: the error stands
        return None
    remedy = f"continue with `tba resume {shlex.quote(str(run.path))}`"
    return UserError(f"{journal} was damaged while it was in use: {findings}; {remedy}") if findings else None
