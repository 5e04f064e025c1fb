"""`tba example` writes files that run where they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba.__main__ import main
from tba.settings import find

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_is_listed_with_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["example"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {name.strip() for name in lines} == {p.stem for p in EXAMPLES.glob("*") if p.suffix in (".py", ".ipynb")}
    assert all(len(said.split()) > 2 for said in lines.values())


def test_an_example_comes_with_the_files_that_it_names_and_says_how_it_runs_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["example", "my_data"]) == 0
    assert capsys.readouterr().out == "wrote my_data.py, two_rewards.py; now: tba train my_data.py\n"
    assert find("my_data.py") == find(str(EXAMPLES / "my_data.py"))
    assert "tba train my_data.py --offline" in Path("my_data.py").read_text()
    assert main(["example", "my_file"]) == 0
    assert Path("my_file.jsonl").read_bytes() == (EXAMPLES / "my_file.jsonl").read_bytes()


def test_an_example_never_replaces_a_file_and_writes_nothing_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two_rewards.py").write_text("mine")
    assert main(["example", "my_data"]) == 2
    assert "two_rewards.py is here already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["two_rewards.py"]
    assert main(["example", "my_dat"]) == 2
    assert "there is no example 'my_dat'" in capsys.readouterr().err
