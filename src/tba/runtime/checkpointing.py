"""Saves what a checkpoint holds besides the model and the optimizer, and resumes a later incarnation from it.

Invariant: all of the state belongs to the same step, that of the checkpoint's version. The journal is not part of the
checkpoint: it only grows, and the state says how far it had come; trajectories after that point stay and are used as
old data. Nothing else is needed to resume; without a checkpoint a run begins again at step 0, with all of its journal.
Prompts are leased in the journal, which is never set back: what was in flight is handed out again, what was answered is
not.
"""

from __future__ import annotations

import base64
import logging
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tba.clock import ShareClock, State
from tba.errors import UserError
from tba.json_input import read_json
from tba.record.faults import count_faults, record_fault
from tba.record.metrics import JOURNAL_ROWS, read_last
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower, Totals
from tba.replay.missing_rows import JournalCounts, MissingRows, acknowledged_counts, find_loss
from tba.runtime.run_directory import RunDirectory
from tba.training.checkpoint import Checkpoint, newest_sound_checkpoint
from tba.typed_values import convert
from tba.types import Json, Version
from tba.weights.directory import WeightDirectory


class TurnTaker(Protocol):
    """A searcher that takes turns with the trainer in one process; its state is saved with the trainer's."""

    def state(self) -> Json: ...

    def turn(self, trainer_clock: ShareClock) -> None:
        """Make a round; `trainer` is the trainer's clock."""


@dataclass(frozen=True)
class LoopState:
    """Holds the state of the trainer's loop at a step, but for the weights and the optimizer's moments, as JSON.

    What a checkpoint of an earlier program may lack has a default. Most fields are the `state` of one part of the loop.
    """

    replay: Json
    references: Json
    evaluations: Json
    generators: Json
    journal: Mapping[str, Json]  # how far it had come
    reference: str = "0.0"  # version
    steering: Json = None
    objective: Json = None
    searcher: Json = None  # in the runtime inline
    lags: Sequence[tuple[int, int]] = ()  # each with the trajectories that had it
    computed: Mapping[str, int] = field(default_factory=dict)  # tokens `read` and `scored`, `milliseconds`
    skipped: int = 0  # steps
    clock: Mapping[State, float] = field(default_factory=dict)  # seconds
    began_training: float | None = None  # seconds into the run
    ended_training: float = 0.0

    @classmethod
    def of(cls, checkpoint: Checkpoint | None) -> LoopState | None:
        """Returns the state in a checkpoint. Raises `UserError` for one that this program cannot read."""
        try:
            return None if checkpoint is None else convert(checkpoint.state, cls, "json", "its state")
        except ValueError as error:
            path = checkpoint and checkpoint.path
            raise UserError(
                f"the checkpoint at {path} cannot be resumed ({error}): use the program of its run"
            ) from error


log = logging.getLogger("tba.trainer")


def starting_point(run: RunDirectory) -> tuple[Version, Checkpoint | None]:
    """Returns the version that this incarnation's trainer begins with, and the checkpoint that it resumes from, if any.

    A damaged checkpoint is passed over for the one before it, and recorded as a fault. Without any, a later incarnation
    begins at step 0, with all trajectories of the earlier ones as old data. Raises `UserError` when all are damaged.
    """
    if run.incarnation == 0:
        return Version(), None
    checkpoint, damaged = newest_sound_checkpoint(run.checkpoints)
    for description in damaged:
        log.warning("%s; it is skipped", description)
        record_fault(run.path, "damaged_checkpoints", description)
    if checkpoint is not None:
        log.info("resuming from %s, as incarnation %d", checkpoint.path, run.incarnation)
        return Version(run.incarnation, checkpoint.version.step), checkpoint
    if damaged:
        raise UserError(
            f"every checkpoint of the run at {run.path} is damaged ({damaged[0]}): put one back, or remove "
            f"{run.checkpoints} to begin again at step 0 with all that the journal holds"
        )
    return Version(run.incarnation), None


def note_recoveries(run: RunDirectory, journal: Path) -> list[str]:
    """Record each recovery of a damaged journal that is not recorded yet as a fault; returns a sentence for each."""
    with JournalFollower(journal, create=False) as follower:
        recoveries = [str(recovery) for recovery in follower.recoveries()]
    new_recoveries = recoveries[count_faults(run.path)["journal_recoveries"] :]
    for recovery in new_recoveries:
        log.warning("%s", recovery)
        record_fault(run.path, "journal_recoveries", recovery)
    return new_recoveries


def held_by_journal(run: RunDirectory) -> JournalCounts:
    """Returns the most that the journal is known to have held, according to the newest weights, the newest checkpoint,
    the last line of metrics, searchers that have ended, the rows acknowledged to each owner, and the summary.
    """
    weights = WeightDirectory(run.weights)
    counts = [JournalCounts.parse(weights.manifest(version).journal) for version in weights.versions()]
    checkpoint, _ = newest_sound_checkpoint(run.checkpoints, verify=False)
    counts += [] if checkpoint is None else [JournalCounts.parse(checkpoint.state.get("journal"))]
    sources = [read_last(run.path) or {}]
    for result_file in (run.path / "logs").glob("searcher-*.result.json"):
        with suppress(UserError):
            sources.append(read_json(result_file, "", dict[str, Any]))
    counts += [JournalCounts(rows=int(n)) for facts in sources if isinstance(n := facts.get(JOURNAL_ROWS), float | int)]
    counts.append(acknowledged_counts(run.journal_to_read()))
    with suppress(UserError):  # a summary that cannot be read
        summary = Summary.read(run.path)
        counts += [] if summary is None else [JournalCounts(summary.trajectories.written, summary.tokens.written)]
    return JournalCounts.largest(counts)


def describe_missing_rows(totals: Totals, largest: JournalCounts, marks: Sequence[Sequence[int]]) -> str | None:
    """Returns a sentence about a journal that lacks rows of its run, or the run's mark; None for a whole one."""
    if totals.rows < largest.rows:
        return (
            f"{largest.rows - totals.rows:,} of the {largest.rows:,} trajectories that the run had are missing: its "
            "journal is an older copy, or was damaged"
        )
    if marks[-1] and totals.mark and totals.mark not in marks[-1]:
        return "the journal is an older copy, or of a copy of the run: what was acknowledged since is missing"
    return None


def loss_of(run: RunDirectory, journal: Path) -> MissingRows | None:
    """Returns what the journal lacks of what the run knows that it held; None when it lacks nothing."""
    return find_loss(journal, held_by_journal(run), run.marks)


def generators() -> dict[str, Json]:
    """Returns the state of the process's global random generators.

    Nothing in this package draws from them; a task, a reward or a model of the user's may.
    """
    name, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    kind, numbers, gauss_next = random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in devices],
        "numpy": [str(name), np.asarray(key).tolist(), int(position), int(has_gauss), float(gauss)],
        "python": [kind, list(numbers), gauss_next],
    }


def set_generators(state: Json) -> None:
    """Set the generators to what `generators` returned; devices that no longer exist are left out."""
    torch.set_rng_state(_tensor(state["torch"]))
    if torch.cuda.is_initialized():
        for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(text), device)
    name, key, *numpy_rest = state["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), *numpy_rest))
    kind, numbers, gauss_next = state["python"]
    random.setstate((kind, tuple(numbers), gauss_next))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Any:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
