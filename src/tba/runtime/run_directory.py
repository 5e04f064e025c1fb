"""The run directory: how searchers and trainer are connected, and what a run leaves behind.

    runs/NAME/  recipe.json  journal.sqlite  weights/  checkpoints/  logs/  metrics.jsonl  samples.jsonl
                faults.jsonl  summary.json  tensorboard/

Invariant: `recipe.json` alone (a name or path, the overrides, the run's own facts) rebuilds the recipe in any process,
and says which incarnation this is: each time the run is begun or resumed, or its trainer restarted, it gets another
number. Each time it is begun or resumed it gets another mark too, which its journal has from then on. Relative paths
mean the same for as long as the run is open here, whatever directory a user's code changes to.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tba.settings
from tba.errors import UserError
from tba.json_input import read_json
from tba.recipe import Recipe, settings_json
from tba.recipe_names import VARIANT_MARK
from tba.record.jsonl import as_json, write_json
from tba.replay.database import acknowledged_folder
from tba.replay.follower import JournalFollower
from tba.replay.missing_rows import leave_mark
from tba.runtime.program import version
from tba.runtime.run_lock import hold
from tba.types import Json, is_name


@dataclass(frozen=True)
class Incarnation:
    """One incarnation of a run, as recipe.json records it."""

    why: str
    program: str  # its version
    marks: list[int]  # that the journal may have had meanwhile


_FACTS: dict[str, Any] = {  # that every recipe.json has
    "recipe": str,
    "digest": str | None,
    "overrides": list[str],
    "started": float,
    "clock": dict[str, float],
    "sft_seconds": float | None,
    "incarnations": list[Incarnation],
    "resolved": dict[str, Any],
}
CHECKSUM = "checksum"  # in recipe.json, of the rest
SCORERS = "scorers"  # in recipe.json: fingerprints of the models that score answers, other than the policy's start
PREPARED = "prepared"  # in recipe.json: the run was made for imports, and has not begun
IMPORTS = "import"  # the owner whose rows the journal may have before a run begins


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed
        return Path("/")


@dataclass(frozen=True)
class RunDirectory:
    """Names the paths of one run, for the processes that work on it. Made by `create`, reopened by `open`."""

    path: Path  # absolute, once it is made
    lock: int | None = field(default=None, compare=False)  # its descriptor, while it is held
    base: Path = field(default_factory=_working_directory, compare=False)  # where relative paths of the run begin

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.base / self.path)

    @classmethod
    def create(
        cls,
        path: Path,
        source: str,
        overrides: list[str],
        recipe: Recipe,
        began: float | None = None,
        sft_seconds: float = 0.0,
    ) -> RunDirectory:
        """Make the directory and write recipe.json. The run began at `began`, by `time.monotonic`; None: now.

        `sft_seconds` were spent on a warm start since. Raises `UserError` when a run is there already.
        """
        if (path / "recipe.json").exists():
            raise UserError(
                f"{path} holds a run already: continue it (tba resume {path}), choose another --run-name, or remove it"
            )
        for part in ("", "logs", "weights", "checkpoints"):
            _make_folder(path / part)
        run = cls(path)
        began = time.monotonic() if began is None else began
        name, separator, variant = source.partition(VARIANT_MARK)
        recipe_file = Path(name) if name.endswith(".py") else None
        facts = {
            "recipe": f"{recipe_file.resolve()}{separator}{variant}" if recipe_file else source,
            "digest": _digest(recipe_file) if recipe_file else None,
            "overrides": overrides,
            "started": time.time() - (time.monotonic() - began),  # when `began` was, for the times of trajectories
            "clock": {"began": began, "before": 0.0},
            "sft_seconds": sft_seconds,
            "incarnations": [{"why": "begun", "program": version(), "marks": [mark := _new_mark()]}],
            "resolved": settings_json(recipe),
        }
        # no worker creates it: one that finds no journal reports that
        with JournalFollower(run.journal(recipe)) as journal:
            if journal.counters().keys() - {IMPORTS}:
                raise UserError(
                    f"{run.journal(recipe)} is of another run ({journal.totals().rows:,} trajectories): choose another "
                    "--run-name, or remove it"
                )
        leave_mark(run.journal(recipe), mark)
        shutil.rmtree(acknowledged_folder(run.journal(recipe)), ignore_errors=True)  # of a run that had its place
        run.write_facts(facts)
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open the run at `path`. Raises `UserError` when there is none."""
        if not (path / "recipe.json").is_file():
            raise UserError(f"there is no run at {path} (no recipe.json): give the directory of a run")
        return cls(path)

    @property
    def displayed_path(self) -> Path:
        """Returns the run's path as people write it: relative to where the command was given, if it lies there."""
        return self.path.relative_to(self.base) if self.path.is_relative_to(self.base) else self.path

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the content of recipe.json. Raises `UserError` when that is not what a run writes."""
        remedy = "put it back as it was, or start a new run"
        facts: dict[str, Any] = {"digest": None, **read_json(self.path / "recipe.json", remedy, **_FACTS)}
        if not facts["incarnations"]:
            raise UserError(f"{self.path / 'recipe.json'} has no incarnation, which every run has: {remedy}")
        if {"--help", "-h"} & set(facts["overrides"]):  # the option would be obeyed, and end the program
            raise UserError(f"{self.path / 'recipe.json'} has an override that no run has (--help): {remedy}")
        return facts

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Write recipe.json, with a checksum of the rest."""
        write_json(self.path / "recipe.json", {**facts, CHECKSUM: _checksum(facts)})

    def recipe(self) -> Recipe:
        """Returns the recipe, rebuilt from its name or path and the overrides; never from a pickle. Raises `UserError`
        when recipe.json is not as it was written.

        A recipe that is a file is executed: commands that only read a run use `recipe_to_read`.
        """
        facts = self.facts
        if facts.get(CHECKSUM, checksum := _checksum(facts)) != checksum:  # earlier programs wrote none
            raise UserError(
                f"{self.path / 'recipe.json'} is damaged or was edited (its checksum does not match): put it back as it"
                " was, or start a new run"
            )
        source = facts["recipe"]
        file = source.partition(VARIANT_MARK)[0]
        if facts["digest"] is not None and facts["digest"] != _digest(Path(file)):
            raise UserError(f"{file} has changed since the run at {self.path} began: start a new run")
        base_recipe = tba.settings.find(source)
        return tba.settings.override(base_recipe, facts["overrides"], f"tba train {source}", recorded=True)

    def recipe_to_read(self, trusted: bool) -> Recipe:
        """Returns the recipe for a command that does not continue the run, which may be somebody else's.

        Raises `UserError` where a file would be executed, unless it is `trusted`.
        """
        file = self.facts["recipe"].partition(VARIANT_MARK)[0]
        if file.endswith(".py") and not trusted:
            raise UserError(
                f"the run at {self.path} is of the recipe file {file}, which would be executed: look at it, then give "
                "--trust too"
            )
        return self.recipe()

    @property
    def incarnation(self) -> int:
        """Returns the incarnation of the weights that are trained now; 0 is the first."""
        return len(self.facts["incarnations"]) - 1

    @property
    def marks(self) -> list[list[int]]:
        """Returns the marks that the journal may have had in each incarnation."""
        return [incarnation["marks"] for incarnation in self.facts["incarnations"]]

    def begin_again(self, reason: str, overrides: Sequence[str] = (), seconds_before: float | None = None) -> None:
        """Begin another incarnation, with further overrides; every worker started from here on belongs to it.

        seconds_before: how long the run had been going when it ended (None: it has not ended, and its journal keeps
        its mark).
        """
        facts, marks = self.facts, self.marks[-1] + ([] if seconds_before is None else [_new_mark()])
        facts.pop(PREPARED, None)
        facts["overrides"] = [*facts["overrides"], *overrides]
        facts["incarnations"] = [*facts["incarnations"], {"why": reason, "program": version(), "marks": marks}]
        if seconds_before is not None:
            facts["clock"] = {"began": time.monotonic(), "before": seconds_before}
        recipe = tba.settings.override(tba.settings.find(facts["recipe"]), facts["overrides"], "", recorded=True)
        facts["resolved"] = settings_json(recipe)
        self.write_facts(facts)

    def mark_journal(self, journal: Path) -> None:
        """Leave the mark of this incarnation in the journal, and from here on accept no other.

        A process that is killed in between has acknowledged nothing yet: until then an earlier mark is right too.
        """
        facts = self.facts
        *_, mark = self.marks[-1]
        leave_mark(journal, mark)
        facts["incarnations"][-1]["marks"] = [mark]
        self.write_facts(facts)

    def clock(self) -> Callable[[], float]:
        """Returns a function that gives the seconds that the run has been going, in every process of this machine, even
        if the machine's clock is set.
        """
        clock: Mapping[str, float] = self.facts["clock"]
        return lambda: clock["before"] + time.monotonic() - clock["began"]

    @contextmanager
    def hold_lock(self, seconds: float) -> Iterator[RunDirectory]:
        """Yields the run with its lock, which the workers that are started from it inherit and hold for as long as they
        live. The working directory is afterwards what it was before.

        Raises `UserError` when others hold the lock for `seconds` more.
        """
        with hold(self.path, seconds) as lock, chdir(self.base):
            yield replace(self, lock=lock)

    def journal(self, recipe: Recipe) -> Path:
        """Returns the journal's file: in this directory, or in `run.journal_dir` under this run's name."""
        folder = recipe.run.journal_dir
        if folder is not None:
            _make_folder(self.base / folder)
        return self._journal_in(folder)

    def _journal_in(self, folder: Path | None) -> Path:
        if folder is None:
            return self.path / "journal.sqlite"
        key = hashlib.blake2b(str(self.path.resolve()).encode(), digest_size=4).hexdigest()
        return self.base / folder / f"{self.path.name}-{key}.sqlite"

    def journal_to_read(self) -> Path:
        """Returns the journal's file by recipe.json alone, for commands that read a run: no recipe is executed."""
        local_journal = self.path / "journal.sqlite"
        if local_journal.exists():
            return local_journal
        return self.journal_by(self.facts["resolved"])

    def journal_by(self, resolved_recipe: Json) -> Path:
        """Returns the journal's file by a resolved recipe, wherever that lies."""
        folder = setting(resolved_recipe, "run", "journal_dir")
        return self._journal_in(Path(folder) if isinstance(folder, str) else None)

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log(self, worker: str) -> Path:
        return self.path / "logs" / f"{worker}.log"

    def error(self, worker: str) -> Path:
        """Returns the file in which a worker leaves the error that ended it."""
        return self.path / "logs" / f"{worker}.error.json"

    def result(self, worker: str) -> Path:
        """Returns the file in which a worker leaves its result for the summary."""
        return self.path / "logs" / f"{worker}.result.json"


