"""A figure that falls far from its best: the held-out figures, and the mean reward of what searchers bring.

Invariant: noise is no fall. A held-out figure has fallen when it is more than 5 points and more than 5 standard errors
(of the difference of two proportions) below the best one before it; the mean reward of the newest answers when it is
more than 6 standard errors (of the difference of two means over prompts) below the best before, and more than half of
all that had been gained since the beginning is lost. So many, since the best of many is the best by chance too: among a
hundred figures that differ by chance alone, fewer than one run in a hundred has such two. A fall is told once, and the
next one when the figure had come back in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tba.record.faults import read_faults, record_fault
from tba.record.text import percent
from tba.types import Evaluation, Version

POINTS, ERRORS = 0.05, 5.0  # of a held-out figure
REWARD_ERRORS, LOST = 6.0, 0.5  # of the mean reward, of which there are many more
PROMPTS = 100  # whose answers make one mean of the reward
HELD_OUT, REWARD = "held_out_falls", "reward_falls"  # kinds of faults.jsonl
_FIGURES = ("pass@1/sampled", "pass@1/greedy")  # by which of them checkpoints are compared


def falls(evaluations: Iterable[Evaluation]) -> list[str]:
    """A sentence for each time that a held-out figure fell, in the order of versions."""
    best: dict[str, Evaluation] = {}
    fallen: dict[str, bool] = {}
    found = []
    for e in sorted(evaluations, key=lambda e: e.version):
        top = best.setdefault(e.metric, e)
        far = top.value - e.value > max(POINTS, ERRORS * math.hypot(_error(top), _error(e)))
        if far and not fallen.get(e.metric):
            found.append(
                f"{e.metric} is {percent(e.value)} at version {e.version}: it was {percent(top.value)} at {top.version}"
            )
        fallen[e.metric] = far
        if e.value > top.value:
            best[e.metric] = e
    return found


def note_falls(directory: Path, evaluations: Iterable[Evaluation]) -> list[str]:
    """Those that nobody has recorded yet for the run in `directory`, which are faults from here on."""
    known = {line["what"] for line in read_faults(directory) if line["kind"] == HELD_OUT}
    new = [what for what in falls(evaluations) if what not in known]
    for what in new:
        record_fault(directory, HELD_OUT, what)
    return new


def noted_falls(directory: Path) -> list[str]:
    """All that were recorded, oldest first."""
    return [str(line["what"]) for line in read_faults(directory) if line["kind"] in (HELD_OUT, REWARD)]


def by_version(evaluations: Sequence[Evaluation]) -> Mapping[Version, Evaluation]:
    """The one figure of each version by which versions are compared: sampled accuracy where that was measured."""
    names = {e.metric for e in evaluations}
    name = next((metric for metric in _FIGURES if metric in names), min(names, default=""))
    return {e.version: e for e in evaluations if e.metric == name}


@dataclass
class RewardWatch:
    """Is shown the rewards that arrive, by prompt, and tells when their mean has fallen."""

    prompts: int = PROMPTS
    _open: dict[str, list[float]] = field(default_factory=dict)  # answers of the mean that is being made
    _first: tuple[float, float] | None = None  # mean, standard error
    _best: tuple[float, float] | None = None
    _fallen: bool = False

    def see(self, rewards: Iterable[tuple[str, float]]) -> list[str]:
        """(prompt, reward) of each new answer; a sentence for each fall that they show."""
        found = []
        for prompt, reward in rewards:
            if len(self._open) == self.prompts and prompt not in self._open:
                found += self._compare([sum(own) / len(own) for own in self._open.values()])
                self._open = {}
            self._open.setdefault(prompt, []).append(reward)
        return found

    def _compare(self, means: Sequence[float]) -> list[str]:
        """One more mean over prompts: a sentence if it is a fall."""
        mean = sum(means) / len(means)
        error = math.sqrt(sum((m - mean) ** 2 for m in means) / (len(means) - 1) / len(means))
        if self._first is None or self._best is None:
            self._first = self._best = (mean, error)
            return []
        down = self._best[0] - mean
        far = down > max(REWARD_ERRORS * math.hypot(error, self._best[1]), LOST * (self._best[0] - self._first[0]))
        new, self._fallen = far and not self._fallen, far
        if mean > self._best[0]:
            self._best = (mean, error)
        return [f"the mean reward of new answers is {mean:.3g}: it was {self._best[0]:.3g}"] if new else []


def _error(e: Evaluation) -> float:
    """The standard error of a proportion, kept off 0 (Agresti and Coull 1998)."""
    share = (e.value * e.n + 2) / (e.n + 4)
    return math.sqrt(max(0.0, share * (1 - share)) / (e.n + 4))
