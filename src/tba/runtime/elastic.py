"""Searchers that join a run in progress, and leave it: `tba search --run RUN`.

    joined/searcher-1000.json    who joined, when, and how it left; locked while that process lives
    logs/ending                  the run is ending: every searcher that joined is to leave, and none may join

Invariant: a number is given out once in the life of a run, and no searcher of the run's own has one as high. A searcher
that joined leaves at the end of a round, where its counts are whole: when the run ends (it is told to, or nobody holds
the run any longer), or on Ctrl-C. What one that died had leased is given back by the driver. The trainer knows nothing
of all this.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tba.errors import DeadlineExceeded, UserError
from tba.json_input import parse_json
from tba.recipe import Recipe
from tba.record.faults import record_fault
from tba.replay.journal import JournalWriter
from tba.runtime.run_directory import RunDirectory
from tba.runtime.run_lock import is_held
from tba.user_code import problems_of

INTERRUPTED = "Ctrl-C"  # why a searcher leaves that a signal asked to
FIRST_NUMBER = 1000  # the number of the first that joins
_CHECK_SECONDS = 0.5  # seconds between two checks whether the run is still in progress, or who has left
_POLL_SECONDS = 0.05
_LOCK_SECONDS = 1.0  # for the journal, where the driver itself needs it


@dataclass
class Membership(ABC):
    """A searcher's membership in a run that it has joined: it ends on Ctrl-C in the searcher's terminal, or when
    `reason_to_leave`, which is called now and then, gives one.
    """

    number: int
    is_interrupted: Callable[[], bool]  # whether Ctrl-C was pressed
    reason: str | None = field(default=None, init=False)  # why it is to leave, if it is
    _checked_at: float = field(default=-_CHECK_SECONDS, init=False)

    @property
    def name(self) -> str:
        return f"searcher-{self.number}"

    def stop(self) -> bool:
        """Returns whether to leave; cheap, may be called often."""
        if self.reason is None and self.is_interrupted():
            self.reason = INTERRUPTED
        if self.reason is None and time.monotonic() - self._checked_at >= _CHECK_SECONDS:
            self._checked_at = time.monotonic()
            self.reason = self.reason_to_leave()
        return self.reason is not None

    @abstractmethod
    def reason_to_leave(self) -> str | None:
        """Returns why the run wants the searcher to leave; None: it does not."""


@dataclass
class LocalMembership(Membership):
    """A membership of a searcher that can reach the run's directory."""

    run: RunDirectory
    file: IO[str]
    facts: dict[str, Any] = field(default_factory=dict)  # the content of its file

    def reason_to_leave(self) -> str | None:
        """Returns a reason when the run ends, or nobody holds it any longer."""
        return "the run ended" if _stop_file(self.run).exists() or not is_held(self.run.path) else None

    def leave(self, departure: str) -> None:
        """Leave the run in order, and record the kind of departure."""
        with self.file:
            self.write(left=round(self.run.clock()(), 3), how=departure)

    def write(self, **facts: Any) -> None:
        """Write facts into the membership's file, which keeps its lock."""
        self.facts |= facts
        self.file.seek(0)
        self.file.truncate()
        json.dump(self.facts, self.file)
        self.file.flush()


@contextmanager
def join_run(run: RunDirectory, recipe: Recipe, is_interrupted: Callable[[], bool]) -> Iterator[LocalMembership]:
    """Yields this process's membership in a run in progress, which it leaves. Raises `UserError` as `enter_run`."""
    membership = enter_run(run, recipe, is_interrupted)
    departure = "an error"
    try:
        yield membership
        departure = membership.reason or "it was done"
    finally:
        membership.leave(departure)


def enter_run(run: RunDirectory, recipe: Recipe, is_interrupted: Callable[[], bool]) -> LocalMembership:
    """Returns a membership in a run, which the caller has to leave. Raises `UserError` where nobody can join it."""
    if recipe.runtime == "inline" or recipe.offline:
        manner = "learns from what is there" if recipe.offline else "takes turns in one process"
        raise UserError(f"the run at {run.path} {manner}: no searcher can join it")
    if not is_held(run.path):
        raise UserError(f"the run at {run.path} is not in progress: start (`tba train`) or continue (`tba resume`) it")
    with suppress(FileNotFoundError):
        state = _stop_file(run).read_text(encoding="utf-8") or "is ending: no searcher can join it now"
        raise UserError(f"the run at {run.path} {state}")
    prompts_at_once = (recipe.searcher_count + len(JoinedSearchers(run).present_names()) + 1) * recipe.prompts_per_round
    if recipe.prompts.selection != "epochs" and prompts_at_once > len(problems_of(recipe.task, "train")):
        raise UserError(f"the run at {run.path} has too few prompts for another searcher, which needs its own")
    number, file = _claim(run, recipe)
    membership = LocalMembership(number, is_interrupted, run, file)
    joined_seconds = round(run.clock()(), 3)
    membership.write(name=membership.name, process=os.getpid(), joined=joined_seconds, left=None, how=None)
    return membership


