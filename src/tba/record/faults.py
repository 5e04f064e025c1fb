"""`faults.jsonl`: what went wrong in a run and was survived, a line for each, as soon as it has happened.

Invariant: it outlives every process of the run, so that the summary counts over all of a run's incarnations. What ended
a run is not here but in `failure.json`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from tba.record.jsonl import JsonLines, read_lines
from tba.types import Json

log = logging.getLogger("tba.record.faults")
FILE = "faults.jsonl"
KINDS = (
    "searcher_restarts",  # a searcher was killed and started again
    "searchers_given_up",  # no node of the cluster had room for one that was to be started again
    "trainer_restarts",  # the trainer was, and went on from its checkpoint
    "exchange_restarts",  # a cluster's exchange died beside the trainer and was made anew
    "evaluations_missing",  # because of those that were given up
    "silences",  # a part gave no sign of life for too long and was killed
    "resumes",  # the whole run was left and taken up again
    "damaged_checkpoints",  # passed over on the way to one that is whole
    "reward_retries",  # a reward raised or hung and was asked again
    "journal_recoveries",  # a damaged journal was set aside, and its rows brought into another
    "joined_deaths",  # a searcher that had joined died
    "joined_late",  # one had not left when the run ended
)


def record_fault(directory: Path, kind: str, what: str) -> None:
    """One more fault of the run in `directory`. On a full disk it is in the log only: the run has other worries."""
    line = {"kind": kind, "what": what, "time": round(time.time(), 3)}
    try:
        with closing(JsonLines(directory / FILE)) as lines:
            lines.append(line)
    except OSError:
        log.exception("cannot record the fault %s", line)


def read_faults(directory: Path) -> list[dict[str, Json]]:
    """All of them, oldest first: `kind`, `what`, and the `time` (seconds since the epoch)."""
    return read_lines(directory / FILE)


def count_faults(directory: Path) -> dict[str, int]:
    """How many there were of each kind; every kind of `KINDS` is there."""
    found = Counter(str(line["kind"]) for line in read_faults(directory))
    return {kind: found[kind] for kind in dict.fromkeys((*KINDS, *found))}
