"""A run's directory, read back, at any time: while it runs, when it has ended, and when it was killed.

Invariant: reading changes nothing, and what is not there yet is empty or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tba.errors import UserError
from tba.evaluation.estimators import GREEDY, SAMPLED
from tba.json_input import parse_json
from tba.record import evaluations, metrics
from tba.record.evaluations import RecordedAnswer
from tba.record.failure import Failure
from tba.record.faults import describe_unreadable, read_all_records
from tba.record.jsonl import write_json
from tba.record.metrics import column
from tba.record.run_warnings import by_version, recorded_warnings
from tba.record.summary import Summary
from tba.record.text import percent
from tba.types import Evaluation, Json, Version


@dataclass(frozen=True)
class BackupFacts:
    """Holds what a run notes of its newest backup, in `logs/backup.json`."""

    time: float  # seconds since the epoch
    seconds: float  # that it took
    rows: int  # trajectories in its journal
    tokens: int
    bytes: int  # of its journal
    place: str  # its folder

    def write(self, directory: Path) -> None:
        """Write the facts of a backup of the run in `directory`."""
        write_json(directory / "logs" / "backup.json", self)

    @classmethod
    def read(cls, directory: Path) -> BackupFacts | None:
        """Returns the newest backup of the run in `directory`; None where there is none, or its note is damaged."""
        try:
            facts: BackupFacts = parse_json((directory / "logs" / "backup.json").read_bytes(), cls)
        except (OSError, ValueError):
            return None
        return facts


@dataclass(frozen=True)
class RunRecord:
    """Holds what one run has recorded so far, all read at once."""

    directory: Path
    metrics: Sequence[dict[str, Json]]
    evaluations: Sequence[Evaluation]  # in the order they were made
    answers: Sequence[RecordedAnswer]
    summary: Summary | None  # None: it has not ended, has failed or was killed
    failure: Failure | None = None  # what ended it
    unreadable: Sequence[str] = ()  # a sentence for each file that has lines which cannot be read
    warnings: Sequence[str] = ()  # the sentences recorded, oldest first
    best: str | None = None  # the best checkpoint that is not the newest: its folder and its figure
    backup: BackupFacts | None = None  # the newest backup; None: there is none

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        """Reads the run in `directory`. Raises `UserError` when there is none."""
        if not directory.is_dir():
            raise UserError(f"{directory}: there is no such run; give the directory of one, for example runs/NAME")
        if not any((directory / name).exists() for name in ("recipe.json", metrics.FILE, evaluations.FILE)):
            raise UserError(f"{directory}: wanted a run's directory, but it holds neither recipe nor metrics.")
        summary, lines = Summary.read(directory), read_all_records(directory)
        figures = lines[evaluations.FILE][0]
        return cls(
            directory=directory,
            metrics=lines[metrics.FILE][0],
            evaluations=figures or (summary.evaluations if summary else ()),
            answers=lines[evaluations.ANSWERS_FILE][0],
            summary=summary,
            failure=Failure.read(directory),
            unreadable=[describe_unreadable(name, bad) for name, (_, bad) in lines.items() if bad],
            warnings=recorded_warnings(directory),
            best=_describe_best(directory, figures),
            backup=BackupFacts.read(directory),
        )

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def steps(self) -> int:
        """Returns the optimizer steps so far; a step that a resumed run repeats counts once."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def wall_seconds(self) -> float:
        """Returns the run's wall-clock in seconds, or that so far when it has not ended."""
        if self.summary is not None:
            return self.summary.wall_seconds.total
        x, _ = column(self.metrics, "step")
        return float(x.max()) if len(x) else 0.0

    def latest(self, metric: str) -> float | None:
        """Returns the newest finite value of a metric, or None."""
        _, y = column(self.metrics, metric)
        return float(y[-1]) if len(y) else None

    def figures(self) -> dict[str, tuple[Evaluation, Evaluation | None]]:
        """Returns, by metric, the figure of the first version evaluated and of the last; None while there is but one.

        Metrics are in the order greedy, sampled, pass@K by K. Versions that a restart has discarded do not count.
        """
        by_metric: dict[str, list[Evaluation]] = {}
        for e in sorted(self.evaluations, key=lambda e: e.version):
            if not self._is_discarded(e.version):
                by_metric.setdefault(e.metric, []).append(e)
        order = sorted(by_metric, key=lambda name: (name != GREEDY, name != SAMPLED, len(name), name))
        return {name: (by_metric[name][0], _last_if_later(by_metric[name])) for name in order}

    def until(self, version: Version) -> RunRecord:
        """Returns the record without what was measured of later versions."""
        return replace(
            self,
            evaluations=[e for e in self.evaluations if e.version <= version],
            answers=[a for a in self.answers if a.version <= version],
        )

    def answers_before_after(self) -> list[tuple[RecordedAnswer, RecordedAnswer]]:
        """Returns the shown problems, each as answered by the first version evaluated and by the last."""
        versions = [a.version for a in self.answers if not self._is_discarded(a.version)]
        if not versions:
            return []
        first_version, last_version = min(versions), max(versions)
        if first_version == last_version:
            return []
        before = {a.prompt: a for a in self.answers if a.version == first_version}
        after = {a.prompt: a for a in self.answers if a.version == last_version}
        return [(before[prompt], after[prompt]) for prompt in before if prompt in after]

    @cached_property
    def _first_steps(self) -> dict[int, int]:
        """Returns the first step that each incarnation made."""
        first_steps: dict[int, int] = {}
        for row in self.metrics:
            if (incarnation := metrics.incarnation_of(row)) is not None:
                first_steps.setdefault(incarnation, int(row["step"]))
        return first_steps

    def _is_discarded(self, version: Version) -> bool:
        """Returns whether a later incarnation restarted from before that version."""
        return any(i > version.incarnation and step <= version.step for i, step in self._first_steps.items())


def _last_if_later(figures: Sequence[Evaluation]) -> Evaluation | None:
    """Returns the last figure, if it is not of the first one's version."""
    return figures[-1] if figures[-1].version > figures[0].version else None


def _describe_best(directory: Path, evaluations: Sequence[Evaluation]) -> str | None:
    """Returns the best checkpoint in words, by the run's link `best`, if it is older than the last one evaluated; None
    otherwise.
    """
    link, figures = directory / "best", by_version(evaluations)
    step = link.readlink().name.removeprefix("step-") if link.is_symlink() else ""
    best = max((e for e in figures.values() if str(e.version.step) == step), key=lambda e: e.version, default=None)
    if best is None or best.version == max(figures):
        return None
    return f"checkpoints/step-{step} ({best.metric} {percent(best.value)}); the link `best` leads to it"
