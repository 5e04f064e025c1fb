"""The study of group sizes: equally many answers in an update, and rates chosen on a seed that is not counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.scripts import script

from tba_lab.studies.group_size import COMPARISONS, name_of, study


@pytest.fixture(scope="module")
def order() -> Any:
    return script("lab/benchmarks/group_size.py")


def row(size: int, rate: float, seed: int, after: float) -> dict[str, str]:
    name = name_of("sums", size, "sync", rate)
    return {"variant": name, "seed": str(seed), "failure": "", "pass@1/sampled": str(after), "fall": "0.02"}


def test_all_group_sizes_have_equally_many_answers_in_an_update_and_in_a_round() -> None:
    for task, comparison in COMPARISONS.items():
        recipes = [study.recipe_of(name) for name in study.variants if name.startswith(f"{task}-")]
        assert {r.groups_per_step * r.group_size for r in recipes} == {comparison.answers}
        assert {r.prompts_per_round * r.samples_per_prompt for r in recipes} == {comparison.answers}
        assert {r.group_size for r in recipes} == set(comparison.sizes)


def test_a_best_rate_at_the_edge_is_followed_by_the_next_beyond_it_and_no_further(order: Any) -> None:
    cell, rates = ("sums", 4, "sync"), COMPARISONS["sums"].rates
    assert order.untried(*cell, []) == [name_of(*cell, rate) for rate in rates[1:-1]]
    rows = [row(4, rate, 100, after) for rate, after in zip(rates[1:-1], (0.8, 0.9, 0.7), strict=True)]
    assert (order.untried(*cell, rows), order.best(*cell, rows)) == ([], 1e-4)
    high = [*rows[:2], row(4, 2e-4, 100, 0.95)]
    assert order.untried(*cell, high) == [name_of(*cell, 4e-4)]
    assert order.untried(*cell, [*high, row(4, 4e-4, 100, 0.99)]) == []


def test_the_table_has_counted_seeds_at_the_best_rate_only(order: Any) -> None:
    rows = [row(4, 1e-4, 100, 0.9), row(4, 2e-4, 100, 0.8), row(4, 2e-4, 0, 0.1)]
    rows += [row(4, 1e-4, seed, after) for seed, after in enumerate((0.90, 0.92, 0.94))]
    assert order.table(rows).splitlines()[2:] == ["| sums | sync | 4 | 0.0001 | 3 | 92.0 [87.0, 97.0] | 90.0 | 2.0 |"]


def test_rows_of_runs_that_the_folder_lacks_are_kept(order: Any, tmp_path: Path) -> None:
    def write(file: Path, *trials: tuple[str, int, float]) -> None:
        lines = [f"{variant},{seed},{after}" for variant, seed, after in trials]
        file.write_text("\n".join(["variant,seed,pass@1/sampled", *lines]) + "\n")

    rows, table = tmp_path / "rows.csv", tmp_path / "runs.csv"
    write(rows, ("a", 0, 0.1), ("b", 0, 0.2))
    write(table, ("b", 0, 0.3), ("c", 1, 0.4))
    order.keep(tmp_path, rows)
    assert [(row["variant"], row["pass@1/sampled"]) for row in order.read(rows)] == [
        ("a", "0.1"),
        ("b", "0.3"),
        ("c", "0.4"),
    ]
