"""Detects rows that a run had acknowledged and its journal no longer has.

A run records how much its journal held, in each checkpoint and with each version of the weights. A run that resumes
compares: a journal that is gone, shorter, or another file is detected, whatever removed the rows. Each time that a run
begins or resumes, it draws a mark, and leaves it in `recipe.json` and in the journal: a copy from before has another
one, however many rows it has.

Invariant: nothing is changed until the user has accepted the loss. Then each lost trajectory has its place, without a
body, so that it is counted as damaged and never taken for data.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tba.replay.database import acknowledged_folder
from tba.replay.follower import JournalFollower
from tba.replay.recovery import add_lost_rows, count_puts, free_name, open_journal, record_recovery
from tba.replay.schema import add_to_totals, record_lost, set_mark, set_totals
from tba.types import Json


@dataclass(frozen=True, slots=True)
class JournalCounts:
    """Counts the contents of a journal at some moment."""

    rows: int = 0
    tokens: int = 0
    positions: int = 0  # of prompts that had been handed out
    identity: int = 0  # the file's random identifier; 0: not known

    @classmethod
    def of(cls, journal: JournalFollower) -> JournalCounts:
        """Returns the counts of a journal now."""
        totals = journal.totals()
        return cls(totals.rows, totals.tokens, totals.positions, totals.identity)

    @classmethod
    def parse(cls, state: Json) -> JournalCounts:
        """Reads the counts that `state` returned; one that is missing, or no number, is 0."""
        fields = state if isinstance(state, dict) else {}
        return cls(**{name: n for name in cls.__slots__ if isinstance(n := fields.get(name), int) and n >= 0})

    @classmethod
    def largest(cls, records: Sequence[JournalCounts]) -> JournalCounts:
        """Returns the largest count of each kind, and the identity if any of the records has it."""
        return cls(*(max((getattr(counts, name) for counts in records), default=0) for name in cls.__slots__))

    def state(self) -> dict[str, Json]:
        """Returns the counts by name, as JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MissingRows:
    """Says how many rows a journal lacks of those it is known to have held."""

    path: Path
    record: JournalCounts  # what it is known to have held
    counts: JournalCounts  # what it holds
    rows: int
    reason: str  # what the journal is: "is gone", ...
    is_other_file: bool = False  # it is another run's file
    mark: int = 0  # that it should have; 0: not known

    def __str__(self) -> str:
        if not self.rows:
            return f"the journal {self.path} {self.reason}: what was acknowledged since is missing"
        return (
            f"the journal {self.path} {self.reason}: at least {self.rows:,} of the {self.record.rows:,} "
            "trajectories that it held are missing"
        )


def acknowledged_counts(path: Path) -> JournalCounts:
    """Returns how much the owners had put into the journal at `path`, by the files that they left beside it."""
    amounts = []
    for file in acknowledged_folder(path).glob("*"):
        with suppress(OSError, ValueError):
            rows, tokens = map(int, file.read_text().split())
            amounts.append(JournalCounts(max(0, rows), max(0, tokens)))
    return JournalCounts.largest(amounts)


def find_loss(path: Path, record: JournalCounts, marks: Sequence[Sequence[int]] = ()) -> MissingRows | None:
    """Returns the rows that the journal at `path` lacks of those in `record`; None when it lacks none.

    The journal is opened, and recovered if it is damaged, but not created. marks: those of each incarnation of the run.
    """
    current_marks = marks[-1] if marks else ()
    mark = current_marks[-1] if current_marks else 0
    if not path.is_file():
        return MissingRows(path, record, JournalCounts(), record.rows, "is gone", mark=mark) if record.rows else None
    with JournalFollower(path) as journal:
        counts, mark_in_file = JournalCounts.of(journal), journal.totals().mark
    if counts.rows and record.identity and counts.identity not in (0, record.identity):
        return MissingRows(path, record, counts, record.rows, "is another file than it was", True, mark)
    if counts.rows < record.rows:
        reason = "is shorter than it was" if counts.rows else "is empty"
        return MissingRows(path, record, counts, record.rows - counts.rows, reason, mark=mark)
    if current_marks and mark_in_file and mark_in_file not in current_marks:
        if any(mark_in_file in earlier_marks for earlier_marks in marks):
            return MissingRows(path, record, counts, 0, "is a copy from before the run was last resumed", mark=mark)
        reason = "is of a copy of the run, which went another way"
        return MissingRows(path, record, counts, record.rows, reason, True, mark)
    return None


def leave_mark(path: Path, mark: int) -> None:
    """Mark the journal as that of the incarnation that begins now."""
    with open_journal(path) as database, database.transaction() as connection:
        set_mark(connection, mark)


def accept_loss(loss: MissingRows) -> None:
    """Accept a loss: its rows get places without a body. Another run's file is set aside under a new name."""
    path, record = loss.path, loss.record
    new_name = _set_aside(path) if loss.is_other_file else ""
    with open_journal(path) as database, database.transaction() as connection:
        ((last_place, rows, tokens, positions),) = connection.execute(
            "SELECT (SELECT coalesce(max(seq), 0) FROM trajectories), "
            "(SELECT value FROM totals WHERE name = 'rows'), (SELECT value FROM totals WHERE name = 'tokens'), "
            "(SELECT value FROM totals WHERE name = 'positions')"
        )
        lost_places = range(last_place + 1, last_place + 1 + max(0, record.rows - rows))
        lost_tokens = max(0, record.tokens - tokens) if lost_places else 0
        add_lost_rows(connection, lost_places, lost_tokens)
        positions = max(0, record.positions - positions)
        add_to_totals(connection, {"rows": len(lost_places), "tokens": lost_tokens, "positions": positions})
        record_lost(connection)
        if record.identity:
            set_totals(connection, {"identity": record.identity})
        if loss.mark:
            set_mark(connection, loss.mark)
        count_puts(connection, last_place)
        record_recovery(connection, time.time(), new_name, loss.reason, rows, len(lost_places), lost_tokens)


def _set_aside(path: Path) -> str:
    new_path = free_name(path, "other")
    for part in ("-wal", "-shm", ""):
        if Path(f"{path}{part}").exists():
            os.rename(f"{path}{part}", f"{new_path}{part}")
    return new_path.name
