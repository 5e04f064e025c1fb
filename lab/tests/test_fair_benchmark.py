"""`lab/benchmarks/fair.py` tunes each objective at each k on a seed that it does not count."""

from __future__ import annotations

from typing import Any

import pytest
from tests.scripts import script


@pytest.fixture(scope="module")
def fair() -> Any:
    return script("lab/benchmarks/fair.py")


def row(fair: Any, form: str, k: int, rate: float, seed: int, after: float, fall: float = 0.0) -> Any:
    return fair.FairRow(
        form, k, 0.5, rate, seed, before=0.3, after=after, ess=0.5, lag=9.0, reward=0.3, device="cpu", commit="c",
        fall=fall,
    )  # fmt: skip


def test_every_objective_is_tuned_at_each_k_and_then_counted(fair: Any) -> None:
    done: list[Any] = []
    best = {64: 3e-5, 10: 1e-4}
    while cells := fair.wanted(done, range(3)):
        cell = cells[0]
        done.append(row(fair, cell.form, cell.k, cell.rate, cell.seed, 0.9 if cell.rate == best[cell.k] else 0.5))
    counted = {(r.form, r.k, r.rate) for r in done if r.seed != fair.TUNING_SEED}
    assert counted == {(form, k, rate) for form in fair.OBJECTIVES for k, rate in best.items()}
    assert sorted({r.seed for r in done}) == [0, 1, 2, fair.TUNING_SEED]
    tried = {k: sorted({r.rate for r in done if r.k == k}) for k in best}
    assert tried == {64: [1e-5, 3e-5, 1e-4, 3e-4], 10: [3e-5, 1e-4, 3e-4]}  # the edge was followed
    order = [(r.form in fair.TIERS[0], r.k) for r in done if r.form in fair.TIERS[0] or r.form in fair.TIERS[1]]
    assert order == sorted(order, reverse=True)
    assert {form for tier in fair.TIERS for form in tier} == fair.OBJECTIVES.keys()


def test_the_table_has_the_best_rate_at_each_k_the_best_objective_first(fair: Any) -> None:
    rows = [row(fair, "raft", 64, rate, 100, after) for rate, after in ((3e-5, 0.7), (1e-4, 0.9), (3e-4, 0.8))]
    rows += [row(fair, "grpo", 64, rate, 100, after) for rate, after in ((3e-5, 0.7), (1e-4, 0.6), (3e-4, 0.5))]
    rows += [row(fair, "grpo", 64, 1e-5, 100, 0.6), row(fair, "grpo", 64, 3e-5, 0, 0.99)]
    rows += [row(fair, "raft", 64, 1e-4, s, x, y) for s, x, y in ((0, 0.8, 0.1), (1, 0.9, 0.02))]
    rows += [row(fair, "raft", 64, 3e-4, 0, 0.123), row(fair, "raft", 10, 1e-4, 0, 0.456)]
    lines = [line for line in fair.table(rows).splitlines() if line.startswith(("| raft", "| grpo"))]
    assert lines == [
        "| grpo | 3e-05 | 1 | 99.0 | 99.0 | 0.0 | 0.50 |",
        "| raft | 0.0001 | 2 | 85.0 [21.5, 148.5] | 80.0 | 10.0 | 0.50 |",
    ]
