"""Success, diversity and families of sampled attacks; the estimators behind them against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.apps.red_team.attacks import attack_report
from tba.evaluation.estimators import auc_interval, mean_distance


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_the_area_under_the_roc_curve_is_the_share_of_pairs_in_order(above: list[int], below: list[int]) -> None:
    pairs = list(itertools.product(above, below))
    share = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
    found = auc_interval(above, below)
    assert found.estimate == pytest.approx(share)
    assert 0 <= found.low <= found.estimate <= found.high <= 1


def test_the_interval_of_an_area_covers_what_it_promises() -> None:
    """Normal scores one standard deviation apart: the area is Phi(1 / sqrt 2)."""
    rng, true = np.random.default_rng(0), 0.5 * (1 + math.erf(0.5))
    intervals = [auc_interval(rng.normal(1, 1, 80), rng.normal(0, 1, 80)) for _ in range(400)]
    assert 0.92 < np.mean([i.low <= true <= i.high for i in intervals]) < 0.98


@given(st.integers(3, 12), st.integers(0, 1000))
def test_the_mean_distance_and_its_jackknife_are_those_over_pairs(count: int, seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(count, 4))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)

    def over_pairs(chosen: list[int]) -> float:
        return float(np.mean([1 - rows[i] @ rows[j] for i, j in itertools.combinations(chosen, 2)]))

    everyone = list(range(count))
    found = mean_distance(rows @ rows.T)
    assert found.estimate == pytest.approx(over_pairs(everyone))
    left = np.array([over_pairs([i for i in everyone if i != n]) for n in everyone])
    error = math.sqrt((count - 1) / count * ((left - left.mean()) ** 2).sum())
    assert found.high - found.low == pytest.approx(2 * 1.959964 * error, rel=1e-5)


def test_a_report_counts_successes_their_distance_and_the_families_they_are_of() -> None:
    attacks = ["paint the red kettle", "sell the clock", "sell the clock", "nothing", "PAINT a kettle"]
    toxic = [0.9, 0.8, 0.7, 0.1, 0.6]
    east, north = [1.0, 0.0], [0.0, 1.0]
    families = {"a": ["paint", "kettle"], "b": ["sell", "clock"], "c": ["open", "door"]}
    report = attack_report(attacks, toxic, np.array([east, north, north, east, east]), 0.5, families)
    assert (report.attacks, report.distinct, report.success.estimate) == (5, 4, 0.8)
    assert report.toxic.estimate == pytest.approx(0.62)
    assert report.distance.estimate == pytest.approx(6 / 10)  # three east, two north: six of ten pairs differ
    assert report.distance_of_successes is not None
    assert report.distance_of_successes.estimate == pytest.approx(4 / 6)
    assert report.families == {"a": 2, "b": 2, "c": 0}
    assert (report.found_families, report.evenness) == (2, pytest.approx(2.0))
    assert any("weak spots found    2 of 3" in line for line in report.lines())
    harmless = attack_report(attacks, [0.0] * 5, np.array([east] * 5), 0.5, families)
    assert (harmless.success.estimate, harmless.found_families, harmless.evenness) == (0.0, 0, None)
    assert harmless.distance_of_successes is None
