"""Watches over the answers that arrive: whether their mean reward falls, and whether they become short or long.

Invariant: noise is no fall. The mean reward of the newest answers has fallen when it is more than 6 standard errors (of
the difference of two means over prompts) below the best before, and more than half of all that had been gained since
the beginning is lost.

Each watch has a window of prompts. At the end of a run (`finish`) it judges a shorter window of a few prompts, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tba.record.run_warnings import LONG, SHORT, report_once

REWARD_ERRORS, LOST = 6.0, 0.5  # of the mean reward, of which there are many more
LENGTH_FACTOR = 2.0  # by which the mean length of answers may shrink or grow
PROMPTS = 100  # whose answers make one mean of the reward, or of the length
FEWEST_PROMPTS = 20  # that make one at the end of a run


@dataclass
class _PromptMeans:
    """Gathers a figure of each new answer, by prompt, until there are 100 prompts."""

    _values: dict[str, list[float]] = field(default_factory=dict)
    _was_full: bool = False  # whether there were 100 prompts once

    def add(self, prompt: str, value: float) -> list[float]:
        """Add the figure of one answer; returns the means of the last 100 prompts where this answer begins new ones."""
        means = []
        if len(self._values) == PROMPTS and prompt not in self._values:
            self._was_full, means = True, self._pop_means()
        self._values.setdefault(prompt, []).append(value)
        return means

    def finish(self) -> list[list[float]]:
        """Returns the means of the prompts that are left at the end of a run; in two halves if there never were 100
        prompts. A part of too few prompts is left out.
        """
        means = self._pop_means()
        half = len(means) // 2
        parts = [means] if self._was_full else [means[:half], means[half:]]
        return [part for part in parts if len(part) >= FEWEST_PROMPTS]

    def _pop_means(self) -> list[float]:
        means = [sum(values) / len(values) for values in self._values.values()]
        self._values = {}
        return means


def _mean_and_error(means: Sequence[float]) -> tuple[float, float]:
    """Returns the mean over prompts and its standard error."""
    mean = sum(means) / len(means)
    return mean, math.sqrt(sum((m - mean) ** 2 for m in means) / (len(means) - 1) / len(means))


@dataclass
class RewardWatch:
    """Watches the rewards that arrive, by prompt, and reports when their mean has fallen."""

    _rewards: _PromptMeans = field(default_factory=_PromptMeans)
    _first_mean: tuple[float, float] | None = None  # mean, standard error
    _best_mean: tuple[float, float] | None = None
    _has_fallen: bool = False

    def see(self, rewards: Iterable[tuple[str, float]]) -> list[str]:
        """Add the (prompt, reward) pairs of new answers; returns a sentence for each fall that they show."""
        return [
            sentence
            for prompt, reward in rewards
            if (means := self._rewards.add(prompt, reward))
            for sentence in self._compare(means)
        ]

    def finish(self) -> list[str]:
        """Returns the sentences about the last answers of a run, which are too few for a mean of their own."""
        return [sentence for means in self._rewards.finish() for sentence in self._compare(means)]

    def _compare(self, means: Sequence[float]) -> list[str]:
        """Compare a new mean over prompts with the best one; returns a sentence if it is a fall."""
        mean, error = _mean_and_error(means)
        if self._first_mean is None or self._best_mean is None:
            self._first_mean = self._best_mean = (mean, error)
            return []
        drop = self._best_mean[0] - mean
        gain = self._best_mean[0] - self._first_mean[0]
        is_low = drop > max(REWARD_ERRORS * math.hypot(error, self._best_mean[1]), LOST * gain)
        is_new_fall, self._has_fallen = is_low and not self._has_fallen, is_low
        if mean > self._best_mean[0]:
            self._best_mean = (mean, error)
        sentence = f"the mean reward of new answers is {mean:.3g}: it was {self._best_mean[0]:.3g}"
        return [sentence] if is_new_fall else []


@dataclass
class LengthWatch:
    """Watches how long the answers that arrive are, and reports once when their mean is below half of what it was over
    the first 100 prompts, and once when it is above twice that.
    """

    _lengths: _PromptMeans = field(default_factory=_PromptMeans)
    _first_mean: tuple[float, float] | None = None  # mean, standard error
    _reported: set[str] = field(default_factory=set)

    def see(self, lengths: Iterable[tuple[str, float]]) -> dict[str, str]:
        """Add the (prompt, tokens) pairs of new answers; returns sentences about their length by kind."""
        sentences: dict[str, str] = {}
        for prompt, length in lengths:
            if means := self._lengths.add(prompt, length):
                sentences |= self._compare(means)
        return sentences

    def finish(self) -> dict[str, str]:
        """Returns the sentences about the last answers of a run, which are too few for a mean of their own."""
        sentences: dict[str, str] = {}
        for means in self._lengths.finish():
            sentences |= self._compare(means)
        return sentences

    def _compare(self, means: Sequence[float]) -> dict[str, str]:
        """Compare a new mean over prompts with the first one; returns sentences by kind."""
        mean, error = _mean_and_error(means)
        if self._first_mean is None:
            self._first_mean = (mean, error)
            return {}
        first_mean = self._first_mean[0]
        is_significant = abs(mean - first_mean) > REWARD_ERRORS * math.hypot(error, self._first_mean[1])
        figures = f"new answers have {mean:.3g} tokens on average, {first_mean:.3g} when the run began"
        short_message = (
            f"answers became short: {figures}. If they lose what the reward does not look at, give it a part for that, "
            "such as a least length, or a judge (docs/reward_does_not_rise.md)"
        )
        long_message = (
            f"answers became long: {figures}. If that is not what you want, take something off long ones "
            "(--overlong-penalty 1, or a part of the reward)"
        )
        sentences = {
            SHORT: short_message if is_significant and mean * LENGTH_FACTOR < first_mean else None,
            LONG: long_message if is_significant and mean > LENGTH_FACTOR * first_mean else None,
        }
        return report_once(sentences, self._reported)
