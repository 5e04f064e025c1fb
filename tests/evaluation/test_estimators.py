"""Figures of accuracy against enumeration and closed forms."""

from itertools import combinations
from math import comb
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.evaluation.estimators import (
    Interval,
    mean_interval,
    paired_difference,
    pass_at_k,
    ratio_interval,
    wilson_interval,
)


def holds(interval: Interval, value: float) -> bool:
    return interval.low <= value <= interval.high


def test_a_mean_of_three_seeds_has_students_interval_which_covers() -> None:
    found = mean_interval([1.32, 1.35, 1.53])
    assert (found.estimate, found.low, found.high) == pytest.approx((1.40, 1.118, 1.682), abs=2e-3)  # 4.303 s / sqrt 3
    rng = np.random.default_rng(3)
    draws = rng.normal(1.0, 2.0, (2000, 3))
    assert sum(holds(mean_interval(row), 1.0) for row in draws) / 2000 == pytest.approx(0.95, abs=0.015)
    assert mean_interval([2.0]) == Interval(2.0, -np.inf, np.inf)
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval([])


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_k_subsets_that_hold_a_correct_sample(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "k", "p"), [(4, 2, 0.3), (7, 3, 0.05), (10, 10, 0.5)])
def test_pass_at_k_is_unbiased(n: int, k: int, p: float) -> None:
    expected = sum(comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_counts_that_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"must lie|needs at least"):
        pass_at_k(n, c, k)


def test_wilson_bounds_are_the_roots_of_the_score_equation() -> None:
    z = NormalDist().inv_cdf(0.975)
    for correct, n in [(3, 10), (42, 50), (1, 2000)]:
        interval = wilson_interval(correct, n)
        for bound in (interval.low, interval.high):
            assert (correct / n - bound) ** 2 == pytest.approx(z * z * bound * (1 - bound) / n, rel=1e-9)


def test_wilson_keeps_within_0_and_1_and_holds_its_figure() -> None:
    assert wilson_interval(0, 20).low == 0.0
    assert wilson_interval(20, 20).high == 1.0
    assert wilson_interval(0, 20).high == pytest.approx(0.1611, abs=1e-4)  # z^2 / (n + z^2)


def test_the_interval_of_a_share_of_many_agrees_with_the_normal_one() -> None:
    values = np.random.default_rng(0).random(4000) < 0.4
    interval = mean_interval(values)
    half = 1.96 * np.sqrt(values.mean() * (1 - values.mean()) / 4000)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx(
        (values.mean(), values.mean() - half, values.mean() + half), abs=2e-5
    )


def test_a_ratio_over_clusters_covers_as_often_as_it_says() -> None:
    """Documents with 1 to 5 pairs each; whether their pairs agree goes with the document."""
    rng, covered = np.random.default_rng(4), 0
    for _ in range(1000):
        count = rng.integers(1, 6, 40)
        total = rng.binomial(count, np.where(rng.random(40) < 0.5, 0.9, 0.5))
        covered += holds(ratio_interval(total, count), 0.7)
    assert covered / 1000 == pytest.approx(0.95, abs=0.02)


def test_pairing_sees_a_small_rise_that_the_spread_of_the_problems_hides() -> None:
    rng = np.random.default_rng(2)
    before = rng.random(200)  # how hard the problems are
    after = before + 0.02 + rng.normal(0, 0.03, 200)
    paired = paired_difference(before, after)
    assert paired.estimate == pytest.approx((after - before).mean())
    assert not holds(paired, 0.0)
    assert holds(mean_interval(before), float(after.mean()))


def test_no_change_at_all_does_not_exclude_0() -> None:
    before = np.random.default_rng(2).random(30)
    assert holds(paired_difference(before, before), 0.0)


def test_an_interval_refuses_what_is_not_paired() -> None:
    with pytest.raises(ValueError, match="equal lengths"):
        paired_difference([1.0], [1.0, 0.0])
