"""Compares runs of several variants over seeds: means, spreads, intervals, and differences from a baseline.

Invariant: failed runs are counted next to the figures of the others, never left out silently; every mean comes with its
number of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from tba.evaluation.estimators import Interval, mean_interval
from tba_lab.intervals import difference_of_means

Verdict: TypeAlias = Literal["yes", "no", "open"]


@dataclass(frozen=True)
class Outcome:
    """One run of a study that has ended, with its figures or the reason why it failed."""

    variant: str
    seed: int
    figures: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Statistic:
    """A figure over the runs that have it."""

    mean: float
    spread: float  # standard deviation over runs (n - 1); not a number for one run
    low: float  # 95 % interval of the mean, Student's t; not a number for one run
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Statistic:
        """Returns the statistic of some values. Raises `ValueError` for none."""
        if len(values) == 1:
            return cls(values[0], math.nan, math.nan, math.nan, 1)
        interval = mean_interval(values)
        return cls(interval.estimate, float(np.std(values, ddof=1)), interval.low, interval.high, len(values))


@dataclass(frozen=True)
class Row:
    """A variant over its seeds."""

    variant: str
    runs: int  # that have ended
    failures: tuple[str, ...]
    statistics: Mapping[str, Statistic]


@dataclass(frozen=True)
class Versus:
    """A variant against the baseline."""

    variant: str
    baseline: str
    difference: Interval  # of means, in the metric's unit; above 0: better than the baseline
    not_worse: Verdict  # by the margin: yes, no, or undecided because the interval contains both
    remark: str = ""


def variant_rows(outcomes: Sequence[Outcome], variants: Sequence[str]) -> list[Row]:
    """Returns a row for each variant that has runs, in the order of `variants`."""
    rows = []
    for variant in variants:
        runs = [o for o in outcomes if o.variant == variant]
        if not runs:
            continue
        names = dict.fromkeys(name for o in runs for name in o.figures)
        statistics = {name: Statistic.of([o.figures[name] for o in runs if name in o.figures]) for name in names}
        rows.append(Row(variant, len(runs), tuple(o.failure for o in runs if o.failure), statistics))
    return rows


def versus(outcomes: Sequence[Outcome], baselines: Mapping[str, str], metric: str, margin: float) -> list[Versus]:
    """Returns the comparison of each variant with its baseline (variant -> baseline), in order, if both have the
    metric.

    The interval is Student's (Welch), which is valid for a few seeds; runs of equal seed are not paired, since the seed
    does not determine the order of events in a run.
    """
    comparisons = []
    for name, baseline in baselines.items():
        runs = [o for o in outcomes if o.variant == name]
        baseline_values, variant_values = _values(outcomes, baseline, metric), _values(runs, name, metric)
        if name == baseline or not baseline_values or not variant_values:
            continue
        interval = difference_of_means(baseline_values, variant_values)
        failures = sum(bool(o.failure) for o in runs)
        remark = f"{failures} of {len(runs)} failed" if failures else ""
        comparisons.append(Versus(name, baseline, interval, "no" if failures else verdict(interval, margin), remark))
    return comparisons


def _values(outcomes: Sequence[Outcome], variant: str, metric: str) -> list[float]:
    return [o.figures[metric] for o in outcomes if o.variant == variant and metric in o.figures]


def verdict(difference: Interval, margin: float) -> Verdict:
    """Returns whether a difference (above 0: better) is above -margin: in the whole interval, nowhere, or undecided."""
    if difference.low > -margin:
        return "yes"
    return "no" if difference.high < -margin else "open"
