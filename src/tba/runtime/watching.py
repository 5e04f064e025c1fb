"""Watches a run while it goes: figures that fall far below their best, how long answers are, and which checkpoint is
the best.

Invariant: `best`, in the folder of the run, links to the checkpoint with the highest held-out figure of all that exist
and were evaluated; it does not change which one is the newest, which `tba resume` and `tba eval` take. A fall is a
fault, reported once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tba.evaluation.estimators import wilson_interval
from tba.protocols import Acted
from tba.recipe import Recipe
from tba.record.answer_watches import LengthWatch, RewardWatch
from tba.record.evaluations import RunningEvaluations
from tba.record.faults import record_fault
from tba.record.run_warnings import REWARD, by_version, record_accuracy_falls
from tba.runtime.run_directory import RunDirectory
from tba.training.checkpoint import checkpoints_in
from tba.types import Evaluation, Version

log = logging.getLogger("tba.trainer")
NAME = "best"


@dataclass
class AnswerWatch:
    """Watches the answers that searchers bring, which replay passes to `see`, and reports when their mean reward has
    fallen, or their mean length is another than when the run began.
    """

    run: RunDirectory
    rewards: RewardWatch | None
    lengths: LengthWatch | None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # `see` is called by the thread that fetches batches

    def see(self, answers: Sequence[tuple[str, float, int]]) -> None:
        """Observe (prompt, reward, tokens) of each answer that came."""
        with self._lock:
            if self.rewards is not None:
                self._report(REWARD, self.rewards.see((prompt, reward) for prompt, reward, _ in answers))
            if self.lengths is not None:
                for kind, sentence in self.lengths.see((prompt, tokens) for prompt, _, tokens in answers).items():
                    self._report(kind, [sentence])

    def finish(self) -> None:
        """Report at the end of the run what its last answers show."""
        with self._lock:
            if self.rewards is not None:
                self._report(REWARD, self.rewards.finish())
            if self.lengths is not None:
                for kind, sentence in self.lengths.finish().items():
                    self._report(kind, [sentence])

    def _report(self, kind: str, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            log.warning("%s", sentence)
            record_fault(self.run.path, kind, sentence)


def answer_watch_of(recipe: Recipe, run: RunDirectory) -> AnswerWatch:
    """Returns the watch over the answers of a run. It leaves out rewards where prompts are chosen by them, since their
    mean then says nothing, and the length of episodes, which depends on how many turns they need.
    """
    rewards = None if recipe.prompts.selection == "posterior" else RewardWatch()
    return AnswerWatch(run, rewards, None if isinstance(recipe.task, Acted) else LengthWatch())


class EvaluationWatch:
    """Watches the evaluations of a run. Each call of `check` reads only new ones."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._evaluations = RunningEvaluations(run.path)

    def check(self) -> None:
        """Report whether a figure has fallen, and link `best` to the checkpoint that is the best now."""
        if not self._evaluations.read_new():
            return
        for sentence in record_accuracy_falls(self._run.path, self._evaluations.evaluations):
            log.warning("%s", sentence)
        if (best := self._best()) is None:
            return
        path, _ = best
        link, temporary = self._run.path / NAME, self._run.path / f".{NAME}-{os.getpid()}"
        if link.exists() and not link.is_symlink():
            return  # somebody copied the run and followed its links: leave what is there
        if not (link.is_symlink() and os.readlink(link) == f"checkpoints/{path.name}"):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(f"checkpoints/{path.name}")
            temporary.replace(link)

    def versions_to_keep(self, pending: Iterable[Version]) -> set[Version]:
        """Returns the versions whose checkpoints stay at any age: the best, and those that wait for an evaluation."""
        self._evaluations.read_new()
        best = self._best()
        return {*pending, *([] if best is None else [best[1].version])}

    def _best(self) -> tuple[Path, Evaluation] | None:
        """Returns the folder of the best checkpoint and its figure; None while no checkpoint was evaluated.

        The best is the one whose 95 % interval has the highest lower end: over more problems a figure counts for more.
        """
        figures = by_version(self._evaluations.evaluations)
        candidates = [(path, figures[v]) for path, v in checkpoints_in(self._run.checkpoints) if v in figures]
        return max(candidates, key=lambda pair: (_lower_bound(pair[1]), pair[1].version), default=None)


def _lower_bound(e: Evaluation) -> float:
    return wilson_interval(e.value * e.n, e.n).low
