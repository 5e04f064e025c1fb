"""What is watched while a run goes: figures that fall far below their best, and which checkpoint is the best.

Invariant: `best`, in the folder of the run, links to the checkpoint with the highest held-out figure of all that are
there and were evaluated; it changes nothing of what is newest, which `--resume` and `tba eval` take. A fall is a fault,
told once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tba.recipe import Recipe
from tba.record.evaluations import read_evaluations
from tba.record.falls import REWARD, RewardWatch, by_version, note_falls
from tba.record.faults import record_fault
from tba.runtime.directory import RunDirectory
from tba.train.checkpoint import checkpoints_in
from tba.types import Evaluation, Version

log = logging.getLogger("tba.trainer")
NAME = "best"


def rewards_watched(recipe: Recipe, run: RunDirectory) -> Callable[[Sequence[tuple[str, float]]], None] | None:
    """What replay shows (prompt, reward) of all that comes. None where prompts are chosen for their rewards, whose mean
    says nothing then.
    """
    watch = RewardWatch()

    def see(rewards: Sequence[tuple[str, float]]) -> None:
        for what in watch.see(rewards):
            log.warning("%s", what)
            record_fault(run.path, REWARD, what)

    return None if recipe.prompts.selection == "posterior" else see


def look_at_evaluations(run: RunDirectory, found: Sequence[Evaluation], record: Callable[[Evaluation], None]) -> None:
    """At those that were found since the last time."""
    for evaluation in found:
        record(evaluation)
    if found:
        look_back(run)


def look_back(run: RunDirectory) -> None:
    """At all evaluations: whether a figure has fallen, and which checkpoint is the best now."""
    for what in note_falls(run.path):
        log.warning("%s", what)
    mark_best(run)


def best_checkpoint(run: RunDirectory) -> tuple[Path, Evaluation] | None:
    """The folder of the best one and its figure; None while no checkpoint was evaluated."""
    figures = by_version(read_evaluations(run.path))
    there = [(path, figures[version]) for path, version in checkpoints_in(run.checkpoints) if version in figures]
    return max(there, key=lambda found: (found[1].value, found[1].version), default=None)


def mark_best(run: RunDirectory) -> None:
    """Have `best` link to it."""
    best = best_checkpoint(run)
    if best is None:
        return
    path, _ = best
    link, beside = run.path / NAME, run.path / f".{NAME}-{os.getpid()}"
    if link.exists() and not link.is_symlink():
        return  # a copy of the run was made that followed links: what is there is left as it is
    if not (link.is_symlink() and os.readlink(link) == f"checkpoints/{path.name}"):
        beside.unlink(missing_ok=True)
        beside.symlink_to(f"checkpoints/{path.name}")
        beside.replace(link)


def worth_keeping(run: RunDirectory, pending: Iterable[Version]) -> set[Version]:
    """Versions whose checkpoints stay whatever their age: the best, and those whose evaluation is still to come."""
    best = best_checkpoint(run)
    return {*pending, *([] if best is None else [best[1].version])}
