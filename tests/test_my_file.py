"""The example in `examples/my_file.py`, trained as a user would, with a small model in place of the Hub's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tba.__main__ import main
from tba.recipes import quickstart
from tba.record.summary import Summary

EXAMPLE = Path(__file__).parents[1] / "examples" / "my_file.py"
BASE = Path(quickstart.__file__).parent / "quickstart_base"


def test_a_file_of_problems_is_trained_on_as_the_example_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = [{"prompt": f"{a}+{a}=", "letter": str(a % 5 * 2)} for a in range(100, 200)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sums))
    small = ["--runtime", "inline", "--steps", "2", "--replay.pacing.warm-up", "32", "--evaluation.problems", "8"]
    where = ["--task.train", str(tmp_path / "sums.jsonl"), "--model.path", str(BASE), "--model.device", "cpu"]
    length = ["--model.generation.max-completion-tokens", "6"]
    assert main(["train", str(EXAMPLE), *where, *small, *length, "--runs", str(tmp_path), "--run-name", "run"]) == 0
    assert "Held-out accuracy" in capsys.readouterr().out
    summary = Summary.read(tmp_path / "run")
    assert summary is not None
    assert summary.steps == 2
    assert summary.trajectories.closes()
    assert {e.metric for e in summary.evaluations} == {"pass@1/greedy", "pass@1/sampled"}
