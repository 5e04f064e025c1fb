"""What ratios of whole answers are worth on long ones: `long_answers.py`, the table of lab/method.md."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.scripts import script


@pytest.fixture(scope="module")
def long_answers() -> Any:
    return script("lab/benchmarks/long_answers.py")


@pytest.mark.parametrize(("log_ratio", "spread"), [(0.0, 0.3), (1.9, 1.0), (-2.0, 2.8), (3.0, 0.5)])
def test_the_mean_of_a_capped_ratio_is_the_integral(long_answers: Any, log_ratio: float, spread: float) -> None:
    z = np.linspace(-9, 9, 200_001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    rho = np.minimum(np.exp(log_ratio - spread**2 / 2 + spread * z), 8.0)
    assert long_answers.capped_mean(log_ratio, spread) == pytest.approx(float(np.trapezoid(rho * density, z)), abs=1e-6)


def case(long_answers: Any, form: str, precision: str, length: int) -> Any:
    return long_answers.Case(form, length, long_answers.SPREADS[precision](length), 4000)


def test_the_difference_of_engine_and_trainer_costs_at_8000_tokens_half_of_the_sample_in_bfloat16(
    long_answers: Any,
) -> None:
    assert case(long_answers, "exact", "float32", 8000).ess() == pytest.approx(0.94, abs=0.01)
    assert case(long_answers, "exact", "bfloat16", 2000).ess() == pytest.approx(0.81, abs=0.02)
    assert case(long_answers, "exact", "bfloat16", 8000).ess() == pytest.approx(0.56, abs=0.02)


def test_no_length_moves_exact_and_the_cap_moves_what_is_pushed_up_far_from_the_data(long_answers: Any) -> None:
    for precision in long_answers.SPREADS:
        assert abs(case(long_answers, "exact", precision, 8000).bias(0.9)) < 1e-3
    assert abs(case(long_answers, "asymmetric", "bfloat16", 2000).bias(0.5)) < 1e-3
    assert case(long_answers, "asymmetric", "bfloat16", 8000).bias(0.5) == pytest.approx(0.021, abs=0.005)
    assert case(long_answers, "asymmetric", "bfloat16", 8000).bias(0.9) == pytest.approx(0.26, abs=0.02)
