"""The worked example of docs/import.md, run as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tba.__main__ import main
from tba.record.summary import Summary

PAGE = (Path(__file__).parents[1] / "docs" / "import.md").read_text(encoding="utf-8")


def test_the_example_of_the_page_imports_and_trains_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, commands, report = re.findall(r"^```\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)[:3]
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text(lines)
    take, train = (shlex.split(command)[1:] for command in commands.splitlines())
    assert main(take) == 0
    assert capsys.readouterr().out.splitlines() == report.splitlines()
    assert main([*train, "--runtime", "inline", "--evaluation.problems", "20"]) == 0
    summary = Summary.read(tmp_path / "runs" / "sums")
    assert summary is not None
    assert (summary.tokens.imported, summary.tokens.generated, summary.steps) == (22, 0, 2)
    assert summary.tokens.closes()
    assert {e.version.step for e in summary.evaluations} == {0, 2}
