"""The toy of episodes of several segments: where one residual for an episode ends, and one for each call."""

from __future__ import annotations

from typing import Any

import pytest
from tests.scripts import script


@pytest.fixture(scope="module")
def toy() -> Any:
    return script("lab/benchmarks/segment_toy.py")


def test_one_residual_for_an_episode_ends_at_the_target_where_a_policy_can_and_one_for_each_call_does_not(
    toy: Any,
) -> None:
    worlds = toy.Worlds.of(4)
    ends = {residual: toy.trained(worlds, "none", residual, "uniform", 400, 9) for residual in toy.RESIDUALS}
    distances = {residual: worlds.distance(end_WE)[:2].mean() for residual, end_WE in ends.items()}
    assert distances["episode"] < 1e-3
    assert min(distances["call"], distances["call, by problem"]) > 0.01


def test_on_the_policys_own_data_an_episodes_residual_ends_at_the_best_policy_and_a_calls_does_not(toy: Any) -> None:
    worlds = toy.Worlds.of(4)
    best = worlds.objective(toy.best(worlds, 1000))
    ends = {residual: toy.trained(worlds, "exact", residual, "own", 400, 64) for residual in ("episode", "call")}
    shortfalls = {residual: (best - worlds.objective(end_WE)).mean() for residual, end_WE in ends.items()}
    assert -1e-4 < shortfalls["episode"] < 2e-3
    assert shortfalls["call"] > 2 * shortfalls["episode"]
