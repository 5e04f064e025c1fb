"""Figures of accuracy and their confidence intervals. Pure functions of numbers.

Invariant: every estimator is unbiased or says its method, nothing is drawn, and an interval always contains the figure
it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from tba.evaluation.student_t import t_quantile

GREEDY, SAMPLED = "pass@1/greedy", "pass@1/sampled"  # names of figures; the third is pass@K/sampled
Z_95 = NormalDist().inv_cdf(0.975)  # of the normal distribution: all intervals here are of 95 %
Values = Sequence[float] | npt.NDArray[np.floating] | npt.NDArray[np.integer] | npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Interval:
    """Holds an estimate and the bounds of its 95 % interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.4g} [{self.low:.4g}, {self.high:.4g}]"


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the unbiased estimate of the probability that at least one of k samples is correct.

    1 - C(n - c, k) / C(n, k) for c correct ones of n samples (Chen et al. 2021, arXiv 2107.03374, eq 1), in exact
    integers. Raises `ValueError` unless 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"correct must lie in 0..{samples}, but is {correct}")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} and at least 1 samples, but there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def wilson_interval(correct: float, n: int) -> Interval:
    """Returns the score interval of a proportion (Wilson 1927), which behaves at 0, at 1 and at small n.

    `correct` may be fractional (a mean over samples times n): the interval is then conservative.
    Raises `ValueError` unless n >= 1 and 0 <= correct <= n.
    """
    if n < 1 or not 0 <= correct <= n:
        raise ValueError(f"a proportion needs n >= 1 and correct in 0..n, but got {correct} of {n}")
    share = correct / n
    centre = (share + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half_width = Z_95 / (1 + Z_95**2 / n) * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n * n))
    return Interval(share, min(share, max(0.0, centre - half_width)), max(share, min(1.0, centre + half_width)))


def ratio_interval(totals: Values, counts: Values) -> Interval:
    """Returns the interval of sum(totals) / sum(counts) over clusters, [i] of both being one of them, by Student's t.

    For shares of things that come in clusters, such as pairs of a document: t of what each cluster's total has above
    the ratio times its count (Cochran 1977, section 6.3). Clusters without any count do not matter. Raises `ValueError`
    for unequal lengths, or when nothing is counted.
    """
    total, count = np.asarray(totals, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if total.shape != count.shape or total.ndim != 1 or not count.sum() > 0:
        raise ValueError(f"a ratio needs clusters with something in them, but got {total.shape} of {count.shape}")
    total, count = total[count > 0], count[count > 0]
    ratio = float(total.sum() / count.sum())
    residual_interval = mean_interval((total - ratio * count) / count.mean())
    return Interval(ratio, ratio + min(residual_interval.low, 0.0), ratio + max(residual_interval.high, 0.0))


def auc_interval(positive: Values, negative: Values) -> Interval:
    """Returns the area under the ROC curve: how often a positive one has the higher score; equal scores are half right.

    The interval is the normal one by the standard error of Hanley and McNeil (1982), cut at 0 and 1. Raises
    `ValueError` unless there are scores of both kinds.
    """
    above, below = np.asarray(positive, dtype=np.float64), np.sort(np.asarray(negative, dtype=np.float64))
    if min(above.size, below.size) < 1:
        raise ValueError(f"an AUC needs scores of both kinds, but there are {above.size} and {below.size}")
    lower = np.searchsorted(below, above, "left") + np.searchsorted(below, above, "right")
    area = float(lower.mean() / (2 * below.size))
    other_term, pair_term = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (above.size - 1) * (other_term - area**2) + (below.size - 1) * (pair_term - area**2)
    half = Z_95 * math.sqrt(max(0.0, variance) / (above.size * below.size))
    return Interval(area, max(0.0, area - half), min(1.0, area + half))


def mean_distance(similarity: npt.NDArray[np.floating]) -> Interval:
    """Returns the mean of 1 - similarity over all pairs of N different things, from their symmetric matrix [N, N].

    A U-statistic: the interval is the normal one by the jackknife over things (Arvesen 1969), since pairs that share
    one are not independent. Raises `ValueError` for fewer than 3.
    """
    square = np.asarray(similarity, dtype=np.float64)
    count = square.shape[0]
    if square.shape != (count, count) or count < 3:
        raise ValueError(f"a mean distance needs the similarities of 3 things or more, but got {square.shape}")
    row_sums = square.sum(axis=1) - np.diagonal(square)
    total = row_sums.sum()
    estimate = 1 - total / (count * (count - 1))
    jackknife = 1 - (total - 2 * row_sums) / ((count - 1) * (count - 2))
    half_width = Z_95 * math.sqrt((count - 1) / count * float(((jackknife - jackknife.mean()) ** 2).sum()))
    return Interval(float(estimate), float(estimate) - half_width, float(estimate) + half_width)


def paired_difference(before: Values, after: Values) -> Interval:
    """Returns the interval of mean(after - before), by problem, by Student's t: [i] of both is the same problem.

    Pairing takes out how hard the problems are, which is most of the spread. Raises `ValueError` for unequal lengths.
    """
    before_values, after_values = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if before_values.shape != after_values.shape:
        shapes = f"{before_values.shape} and {after_values.shape}"
        raise ValueError(f"a paired difference needs equal lengths, but got {shapes}")
    return mean_interval(after_values - before_values)


def mean_interval(values: Values) -> Interval:
    """Returns the interval of a mean of independent values, one per seed or per problem, by Student's t.

    Average what belongs to one problem first. It holds what it promises from two values on as far as they are normal
    (a percentile bootstrap of three covers 76 % instead of 95); one value says nothing about spread, and its bounds are
    infinite. Raises `ValueError` for none.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"the interval of a mean needs a row of at least one value, but got shape {array.shape}")
    mean = float(array.mean())
    if array.size == 1:
        return Interval(mean, -math.inf, math.inf)
    half_width = t_quantile(0.975, array.size - 1) * float(array.std(ddof=1)) / math.sqrt(array.size)
    return Interval(mean, mean - half_width, mean + half_width)
