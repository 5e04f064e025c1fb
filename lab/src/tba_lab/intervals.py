"""95 % intervals that only studies and benchmarks need. Pure functions of numbers."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tba.evaluation.estimators import Z_95, Interval, Values
from tba.evaluation.student_t import t_quantile


def difference_of_means(first_values: Values, second_values: Values) -> Interval:
    """Returns the interval of mean(second) - mean(first) of two independent rows, by Student's t (Welch 1947).

    Unequal spreads are allowed for. A handful of values, such as seeds, is enough for it to hold what it promises as
    far as they are normal; a single one on either side says nothing about
    spread, and the bounds are infinite. Raises `ValueError` for an empty row.
    """
    a, b = np.asarray(first_values, dtype=np.float64), np.asarray(second_values, dtype=np.float64)
    if min(a.size, b.size) < 1:
        raise ValueError(f"a difference of means needs a value on both sides, but there are {a.size} and {b.size}")
    difference = float(b.mean() - a.mean())
    if min(a.size, b.size) < 2:
        return Interval(difference, -math.inf, math.inf)
    parts = [float(v.var(ddof=1)) / v.size for v in (a, b)]
    variance = sum(parts)
    if variance == 0:
        return Interval(difference, difference, difference)
    freedom = variance**2 / sum(part**2 / (v.size - 1) for part, v in zip(parts, (a, b), strict=True))
    half_width = t_quantile(0.975, freedom) * math.sqrt(variance)
    return Interval(difference, difference - half_width, difference + half_width)


def relative_variance(gram: npt.NDArray[np.floating]) -> Interval:
    """Returns a random vector's total variance over the squared norm of its mean, from M independent draws.

    `gram` [M, M] holds the draws' inner products. With D the mean of its diagonal and N that of the rest, the trace of
    the covariance is estimated by D - N and the squared norm of the mean by N, both unbiased; the figure is their
    ratio. The interval is the jackknife's over draws, symmetric in the logarithm; where the draws do not tell the mean
    from 0 it has no upper bound. Raises `ValueError` for fewer than 3 draws.
    """
    square = np.asarray(gram, dtype=np.float64)
    count = square.shape[0]
    if square.shape != (count, count) or count < 3:
        raise ValueError(f"a relative variance needs the inner products of 3 draws or more, but got {square.shape}")
    diagonal_M, all_pairs = np.diagonal(square), square.sum()
    diagonal, off_diagonal = diagonal_M.mean(), (all_pairs - diagonal_M.sum()) / (count * (count - 1))
    diagonal_left = (diagonal_M.sum() - diagonal_M) / (count - 1)
    off_diagonal_sums = all_pairs - diagonal_M.sum() - 2 * (square.sum(axis=1) - diagonal_M)
    off_diagonal_left = off_diagonal_sums / ((count - 1) * (count - 2))
    estimate = float(diagonal / off_diagonal - 1) if off_diagonal > 0 else math.inf
    if off_diagonal <= 0 or off_diagonal_left.min() <= 0:
        return Interval(estimate, 0.0, math.inf)
    ratios = diagonal_left / off_diagonal_left - 1
    if min(estimate, ratios.min()) <= 0:  # the draws cannot tell the mean from 0
        return Interval(estimate, min(estimate, 0.0), max(estimate, float(ratios.max())))
    logs = np.log(ratios)
    error = math.sqrt((count - 1) / count * float(((logs - logs.mean()) ** 2).sum()))
    return Interval(estimate, estimate * math.exp(-Z_95 * error), estimate * math.exp(Z_95 * error))
