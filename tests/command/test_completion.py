"""What a shell completes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tba.__main__ import main
from tba.command.completion import SHELLS, candidates
from tba.fields import flags
from tba.recipe_names import recipe_names
from tba.settings import find


def completed(*words: str) -> list[str]:
    return candidates(words)


def test_commands_recipes_and_what_else_a_command_takes_are_completed() -> None:
    assert completed("sh") == ["show"]
    assert {"train", "completion", "red-team"} <= set(completed(""))
    assert completed("train", "quick") == ["quickstart"]
    assert completed("check", "") == recipe_names()
    assert completed("model", "") == ["smollm2"]
    assert completed("reward-model", "") == completed("search", "") == []
    assert completed("red-team", "") == ["world", "classifier", "eval"]
    assert completed("completion", "z") == ["zsh"]
    assert completed("train", "no-such") == completed("train", "my.py", "") == completed("no-such", "") == []


def test_runs_of_this_folder_are_completed_where_a_run_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.json").touch()
    (tmp_path / "runs" / "no-run").mkdir()
    monkeypatch.chdir(tmp_path)
    assert completed("show", "runs/") == completed("show", "runs/one", "") == ["runs/one", "runs/two"]
    assert completed("resume", "runs/t") == ["runs/two"]
    assert completed("search", "--run", "") == ["runs/one", "runs/two"]


def test_options_are_those_of_the_usage_and_the_fields_of_a_recipe_which_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TBA_CACHE", str(tmp_path))
    assert completed("replay", "runs/one", "--") == ["--sql", "--export", "--seconds"]
    assert completed("eval", "my.py", "--t") == ["--texts"]
    for _ in range(2):
        found = completed("train", "quickstart", "--")
        assert {"--run-name", "--data", *flags(find("quickstart"))} <= set(found)
        assert len(found) == len(set(found))
    (kept,) = (tmp_path / "completion").iterdir()
    kept.write_text('["--of-the-cache"]')
    assert "--of-the-cache" in completed("train", "quickstart", "--of")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_is_one_that_it_can_read(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    if shutil.which(shell):
        assert subprocess.run([shell, "-n", "/dev/stdin"], input=script, text=True, check=False).returncode == 0


def test_bash_completes(tmp_path: Path) -> None:
    assert main(["completion", "tcsh"]) == 2
    (tmp_path / "tba").write_text(f'#!/bin/sh\nexec {sys.executable} -m tba "$@"\n')
    (tmp_path / "tba").chmod(0o755)
    typed = "COMP_WORDS=(tba train quick); COMP_CWORD=2; _tba; echo ${COMPREPLY[@]}"
    run = ["bash", "-c", f'export PATH={tmp_path}:$PATH; eval "$(tba completion bash)"; {typed}']
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "quickstart\n"
