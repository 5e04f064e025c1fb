"""`faults.jsonl`: the faults that a run survived, a line for each, written when it happens.

Invariant: the file outlives every process of the run, so that the summary counts over all of a run's incarnations. What
ended a run is not here but in `failure.json`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tba.record import evaluations, metrics
from tba.record.evaluations import parse_evaluation, parse_recorded_answer
from tba.record.jsonl import JsonLines, read_lines, read_lines_and_errors
from tba.types import Json

log = logging.getLogger("tba.record.faults")
FILE = "faults.jsonl"
KINDS = (
    "searcher_restarts",  # a searcher was killed and restarted
    "searchers_given_up",  # (earlier programs) no node of the cluster had room for one that was to be restarted
    "searchers_waiting",  # a searcher was missing for a while: no node had room for it, or it had died too often
    "trainer_restarts",  # the trainer was killed, and resumed from its checkpoint
    "exchange_restarts",  # a cluster's gateway (`exchange`) died and was restarted
    "evaluations_missing",  # because the searchers that were to make them were missing
    "silences",  # a part gave no heartbeat for too long and was killed
    "resumes",  # the whole run was left and resumed
    "damaged_checkpoints",  # passed over in favour of an older one that is whole
    "reward_retries",  # a reward raised or hung and was called again
    "journal_recoveries",  # a damaged journal was set aside, and its rows moved to a new one
    "backup_failures",  # a backup failed, and so may those that followed it
    "damaged_trajectories",  # one of the journal was not what had been written: it is left out
    "joined_deaths",  # a searcher that had joined died
    "joined_late",  # one had not left when the run ended
    "unreadable_lines",  # of a file of records, which were passed over
    "held_out_falls",  # a held-out figure fell far below its best (`find_accuracy_falls`)
    "reward_falls",  # the mean reward of what searchers bring did
    "stale_data",  # batches were worth less than half of their rows
    "no_signal",  # in no group of 50 steps did rewards differ
    "truncated_answers",  # most answers of 50 steps were cut off
    "copied_answers",  # most answers left as copies of others, and were never used
    "entropy_falls",  # the policy's entropy fell by half within ten steps
    "mismatches",  # engine and trainer give the tokens of one set of weights other probabilities
    "lost_samples",  # ten batches in a row were worth less than a tenth of their rows
    "padded_forward",  # the trainer runs each answer by itself, since it could not share prompts within groups
    "slow_engine",  # a searcher's decode steps could not be captured, or gave other tokens when they were
    "large_steps",  # an update moved the policy further than data of its like can guide the next one
    "short_answers",  # new answers had less than half of the tokens that they had when the run began
    "without_mps",  # MPS was asked for, and could not be had
    "long_answers",  # they had more than twice as many
)


def record_fault(directory: Path, kind: str, message: str) -> None:
    """Record one more fault of the run in `directory`. On a full disk, and where the run was moved away, it is only
    logged: that error is reported elsewhere, and no other folder takes the run's place.
    """
    line = {"kind": kind, "what": message, "time": round(time.time(), 3)}
    if not directory.is_dir():
        log.error("cannot record the fault %s: %s is gone", line, directory)
        return
    try:
        with closing(JsonLines(directory / FILE)) as lines:
            lines.append(line)
    except OSError:
        log.exception("cannot record the fault %s", line)


def read_faults(directory: Path) -> list[dict[str, Json]]:
    """Returns the faults of a run, oldest first: `kind`, `what`, and the `time` (seconds since the epoch)."""
    return read_lines(directory / FILE, _parse_fault)


def read_all_records(directory: Path) -> dict[str, tuple[list[Any], list[int]]]:
    """Returns, by the name of each file of records, what can be read of it and the numbers of the unreadable lines."""
    parsers: tuple[tuple[str, Callable[[dict[str, Json]], object]], ...] = (
        (metrics.FILE, metrics.parse_step),
        (evaluations.FILE, parse_evaluation),
        (evaluations.ANSWERS_FILE, parse_recorded_answer),
        (FILE, _parse_fault),
    )
    return {name: read_lines_and_errors(directory / name, parse) for name, parse in parsers}


def note_unreadable(directory: Path) -> list[str]:
    """Record each unreadable line of a run as a fault, once; returns a sentence for each file that has such lines."""
    recorded = {line["what"] for line in read_faults(directory) if line["kind"] == "unreadable_lines"}
    bad_lines = {name: numbers for name, (_, numbers) in read_all_records(directory).items() if numbers}
    for line_name in [f"{name}, line {number}" for name, numbers in bad_lines.items() for number in numbers]:
        if line_name not in recorded:
            record_fault(directory, "unreadable_lines", line_name)
    return [describe_unreadable(name, numbers) for name, numbers in bad_lines.items()]


def describe_unreadable(name: str, numbers: Sequence[int]) -> str:
    """Returns the sentence about the lines of a file that cannot be read."""
    return (
        f"{name}: line {numbers[0]} cannot be read and is left out"
        if len(numbers) == 1
        else (f"{name}: {len(numbers)} lines cannot be read and are left out, the first is line {numbers[0]}")
    )


def _parse_fault(row: dict[str, Json]) -> dict[str, Json]:
    fault = {"what": "", "time": 0.0, **row}
    if not (isinstance(row["kind"], str) and isinstance(fault["what"], str) and isinstance(fault["time"], int | float)):
        raise TypeError("no fault")
    return fault


def count_faults(directory: Path) -> dict[str, int]:
    """Returns how many faults a run had of each kind; every kind of `KINDS` has a count."""
    counts = Counter(str(line["kind"]) for line in read_faults(directory))
    return {kind: counts[kind] for kind in dict.fromkeys((*KINDS, *counts))}