def _claim(run: RunDirectory, recipe: Recipe) -> tuple[int, IO[str]]:
    """Returns a number that nobody has had, and its file, locked before it appears under its name."""
    folder = _folder(run)
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{os.getpid()}"
    file = temporary.open("w+")
    fcntl.flock(file, fcntl.LOCK_EX)
    number = max(FIRST_NUMBER, recipe.searcher_count)
    try:
        while True:  # terminates: each number that is taken has a file that somebody made
            try:
                os.link(temporary, folder / f"searcher-{number}.json")
            except FileExistsError:
                number += 1
            else:
                return number, file
    finally:
        temporary.unlink()


@dataclass
class JoinedSearchers:
    """The driver's view of the searchers that have joined a run, and of those that have left."""

    run: RunDirectory
    _dead_names: set[str] = field(default_factory=set)
    _departed_facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # what the files of those who left say
    _checked_at: float = -_CHECK_SECONDS

    def await_start(self) -> None:
        """Let none join until the run that is resumed has begun."""
        with suppress(OSError):  # a full disk: the run itself says so
            _stop_file(self.run).parent.mkdir(exist_ok=True)
            _stop_file(self.run).write_text("is starting: try again in a moment", encoding="utf-8")

    def open(self) -> None:
        """Allow searchers to join: the run begins, or is resumed."""
        _stop_file(self.run).unlink(missing_ok=True)

    def release_leases_of_dead(self, journal: Path) -> None:
        """Give back the leases of searchers that died since the last call. Costs almost nothing when nobody has."""
        if time.monotonic() - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = time.monotonic()
        for name, facts, is_alive in self._entries():
            if is_alive or facts.get("left") is not None or name in self._dead_names:
                continue
            try:
                with JournalWriter(journal, name, _LOCK_SECONDS, create=False) as journal_writer:
                    journal_writer.resume()
            except DeadlineExceeded:  # somebody hangs with the lock: the driver must continue, to end that process
                continue
            self._dead_names.add(name)
            record_fault(self.run.path, "joined_deaths", f"{name}, which had joined, died without a word")

    def dismiss(self, seconds: float, show_progress: Callable[[], None]) -> list[str]:
        """Let all leave, and wait until they have; returns the names of those who had not after so many seconds."""
        with suppress(OSError):  # a full disk: they see that nobody holds the run any longer
            _stop_file(self.run).write_text("", encoding="utf-8")
        deadline = time.monotonic() + seconds
        while (remaining := self.present_names()) and time.monotonic() < deadline:
            show_progress()
            time.sleep(_POLL_SECONDS)
        return remaining

    def present_names(self) -> list[str]:
        """Returns the names of the searchers that have joined and are alive."""
        return [name for name, _, is_alive in self._entries() if is_alive]

    def record(self) -> list[dict[str, Any]]:
        """Returns facts of all that ever joined: `name`, when they `joined` and `left` (seconds since the run began),
        and `how`.
        """
        return [
            {
                "name": name,
                **{key: facts.get(key) for key in ("joined", "left")},
                "how": facts.get("how") or ("it is still there" if is_alive else "it died"),
            }
            for name, facts, is_alive in self._entries()
        ]

    def _entries(self) -> list[tuple[str, dict[str, Any], bool]]:
        """Returns (name, content of its file, whether the process is alive).

        The file of one who has left is read once.
        """
        entries: list[tuple[str, dict[str, Any], bool]] = []
        paths = [p for p in _folder(self.run).glob("searcher-*.json") if p.stem.rpartition("-")[2].isdecimal()]
        for path in sorted(paths, key=lambda p: int(p.stem.rpartition("-")[2])):
            if path.stem in self._departed_facts:
                entries.append((path.stem, self._departed_facts[path.stem], False))
                continue
            with path.open() as file:
                is_alive = not _is_unlocked(file)
                try:
                    facts = parse_json(file.read(), joined=float | None, left=float | None, how=str | None)
                except ValueError:  # the file is just being written, or its process died while writing
                    facts = {}
            if not is_alive and facts.get("left") is not None:
                self._departed_facts[path.stem] = facts
            entries.append((path.stem, facts, is_alive))
        return entries


def _is_unlocked(file: IO[str]) -> bool:
    """Returns whether the lock could be taken: then nobody else has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _folder(run: RunDirectory) -> Path:
    return run.path / "joined"


def _stop_file(run: RunDirectory) -> Path:
    return run.path / "logs" / "ending"
