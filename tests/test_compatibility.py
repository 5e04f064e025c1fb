"""Runs that earlier versions left (`tools/record_compatibility.py`) are read and go on.

A fixture is never recorded again: where one fails, users' runs on disk fail too.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs import command

import tba
from tba.__main__ import main
from tba.record.evaluations import read_evaluations
from tba.record.metrics import read_metrics
from tba.replay.follower import JournalFollower
from tba.training.checkpoint import newest_sound_checkpoint
from tba.types import Trajectory

FIXTURES = Path(__file__).parent / "fixtures" / "compatibility"
SECONDS = 240.0


@dataclass(frozen=True)
class Recorded:
    """A copy of a fixture, and what it is expected to hold."""

    path: Path
    expected: dict[str, Any]

    @property
    def run(self) -> Path:
        return self.path / "run"

    def trajectories(self) -> list[Trajectory]:
        with JournalFollower(self.run / "journal.sqlite", create=False) as journal:
            return journal.drain()


@pytest.fixture(params=sorted(path.name for path in FIXTURES.iterdir()))
def recorded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """A fixture at another place; its recipe, problems and model are named relative to it."""
    path = shutil.copytree(FIXTURES / request.param, tmp_path / "a copy")
    monkeypatch.chdir(path)
    return Recorded(path, json.loads((path / "expected.json").read_text()))


def test_a_run_of_an_earlier_version_opens_with_every_row_and_reward(recorded: Recorded) -> None:
    expected, trajectories = recorded.expected, recorded.trajectories()
    assert len(trajectories) == expected["rows"] == len(expected["rewards"])
    assert {t.uid: t.reward for t in trajectories} == expected["rewards"]
    assert sum(t.length for t in trajectories) == expected["tokens"]
    assert all(math.isfinite(value) and value <= 0 for t in trajectories for value in t.log_reference)
    assert [row["step"] for row in read_metrics(recorded.run)] == list(range(1, expected["metrics_rows"] + 1))
    assert len(read_evaluations(recorded.run)) == expected["evaluations"]
    checkpoint, damaged = newest_sound_checkpoint(recorded.run / "checkpoints")
    assert (checkpoint and checkpoint.version.step, damaged) == (expected["checkpoint_step"], [])
    summary = tba.open_run(recorded.run).summary
    assert summary is not None
    assert summary.tokens.closes()
    assert summary.tokens.written == expected["tokens"]


def test_the_commands_that_read_a_run_of_an_earlier_version_count_what_it_has(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = recorded.expected
    assert main(["show", "run"]) == 0
    assert f"{expected['metrics_rows']} steps" in capsys.readouterr().out
    assert main(["report", "run", "--out", "report.html"]) == 0
    (run,) = json.loads(Path("report.json").read_text())["runs"]
    assert run["trajectories"]["of"] == expected["rows"]
    assert Path("report.html").stat().st_size > 0
    capsys.readouterr()
    assert main(["replay", "run"]) == 0
    printed = capsys.readouterr().out
    assert [int(number) for number in re.findall(r"\d+", printed.partition("\n")[0])[:2]] == [
        expected["rows"],
        expected["tokens"],
    ]
    assert main(["replay", "run", "--export", "rows.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert {row["uid"]: row["reward"] for row in rows} == expected["rewards"]


def test_a_run_of_an_earlier_version_is_resumed_to_its_last_step_with_every_row_that_it_had(recorded: Recorded) -> None:
    expected = recorded.expected
    process = command("resume", "run")
    _, errors = process.communicate(SECONDS)
    assert process.returncode == 0, errors
    metrics = read_metrics(recorded.run)
    assert [row["step"] for row in metrics] == list(range(1, expected["steps"] + 1))
    rewards = {t.uid: t.reward for t in recorded.trajectories()}
    assert {uid: rewards.get(uid) for uid in expected["rewards"]} == expected["rewards"]
    summary = tba.open_run(recorded.run).summary
    assert summary is not None
    assert summary.steps == expected["steps"]
    assert summary.faults["resumes"] == 1
    for ledger, written in (
        (summary.tokens, sum(t.length for t in recorded.trajectories())),
        (summary.trajectories, len(rewards)),
    ):
        assert ledger.closes()
        assert ledger.written == written
