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
from tba.replay.recovery import add_lost, count_put, free_name, open_journal, record_recovery
from tba.replay.schema import add_to_totals, note_lost, set_mark, set_totals
from tba.types import Json


@dataclass(frozen=True, slots=True)
class Held:
    """Counts what a journal held at some moment."""

    rows: int = 0
    tokens: int = 0
    positions: int = 0  # of prompts that had been handed out
    identity: int = 0  # the file's random identifier; 0: not known

    @classmethod
    def of(cls, journal: JournalFollower) -> Held:
        """Returns what the journal holds now."""
        totals = journal.totals()
        return cls(totals.rows, totals.tokens, totals.positions, totals.identity)

    @classmethod
    def parse(cls, state: Json) -> Held:
        """Reads what `state` returned; what is not there, or is no number, is 0."""
        found = state if isinstance(state, dict) else {}
        return cls(**{name: n for name in cls.__slots__ if isinstance(n := found.get(name), int) and n >= 0})

    @classmethod
    def most(cls, known: Sequence[Held]) -> Held:
        """Returns the largest count of each kind, and the identity if any knows it."""
        return cls(*(max((getattr(held, name) for held in known), default=0) for name in cls.__slots__))

    def state(self) -> dict[str, Json]:
        """Returns the counts by name, as JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Loss:
    """Says what a journal lacks of what it is known to have held."""

    path: Path
    held: Held
    there: Held
    rows: int
    why: str  # what the journal is: "is gone", ...
    other: bool = False  # it is another run's file
    mark: int = 0  # that it should have; 0: not known

    def __str__(self) -> str:
        if not self.rows:
            return f"the journal {self.path} {self.why}: what was acknowledged since is missing"
        return (
            f"the journal {self.path} {self.why}: at least {self.rows:,} of the {self.held.rows:,} trajectories "
            "that it held are missing"
        )


def acknowledged(path: Path) -> Held:
    """Returns what the owners had put into the journal at `path`, as each of them left it beside the journal."""
    amounts = []
    for file in acknowledged_folder(path).glob("*"):
        with suppress(OSError, ValueError):
            rows, tokens = map(int, file.read_text().split())
            amounts.append(Held(max(0, rows), max(0, tokens)))
    return Held.most(amounts)


def find_loss(path: Path, held: Held, marks: Sequence[Sequence[int]] = ()) -> Loss | None:
    """Returns what the journal at `path` lacks of what it held; None when it lacks nothing.

    It is opened, and recovered if it is damaged, but not created. marks: that it may have had in each incarnation.
    """
    now = marks[-1] if marks else ()
    mark = now[-1] if now else 0
    if not path.is_file():
        return Loss(path, held, Held(), held.rows, "is gone", mark=mark) if held.rows else None
    with JournalFollower(path) as journal:
        there, found = Held.of(journal), journal.totals().mark
    if there.rows and held.identity and there.identity not in (0, held.identity):
        return Loss(path, held, there, held.rows, "is another file than it was", other=True, mark=mark)
    if there.rows < held.rows:
        why = "is shorter than it was" if there.rows else "is empty"
        return Loss(path, held, there, held.rows - there.rows, why, mark=mark)
    if now and found and found not in now:
        if any(found in earlier for earlier in marks):
            return Loss(path, held, there, 0, "is a copy from before the run was last resumed", mark=mark)
        return Loss(path, held, there, held.rows, "is of a copy of the run, which went another way", True, mark)
    return None


def leave_mark(path: Path, mark: int) -> None:
    """Mark the journal as that of the incarnation that begins."""
    with open_journal(path) as database, database.transaction() as connection:
        set_mark(connection, mark)


def accept(loss: Loss) -> None:
    """Continue with what is there. Another run's file is set aside under a new name."""
    path, held = loss.path, loss.held
    aside = _set_aside(path) if loss.other else ""
    with open_journal(path) as database, database.transaction() as connection:
        ((last, rows, tokens, positions),) = connection.execute(
            "SELECT (SELECT coalesce(max(seq), 0) FROM trajectories), "
            "(SELECT value FROM totals WHERE name = 'rows'), (SELECT value FROM totals WHERE name = 'tokens'), "
            "(SELECT value FROM totals WHERE name = 'positions')"
        )
        lost = range(last + 1, last + 1 + max(0, held.rows - rows))
        lost_tokens = max(0, held.tokens - tokens) if lost else 0
        add_lost(connection, lost, lost_tokens)
        more = {"rows": len(lost), "tokens": lost_tokens, "positions": max(0, held.positions - positions)}
        add_to_totals(connection, more)
        note_lost(connection)
        if held.identity:
            set_totals(connection, {"identity": held.identity})
        if loss.mark:
            set_mark(connection, loss.mark)
        count_put(connection, last)
        record_recovery(connection, time.time(), aside, loss.why, rows, len(lost), lost_tokens)


def _set_aside(path: Path) -> str:
    aside = free_name(path, "other")
    for part in ("-wal", "-shm", ""):
        if Path(f"{path}{part}").exists():
            os.rename(f"{path}{part}", f"{aside}{part}")
    return aside.name