def setting(resolved: Json, *names: str) -> Json:
    """Returns a setting of a run's resolved recipe, by the names that lead to it; None where it has none."""
    for name in names:
        resolved = resolved.get(name) if isinstance(resolved, dict) else None
    return resolved


def new_path(root: Path, recipe_name: str, run_name: str | None) -> Path:
    """Returns runs/NAME: the given name, or the recipe's with the time."""
    if run_name is not None and not is_name(run_name):
        raise UserError(
            f"--run-name is {run_name!r}: use letters, digits, '.', '_' and '-' only, a letter, digit or '_' first"
        )
    if run_name is None and not is_name(recipe_name):
        raise UserError(
            f"the recipe is named {recipe_name!r}, which cannot name a folder: give --run-name (letters, digits, '.', "
            "'_', '-')"
        )
    name = run_name or f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if run_name is None and (root / name).exists():
        name += f"-{os.getpid()}"
    return root / name


def _new_mark() -> int:
    return 1 + secrets.randbelow(2**62)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder} ({error.strerror}): choose another place") from error


def _checksum(facts: Mapping[str, Any]) -> str:
    checked_facts = {name: value for name, value in facts.items() if name != CHECKSUM}
    text = json.dumps(as_json(checked_facts), sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


def _digest(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    except (OSError, ValueError) as error:
        raise UserError(f"the recipe's file {path} cannot be read ({error}): put it back") from error
