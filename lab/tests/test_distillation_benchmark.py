"""`lab/benchmarks/distillation.py` tries rates, then seeds, keeps each run as it ends, and measures nothing but zero
where the student is the teacher."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.scripts import script

from tba.models.huggingface import HuggingFace
from tba.recipes.distil import recipe
from tba.recipes.quickstart import BASE
from tba.training.teacher import Teacher


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return script("lab/benchmarks/distillation.py")


def row(benchmark: Any, cell: tuple[str, str], rate: float, seed: int, kl: float) -> Any:
    return benchmark.Row(*cell, rate, seed, 1, 700, accuracy=1 - kl, kl=kl, kl_back=kl / 2, cpu=3.0)


def test_rates_come_first_and_one_beyond_the_edge_then_seeds_of_all_cells_at_the_best_rate(
    benchmark: Any,
) -> None:
    done: list[Any] = []
    order = []
    while run := next(benchmark.wanted(done, 2, [1e-4, 1e-3]), None):
        way, source, rate, seed = run
        order.append(run)
        done.append(row(benchmark, (way, source), rate, seed, 0.1 if rate == 1e-3 else 0.2))
    cells = len(benchmark.CELLS)
    assert [seed for *_, seed in order] == [benchmark.TUNED_ON] * 3 * cells + [0] * cells + [1] * cells
    assert [rate for *_, rate, seed in order[:3]] == [1e-4, 1e-3, 3e-3]
    assert {rate for *_, rate, seed in order if seed != benchmark.TUNED_ON} == {1e-3}
    assert "| tb | on-policy | 0.001 | 2 | 90.0 (90.0) | 0.100 (0.100) | 0.050 (0.050) | 3 |" in benchmark.table(done)


def test_a_student_that_is_its_teacher_is_at_no_distance_whatever_it_learns_from(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "LOGGED", 1)
    self_taught = replace(recipe, teacher=Teacher(models=(HuggingFace(str(BASE), device="cpu"),), top=3, reward=False))
    monkeypatch.setattr(benchmark, "find", lambda name: self_taught)
    out = tmp_path / "rows.jsonl"
    for way, source in benchmark.CELLS:
        if (way, source) not in (("tb", "log of the base"), ("tb by token", "k = 64, half old"), ("jsd", "on-policy"),
                                 ("sft", "log of the teacher")):  # fmt: skip
            finished_row = asdict(row(benchmark, (way, source), 1e-6, benchmark.TUNED_ON, 0.0))
            with out.open("a") as file:
                file.write(json.dumps(finished_row) + "\n")
    benchmark.main(["--out", str(out), "--updates", "2", "--problems", "8", "--rates", "1e-6", "--most", "4"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(benchmark.CELLS)
    assert [(r["way"], r["source"]) for r in rows[-4:]] == [
        ("tb", "log of the base"),
        ("tb by token", "k = 64, half old"),
        ("jsd", "on-policy"),
        ("sft", "log of the teacher"),
    ]
    for result in rows[-4:]:
        assert result["kl"] == pytest.approx(0, abs=1e-5)
        assert result["kl_back"] == pytest.approx(0, abs=1e-5)
        assert result["tokens"] >= 2 * 17 * 8 * 5
