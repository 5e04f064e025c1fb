"""One variant with one seed: its state, read from its folder, and how it is run.

Invariant: the folder is the state. A trial has ended when its run has a summary (of all its steps) or a failure under
exactly the requested recipe; anything less is an interrupted run and is made again from the start. What tables and
plots need is never removed; what only searchers and trainer needed is removed once the run has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tba.errors import UserError
from tba.recipe import Recipe, differences, settings_json
from tba.record.failure import Failure
from tba.record.jsonl import as_json
from tba.record.log import tail
from tba.record.run_record import RunRecord
from tba.record.summary import Summary
from tba.runtime.local.forkserver import Program, start
from tba.runtime.run_directory import RunDirectory
from tba_lab.comparison import Outcome
from tba_lab.figures import DIVERGENCE_FILE, DIVERSITY_FILE, figures
from tba_lab.study import Study

State = Literal["absent", "cut off", "not measured", "ended", "failed", "other recipe"]
_POLL_SECONDS = 0.1  # seconds between two looks at a run
_STOP_SECONDS = 150.0  # seconds that a run has to end in order once it was asked to
_DESCRIPTIVE_FIELDS = ("name", "description")  # of a recipe, what does not make it another one
_OPEN_FIELDS = (("model.path", ""), ("model.dtype", "auto"), ("searchers", None), ("trainer.ranks", None))
# what a recipe leaves open, and a run finds when it begins


@dataclass(frozen=True)
class Trial:
    """A run of a study that was made, or is to be made."""

    study: Study
    variant: str
    seed: int
    source: str  # STUDY::VARIANT, from which every process makes the recipe again
    overrides: tuple[str, ...]
    recipe: Recipe
    path: Path  # of the run
    keep: bool = False  # its journal and its published weights too, when it has ended; the checkpoints always stay

    @property
    def log(self) -> Path:
        """Returns the log file of the run's own process."""
        return self.path.parents[1] / "logs" / f"{self.path.name}.log"

    def state(self) -> State:
        """Returns the state that the folder shows."""
        if not (self.path / "recipe.json").is_file():
            return "absent"
        if self.difference() is not None:
            return "other recipe"
        if Failure.read(self.path) is not None:
            return "failed"
        summary = Summary.read(self.path)
        if summary is None or summary.faults.get("stopped"):
            return "cut off"
        if all((self.path / file).exists() for file in self._measurement_files()):
            return "ended"
        return "not measured" if any((self.path / "weights").glob("*.safetensors")) else "cut off"

    def _measurement_files(self) -> list[str]:
        """Returns the names of the files that measuring the last weights writes."""
        study = self.study
        counts_by_file = {DIVERGENCE_FILE: study.divergence_prompts, DIVERSITY_FILE: study.diversity_samples}
        return [file for file, count in counts_by_file.items() if count]

    def difference(self) -> str | None:
        """Returns the first field in which the existing run has another recipe, with both values; None if none."""
        recorded_fields = RunDirectory.open(self.path).facts["resolved"]
        requested_fields = json.loads(json.dumps(as_json(settings_json(self.recipe))))
        for name, recorded_value, requested_value in differences(recorded_fields, requested_fields):
            without_effect = any(name.startswith(f"{field}.") for field in self.recipe.unused)
            if name not in _DESCRIPTIVE_FIELDS and not without_effect and (name, requested_value) not in _OPEN_FIELDS:
                return f"{name} was {json.dumps(recorded_value)} and is {json.dumps(requested_value)}"
        return None

    def outcome(self) -> Outcome | None:
        """Returns the outcome of a run that has ended under its recipe; None otherwise."""
        state = self.state()
        if state == "failed":
            failure = Failure.read(self.path)
            assert failure is not None
            message = " ".join(failure.message.split()).partition(";")[0]
            return Outcome(self.variant, self.seed, failure=f"{failure}: {message}")
        if state not in ("ended", "not measured"):
            return None
        record = RunRecord.read(self.path)
        return Outcome(self.variant, self.seed, figures(record, self.study.metric, self.study.target))

    def order(self) -> dict[str, Any]:
        """Returns the argument of `tba_lab.trial_process`."""
        return {
            "source": self.source,
            "overrides": list(self.overrides),
            "path": str(self.path),
            "divergence": [self.study.divergence_prompts, self.study.divergence_samples],
            "diversity": [self.study.diversity_prompts, self.study.diversity_samples],
        }

    def carry_out(self, stop: Callable[[], bool], runner: Runner) -> None:
        """Make the run to its end, or until `stop()` is true; an interrupted run is removed first.

        Raises `UserError` when it cannot be started, or when its file has changed since the study began.
        """
        if self.path.exists() and self.state() != "not measured":
            self.remove()
        code = runner(self, stop)
        state = self.state()
        if state == "other recipe":
            raise UserError(f"{self.source} has changed since the study began ({self.difference()}): start it again")
        if state == "absent" and not stop():
            raise UserError(f"{self.source} cannot be started: {self._last_words()}")
        if state == "cut off" and code and not stop():
            Failure.record(self.path, f"killed by signal {-code}" if code < 0 else self._last_words())
        if state == "ended" and not self.keep:
            self._remove_journal()
            shutil.rmtree(self.path / "weights")

    def remove(self) -> None:
        """Remove the existing run and its journal, wherever that is."""
        self._remove_journal()
        shutil.rmtree(self.path)

    def _remove_journal(self) -> None:
        remove_journal(RunDirectory(self.path).journal(self.recipe))

    def _last_words(self) -> str:
        lines = [line for line in tail(self.log, 5).splitlines() if line.strip()]
        return lines[-1].strip().removeprefix("tba: ") if lines else f"it said nothing in {self.log}"


Runner: TypeAlias = Callable[[Trial, Callable[[], bool]], int]  # runs a trial until it ends or is to stop: exit code


def run_in_child(trial: Trial, stop: Callable[[], bool]) -> int:
    """Runs a trial in a process of its own, so that memory and threads are as in any other run.

    The process is asked to stop when this one is, and killed if it does not in time.
    """
    trial.log.parent.mkdir(parents=True, exist_ok=True)
    with trial.log.open("wb") as log:
        program = Program("run", "tba_lab.trial_process", (json.dumps(trial.order()),))
        child = start(program, {**os.environ, "COLUMNS": "120"}, log.fileno())
    assert child.stdin is not None
    stop_seconds: float | None = None
    try:
        while child.poll() is None and (stop_seconds is None or time.monotonic() - stop_seconds < _STOP_SECONDS):
            if stop() and stop_seconds is None:
                stop_seconds = time.monotonic()
                child.stdin.close()
            time.sleep(_POLL_SECONDS)
    finally:
        child.kill()  # nothing where it has ended; where it has not, its parts end with it
        code = child.wait()
        child.stdin.close()
    return code


def remove_journal(journal: Path) -> None:
    """Remove a journal and all that lies beside it under its name."""
    for file in journal.parent.glob(f"{journal.name}*"):
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()
