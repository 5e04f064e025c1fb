"""The selection of docs/extend.md, read from the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tba
from tba.__main__ import main
from tba.record.metrics import read_metrics

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
FEW = ("--runtime", "inline", "--replay.pacing.warm-up", "32", "--evaluation.problems", "8")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    _, code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    path = tmp_path / "my_selection.py"
    path.write_text(code)
    return path


def drawn(run: Path) -> list[tuple[float, float]]:
    return [(row["groups_mixed"], row["groups_equal"]) for row in read_metrics(run)]


def test_a_selection_of_ones_own_draws_all_groups_and_goes_on_after_a_resume(written: Path, tmp_path: Path) -> None:
    flags = ("--replay.selection.floor", "0.2", "--runs", str(tmp_path), "--groups-per-step", "6", "--group-size", "4")
    assert main(["train", str(written), *FEW, *flags, "--steps", "2", "--run-name", "run"]) == 0
    assert main(["resume", str(tmp_path / "run"), "--steps", "4"]) == 0
    counts = drawn(tmp_path / "run")
    assert [mixed + equal for mixed, equal in counts] == [6, 12, 18, 24]  # counted on from the checkpoint
    assert counts[-1][0] > counts[-1][1]  # though about half of the prompts have answers of one reward only
    run = tba.open_run(tmp_path / "run")
    assert run.summary is not None
    assert run.summary.trajectories.closes()
