"""Agreement with preferences, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.apps.preference.agreement import agreement, calibration_error
from tba.evaluation.estimators import mean_interval, ratio_interval


def test_the_figures_of_four_pairs_by_hand() -> None:
    found = agreement([2.0, -1.0, 0.0, 3.0], [1.0, 1.0, 0.5, 0.0], [False, True, True, False], list("xxyy"))
    assert (found.pairs, found.documents, found.near_pairs) == (4, 2, 2)
    assert found.accuracy.estimate == pytest.approx(2.5 / 4)
    half = 12.70620 * 0.125  # t with one degree of freedom: the one document is 1/2, the other 3/4
    assert (found.accuracy.low, found.accuracy.high) == pytest.approx((0.625 - half, 0.625 + half), abs=1e-5)
    assert found.length_accuracy.estimate == pytest.approx(2.5 / 4)
    assert found.difference.estimate == 0
    assert found.near_accuracy is not None
    assert found.near_accuracy.estimate == pytest.approx(0.25)
    assert found.loss == pytest.approx(np.mean([math.log1p(math.exp(-d)) for d in (2.0, -1.0, 0.0, 3.0)]))
    assert any("62.5 %" in line for line in found.lines())


def test_scores_that_say_how_sure_they_are_have_no_calibration_error() -> None:
    sure = math.log(3)  # probability 3/4
    assert calibration_error(np.array([sure, sure, sure, -sure])) == pytest.approx(0, abs=1e-12)
    assert calibration_error(np.array([sure, sure, -sure, -sure])) == pytest.approx(0.25)
    assert calibration_error(np.array([-30.0])) == pytest.approx(1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_clusters_of_one_are_a_plain_mean(values: list[float]) -> None:
    ratio, mean = ratio_interval(values, [1] * len(values)), mean_interval(values)
    assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx((mean.estimate, mean.low, mean.high))


def test_empty_clusters_count_for_nothing_and_all_empty_is_an_error() -> None:
    assert ratio_interval([1, 0, 2], [2, 0, 2]) == ratio_interval([1, 2], [2, 2])
    with pytest.raises(ValueError, match="clusters with something"):
        ratio_interval([0.0], [0.0])
