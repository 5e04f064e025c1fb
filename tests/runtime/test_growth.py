"""What is read at each step, round and look is the same in a run that has had ten times as much."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import made
from tests.replay.trajectory_cases import trajectory
from tests.scripts import script

from tba.record.evaluations import EvaluationWriter
from tba.record.live import status_line
from tba.record.metrics import MetricsWriter
from tba.replay.journal import JournalWriter
from tba.replay.pacing import Pacing
from tba.runtime.reporting import RunProgress
from tba.types import Evaluation, Version

PAGE = 8192


@pytest.fixture(scope="module")
def growth() -> Any:
    """The benchmark, which prints the same of larger runs."""
    return script("lab/benchmarks/growth.py")


def test_a_step_a_round_and_a_look_read_as_much_of_3000_rows_as_of_300(tmp_path: Path, growth: Any) -> None:
    measurements = {}
    for rows in (300, 3000):
        run = growth.write_run(tmp_path / str(rows), rows)
        with growth.SqliteCounter() as counting, growth.open_halves(*run) as both:
            measurements[rows] = growth.measure_halves(both, counting, 5)
    for name, few in measurements[300].items():
        many = measurements[3000][name]
        for kind in ("statements", "instructions", "lines"):
            assert many[kind] == few[kind], (name, kind)
        assert many["bytes"] < few["bytes"] + PAGE, name  # a page more or less, by where on it a row begins
    assert measurements[300]["round"]["statements"] > 10 < measurements[300]["round"]["instructions"]
    assert measurements[300]["look"]["lines"] == 2  # of the step since the last, and recipe.json


def test_the_live_view_says_the_same_as_one_that_reads_all_of_it_anew(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    metrics, evaluations = MetricsWriter(run.path), EvaluationWriter(run.path)
    watching = RunProgress(recipe, run)
    assert watching.status("training").phase == "warm-up"
    for step in range(1, 1032):
        row = {"tokens": 300.0, "reward": step / 1000} | ({"generated_tokens": 500.0 * step} if step > 3 else {})
        metrics.write(Version(0, step), 10 + 0.5 * step, row)
        if step % 100 == 0:
            evaluations.write([Evaluation(Version(0, step), 0.5 * step, "pass@1/greedy", step / 2000, 10, 1.0, 10)])
        if step in (1, 7) or step % 100 == 1:
            seen, anew = (p.status("training") for p in (watching, RunProgress(recipe, run)))
            assert (seen.step, seen.reward, seen.accuracy) == (anew.step, anew.reward, anew.accuracy)
            assert seen.step == step
            assert seen.training_seconds == pytest.approx(0.5 * (step - 1))
            assert (seen.generated_rate, seen.trained_rate) == (anew.generated_rate, anew.trained_rate)
            assert seen.trained_rate == (pytest.approx(600.0) if step > 1 else None)
            assert seen.generated_rate == (pytest.approx(1000.0) if step > 4 else None)
    assert watching.status("training").accuracy == {"pass@1/greedy": 0.5}
    metrics.close()
    evaluations.close()


def test_the_live_view_says_how_many_of_the_answers_that_it_waits_for_are_there(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    recipe = replace(recipe, replay=replace(recipe.replay, pacing=Pacing(warm_up=32)))
    watching = RunProgress(recipe, run)
    assert watching.status("starting").note == ""
    with JournalWriter(run.journal(recipe), "searcher-0") as writer:
        assert watching.status("training").note == "0 of 32 answers"
        writer.put([trajectory(n) for n in range(12)])
        status = watching.status("training")
        assert (status.phase, status.note) == ("warm-up", "12 of 32 answers")
        assert status_line(status).endswith("warm-up | 12 of 32 answers")
        assert watching.status("training", "searcher-0 was started again").note == "searcher-0 was started again"
        writer.put([trajectory(n) for n in range(12, 32)])
    assert watching.status("training").note == ""
    with closing(MetricsWriter(run.path)) as metrics:
        metrics.write(Version(0, 1), 10.0, {"reward": 0.5})
    assert watching.status("training").note == ""


def test_the_live_view_says_how_many_lines_it_cannot_read(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    (run.path / "metrics.jsonl").write_bytes(b'nonsense\n{"step": 7, "wall_seconds": 1.5}\n[1]\n{"step": 8, "wall')
    watching = RunProgress(recipe, run)
    for _ in range(2):
        status = watching.status("training")
        assert (status.step, status.note) == (7, "2 lines of what is recorded cannot be read")
    (run.path / "metrics.jsonl").write_text(json.dumps({"step": 1, "wall_seconds": 9.0}) + "\n")
    status = watching.status("training", "started again")
    assert (status.step, status.training_seconds, status.note) == (1, 0.0, "started again")
    assert watching.status("training").note == ""
