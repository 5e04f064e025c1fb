"""Resumes a run that was stopped, was killed or has failed from its newest checkpoint.

Invariant: nothing of the run is changed before it is certain that it can continue (whether a checkpoint's own files are
whole is seen when it is loaded). What it learnt after that checkpoint is lost; what was sampled after it is kept and
used as old data. Without a checkpoint the run starts again at step 0, with all that was sampled. Rows that its journal
has lost are reported first; it continues only if that is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tba.errors import UserError
from tba.fields import with_new_names
from tba.recipe import Recipe, differences, settings_json
from tba.record.failure import FILE as FAILURE
from tba.record.failure import Failure
from tba.record.faults import record_fault
from tba.record.jsonl import as_json
from tba.record.metrics import read_last
from tba.record.summary import FILE as SUMMARY
from tba.record.summary import Summary
from tba.replay.journal import JournalWriter
from tba.replay.missing_rows import accept_loss
from tba.runs.recipe_resolution import hardware_of
from tba.runtime.checkpointing import loss_of
from tba.runtime.program import version_of
from tba.runtime.run_directory import SCORERS, RunDirectory
from tba.runtime.sizing import refuse_what_cannot_fit
from tba.runtime.teaching import fingerprints_of
from tba.settings import find, override
from tba.training.checkpoint import Checkpoint, newest_checkpoint
from tba.types import Json

T = TypeVar("T")
_FIXED_FIELDS = (  # what a run is about
    *("task", "model.path", "model.warm_start", "policy_temperature", "run.journal_dir"),
    *("reference", "teacher.paths", "teacher.models", "teacher.top"),
)

_REMOVED_FIELDS = ("deadline_seconds",)  # fields of earlier programs that change nothing of what a run learns


def resume_point(
    run: RunDirectory, overrides: Sequence[str], accept_lost_rows: bool = False
) -> tuple[Recipe, Checkpoint | None]:
    """Returns the recipe with the overrides, and the checkpoint if there is one, of a run whose journal is complete.

    Raises `UserError` when the run cannot be continued like that.
    """
    facts = run.facts
    recorded_recipe = run.recipe()
    current_fields = as_json(settings_json(recorded_recipe))
    recorded_fields = with_new_names(facts["resolved"], current_fields)
    for name, old_value, new_value in differences(recorded_fields, current_fields):
        if old_value is not None and new_value is not None and not name.startswith("run."):  # how it is run may change
            raise UserError(
                f"recipe {facts['recipe']} has changed since the run at {run.path} began ({name} was {old_value!r} and "
                f"is {new_value!r}): start a new run, or set it back"
            )
    for name in _unknown_fields(recorded_fields, current_fields):
        raise UserError(
            f"the run at {run.path} has a field {name}, which recipes do not have: continue it with the version of "
            f"tba that made it ({version_of(facts)}), or start a new run"
        )
    override(recorded_recipe, overrides, "tba resume")  # alone, for what is asked for now has to count
    recipe = override(find(facts["recipe"]), [*facts["overrides"], *overrides], "tba resume", recorded=True)
    for name, old_value, new_value in differences(
        as_json(settings_json(recorded_recipe)), as_json(settings_json(recipe))
    ):
        if name.startswith(_FIXED_FIELDS) and name != "reference_reset":
            raise UserError(f"a run keeps its {name}, which is {old_value!r}: start a new run for {new_value!r}")
    if recipe.scores_reference and not recorded_recipe.scores_reference:
        raise UserError(
            "the run's reference had no part in its target, so that answers were not scored under it: leave the "
            "teacher's weights, --objective.pull and --reference-reset as they were, or start a new run"
        )
    checkpoint = newest_checkpoint(run.checkpoints)
    _refuse_finished(run, recipe, checkpoint)
    prepared_recipe = replace(recipe, model=recipe.model.prepared(recipe.task))
    refuse_what_cannot_fit(prepared_recipe, hardware_of(prepared_recipe), is_resumed=True)
    _refuse_other_scorers(facts, prepared_recipe)
    _refuse_lost_rows(run, recipe, accept_lost_rows)
    return recipe, checkpoint


def _unknown_fields(old_fields: Mapping[str, Json], new_fields: Mapping[str, Json], place: str = "") -> Iterator[str]:
    """Yields the dotted names of fields that a resolved recipe has and another lacks."""
    for name, value in old_fields.items():
        if name not in new_fields and name not in _REMOVED_FIELDS:
            yield f"{place}{name}"
        elif isinstance(value, Mapping) and isinstance(new_fields.get(name), Mapping):
            yield from _unknown_fields(value, new_fields[name], f"{place}{name}.")


def _refuse_other_scorers(facts: Mapping[str, Any], recipe: Recipe) -> None:
    """Raises `UserError` for a reference or a teacher that is another than when the run began: what it has scored would
    be learnt from beside the scores of another.
    """
    fingerprints = fingerprints_of(recipe, recipe.model)
    for name, fingerprint in facts.get(SCORERS, {}).items():
        if fingerprints.get(name, fingerprint) != fingerprint:
            raise UserError(
                f"the {name} has other weights than when the run began: put them back where they were, or start a new "
                "run"
            )


def _refuse_lost_rows(run: RunDirectory, recipe: Recipe, is_accepted: bool) -> None:
    if (loss := loss_of(run, run.journal(recipe))) is None:
        return
    if not is_accepted:
        raise UserError(f"{loss}; put it back if there is a copy, or continue without them with --accept-lost-rows")
    accept_loss(loss)


def _refuse_finished(run: RunDirectory, recipe: Recipe, checkpoint: Checkpoint | None) -> None:
    summary, step = _read_result(Summary.read, run)[0], 0 if checkpoint is None else checkpoint.version.step
    is_finished = summary is not None and not summary.faults.get("stopped")
    if step > recipe.steps or (step == recipe.steps and is_finished):
        raise UserError(
            f"the run at {run.path} has made {step} steps, all that were asked for: give more with --steps, or start a "
            "new run"
        )


def _read_result(read: Callable[[Path], T | None], run: RunDirectory) -> tuple[T | None, str]:
    """Returns one of the run's results, or None with the reason why it cannot be read: a run goes on without it."""
    try:
        return read(run.path), ""
    except UserError as error:
        return None, str(error).partition(": ")[0]


def begin_incarnation(run: RunDirectory, recipe: Recipe, overrides: Sequence[str]) -> str:
    """Begin the run's next incarnation and release the prompts that the last one had leased; returns why that ended."""
    (summary, no_summary), (failure, no_failure) = _read_result(Summary.read, run), _read_result(Failure.read, run)
    last_metrics = read_last(run.path)
    recorded_seconds = float(last_metrics["wall_seconds"]) if last_metrics else 0.0
    seconds_before = max(summary.wall_seconds.total if summary else 0.0, recorded_seconds)
    reason = "it was killed"
    if failure is not None:
        reason = f"it had failed: {failure}"
    elif summary is not None:
        reason = "it was stopped" if summary.faults.get("stopped") else "it had finished"
    reason = "; ".join(part for part in (reason, no_summary, no_failure) if part)
    journal = run.journal(recipe)
    for index in range(run.recipe().searcher_count):
        with JournalWriter(journal, f"searcher-{index}") as writer:
            writer.resume()
    run.begin_again(f"resumed: {reason}", overrides, seconds_before)
    run.mark_journal(journal)
    record_fault(run.path, "resumes", reason)
    for stale_file in (run.path / SUMMARY, run.path / FAILURE, *(run.path / "logs").glob("*.error.json")):
        stale_file.unlink(missing_ok=True)
    return reason
