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

ASKED = "Ctrl-C"  # why a searcher leaves that a signal asked to
FIRST = 1000  # the number of the first that joins
_LOOK = 0.5  # seconds between two checks whether the run is still in progress, or who has left
_POLL = 0.05
_LOCK_SECONDS = 1.0  # for the journal, where the driver itself needs it


@dataclass
class Leaving(ABC):
    """When a searcher that has joined is to leave: on Ctrl-C in its terminal, or when `called`, asked now and then,
    says so.
    """

    number: int
    asked: Callable[[], bool]  # whether Ctrl-C was pressed
    why: str | None = field(default=None, init=False)  # why it is to leave, if it is
    _looked: float = field(default=-_LOOK, init=False)

    @property
    def name(self) -> str:
        return f"searcher-{self.number}"

    def stop(self) -> bool:
        """Returns whether to leave; cheap, may be called often."""
        if self.why is None and self.asked():
            self.why = ASKED
        if self.why is None and time.monotonic() - self._looked >= _LOOK:
            self._looked = time.monotonic()
            self.why = self.called()
        return self.why is not None

    @abstractmethod
    def called(self) -> str | None:
        """Returns why the run wants it to leave; None: it does not."""


@dataclass
class Place(Leaving):
    """A searcher's place in a run that it has joined."""

    run: RunDirectory
    file: IO[str]
    facts: dict[str, Any] = field(default_factory=dict)  # the content of its file

    def called(self) -> str | None:
        """Returns a reason when the run ends, or nobody holds it any longer."""
        return "the run ended" if _stop_file(self.run).exists() or not is_held(self.run.path) else None

    def leave(self, how: str) -> None:
        """Leave the run in order, and record how."""
        with self.file:
            self.write(left=round(self.run.clock()(), 3), how=how)

    def write(self, **facts: Any) -> None:
        """Write facts into the place's own file, which keeps its lock."""
        self.facts |= facts
        self.file.seek(0)
        self.file.truncate()
        json.dump(self.facts, self.file)
        self.file.flush()


@contextmanager
def joined(run: RunDirectory, recipe: Recipe, asked: Callable[[], bool]) -> Iterator[Place]:
    """Gives this process a place of its own in a run in progress. Raises `UserError` when there is none."""
    place = enter(run, recipe, asked)
    how = "an error"
    try:
        yield place
        how = place.why or "it was done"
    finally:
        place.leave(how)


def enter(run: RunDirectory, recipe: Recipe, asked: Callable[[], bool]) -> Place:
    """Returns a place in a run in progress; the caller has to leave it. Raises `UserError` when there is none."""
    if recipe.runtime == "inline" or recipe.offline:
        how = "learns from what is there" if recipe.offline else "takes turns in one process"
        raise UserError(f"the run at {run.path} {how}: no searcher can join it")
    if not is_held(run.path):
        raise UserError(
            f"the run at {run.path} is not in progress: start it with `tba train`, or continue it (`tba resume`)"
        )
    with suppress(FileNotFoundError):
        doing = _stop_file(run).read_text(encoding="utf-8") or "is ending: no searcher can join it now"
        raise UserError(f"the run at {run.path} {doing}")
    at_once = (recipe.searcher_count + len(Joined(run).present()) + 1) * recipe.prompts_per_round
    if recipe.prompts.selection != "epochs" and at_once > len(problems_of(recipe.task, "train")):
        raise UserError(
            f"the run at {run.path} has too few prompts for another searcher, which needs prompts of its own"
        )
    number, file = _claim(run, recipe)
    place = Place(number, asked, run, file)
    since = round(run.clock()(), 3)
    place.write(name=place.name, process=os.getpid(), joined=since, left=None, how=None)
    return place


def _claim(run: RunDirectory, recipe: Recipe) -> tuple[int, IO[str]]:
    """Returns a number that nobody has had, and its file, locked before it appears under its name."""
    folder = _folder(run)
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{os.getpid()}"
    file = temporary.open("w+")
    fcntl.flock(file, fcntl.LOCK_EX)
    number = max(FIRST, recipe.searcher_count)
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
class Joined:
    """The driver's side: who has joined, and who has left."""

    run: RunDirectory
    _dead: set[str] = field(default_factory=set)
    _left: dict[str, dict[str, Any]] = field(default_factory=dict)  # the files of those who have left, by name
    _looked: float = -_LOOK

    def await_start(self) -> None:
        """Let none join until the run that is resumed has begun."""
        with suppress(OSError):  # a full disk: the run itself says so
            _stop_file(self.run).parent.mkdir(exist_ok=True)
            _stop_file(self.run).write_text("is starting: try again in a moment", encoding="utf-8")

    def open(self) -> None:
        """Allow searchers to join: the run begins, or is resumed."""
        _stop_file(self.run).unlink(missing_ok=True)

    def look(self, journal: Path) -> None:
        """Give back what those had leased who died since the last call. Costs almost nothing when nobody has."""
        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        for name, facts, there in self._all():
            if there or facts.get("left") is not None or name in self._dead:
                continue
            try:
                with JournalWriter(journal, name, _LOCK_SECONDS, create=False) as former:
                    former.resume()
            except DeadlineExceeded:  # somebody hangs with the lock: the driver must continue, to end that process
                continue
            self._dead.add(name)
            record_fault(self.run.path, "joined_deaths", f"{name}, which had joined, died without a word")

    def dismiss(self, seconds: float, tell: Callable[[], None]) -> list[str]:
        """Let all leave, and wait until they have; returns those who had not after so many seconds."""
        with suppress(OSError):  # a full disk: they see that nobody holds the run any longer
            _stop_file(self.run).write_text("", encoding="utf-8")
        deadline = time.monotonic() + seconds
        while (left := self.present()) and time.monotonic() < deadline:
            tell()
            time.sleep(_POLL)
        return left

    def present(self) -> list[str]:
        """Returns the names of those who are there."""
        return [name for name, _, there in self._all() if there]

    def record(self) -> list[dict[str, Any]]:
        """Returns all who ever joined: `name`, when they `joined` and `left` (seconds since the run began), and
        `how`.
        """
        return [
            {
                "name": name,
                **{key: facts.get(key) for key in ("joined", "left")},
                "how": facts.get("how") or _how(there),
            }
            for name, facts, there in self._all()
        ]

    def _all(self) -> list[tuple[str, dict[str, Any], bool]]:
        """Returns (name, content of its file, whether the process is alive).

        The file of one who has left is read once.
        """
        found: list[tuple[str, dict[str, Any], bool]] = []
        numbered = [p for p in _folder(self.run).glob("searcher-*.json") if p.stem.rpartition("-")[2].isdecimal()]
        for path in sorted(numbered, key=lambda p: int(p.stem.rpartition("-")[2])):
            if path.stem in self._left:
                found.append((path.stem, self._left[path.stem], False))
                continue
            with path.open() as file:
                there = not _locked(file)
                try:
                    facts = parse_json(file.read(), joined=float | None, left=float | None, how=str | None)
                except ValueError:  # the file is just being written, or its process died while writing
                    facts = {}
            if not there and facts.get("left") is not None:
                self._left[path.stem] = facts
            found.append((path.stem, facts, there))
        return found


def _how(there: bool) -> str:
    return "it is still there" if there else "it died"


def _locked(file: IO[str]) -> bool:
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
