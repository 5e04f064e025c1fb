"""Student's t against the degrees of freedom at which it has a closed form."""

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.evaluation.student_t import cumulative, regularised_beta, t_quantile

PROBABILITIES = (0.005, 0.025, 0.3, 0.5, 0.8, 0.975, 0.999)


@pytest.mark.parametrize("p", PROBABILITIES)
def test_one_degree_of_freedom_is_cauchys_distribution(p: float) -> None:
    assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("p", PROBABILITIES)
def test_two_and_four_degrees_of_freedom_have_a_closed_form(p: float) -> None:
    a = 4 * p * (1 - p)
    assert t_quantile(p, 2) == pytest.approx((2 * p - 1) * math.sqrt(2 / a), rel=1e-9, abs=1e-12)
    q = math.cos(math.acos(math.sqrt(a)) / 3) / math.sqrt(a)
    assert t_quantile(p, 4) == pytest.approx(math.copysign(2, p - 0.5) * math.sqrt(max(0, q - 1)), rel=1e-8, abs=1e-7)


@pytest.mark.parametrize("p", PROBABILITIES)
def test_with_many_degrees_of_freedom_it_is_the_normal_distribution(p: float) -> None:
    assert t_quantile(p, 1e7) == pytest.approx(NormalDist().inv_cdf(p), abs=1e-5)


@given(st.floats(0.001, 0.999), st.floats(0.5, 300))
def test_the_quantile_undoes_the_cumulative_probability(p: float, freedom: float) -> None:
    assert cumulative(t_quantile(p, freedom), freedom) == pytest.approx(p, abs=1e-10)


def test_the_incomplete_beta_function_of_whole_numbers_is_a_binomial_tail() -> None:
    for x in (0.0, 0.1, 0.5, 0.9, 1.0):
        tail = sum(math.comb(7, k) * x**k * (1 - x) ** (7 - k) for k in range(3, 8))
        assert regularised_beta(x, 3, 5) == pytest.approx(tail, abs=1e-13)


@pytest.mark.parametrize(("p", "freedom"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_what_is_no_probability_or_no_freedom_is_refused(p: float, freedom: float) -> None:
    with pytest.raises(ValueError, match="a quantile of t needs"):
        t_quantile(p, freedom)
