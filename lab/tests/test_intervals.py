"""Intervals of studies and benchmarks against textbooks and simulations."""

import numpy as np
import pytest

from tba.evaluation.estimators import Interval
from tba.evaluation.student_t import t_quantile
from tba_lab.intervals import difference_of_means, relative_variance


def holds(interval: Interval, value: float) -> bool:
    return interval.low <= value <= interval.high


def test_a_difference_of_two_means_is_the_textbooks_interval() -> None:
    # n = 3 each and equal spreads: pooled and Welch's agree, 4 degrees of freedom, t = 2.776445
    interval = difference_of_means([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    half = 2.7764451052 * np.sqrt(2 / 3)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((3.0, 3 - half, 3 + half), abs=1e-9)
    # Welch and Satterthwaite: variances 1/3 and 4, n = 4 and 2: freedom 2.0833^2 / (0.0833^2 / 3 + 2^2 / 1)
    uneven = difference_of_means([1.0, 1.0, 2.0, 2.0], [3.0, 3.0 + 8**0.5])
    freedom = (1 / 12 + 2) ** 2 / ((1 / 12) ** 2 / 3 + 4)
    assert uneven.high - uneven.estimate == pytest.approx(t_quantile(0.975, freedom) * (1 / 12 + 2) ** 0.5)


def test_the_difference_of_three_and_three_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    covered = sum(holds(difference_of_means(rng.normal(0, 1, 3), rng.normal(1, 2, 3)), 1.0) for _ in range(2000))
    assert 0.935 <= covered / 2000 <= 0.975  # Welch's is a little wide at such n


def test_a_single_value_says_nothing_about_a_difference_and_no_spread_says_all() -> None:
    assert difference_of_means([1.0], [2.0, 2.5]) == Interval(1.25, -np.inf, np.inf)
    assert difference_of_means([1.0, 1.0], [2.0, 2.0]) == Interval(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="there are 0 and 1"):
        difference_of_means([], [1.0])


def test_a_relative_variance_by_hand() -> None:
    draws = np.array([[2.0, 0.0], [1.0, 1.0], [3.0, -1.0]])  # deviations 0, (-1, 1), (1, -1) from (2, 0): trace 2
    interval = relative_variance(draws @ draws.T)
    assert interval.estimate == pytest.approx(2.0 / (4.0 - 2.0 / 3))  # the mean's square is too large by trace / 3


def test_a_relative_variance_is_found_where_it_is_known_and_its_interval_holds_it() -> None:
    mean, spread, rng = np.array([3.0, 0.0, -4.0] + [0.0] * 47), 2.0, np.random.default_rng(0)
    variance, hits = 50 * spread**2 / 25.0, 0
    for _ in range(300):
        draws = mean + spread * rng.standard_normal((40, 50))
        interval = relative_variance(draws @ draws.T)
        hits += holds(interval, variance)
    assert 270 <= hits <= 298  # 285 of 300 are expected


def test_a_relative_variance_does_not_depend_on_scale_and_is_infinite_without_a_mean() -> None:
    draws = np.random.default_rng(1).standard_normal((20, 5)) + 2.0
    gram = draws @ draws.T
    assert relative_variance(gram * 9.0).estimate == pytest.approx(relative_variance(gram).estimate)
    opposite = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert relative_variance(opposite @ opposite.T) == Interval(float("inf"), 0.0, float("inf"))
    with pytest.raises(ValueError, match="3 draws or more"):
        relative_variance(np.eye(2))
