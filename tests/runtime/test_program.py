"""All who work on a run at one time are of one version of the program; a run may go on with another."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SECONDS, inline, made

import tba
from tba.__main__ import main
from tba.errors import UserError
from tba.runtime.cluster.remote import Visitors
from tba.runtime.program import require_same_version, version, version_of
from tba.runtime.run_directory import RunDirectory


def test_a_searcher_of_other_source_files_is_refused_in_a_sentence_that_names_both(tmp_path: Path) -> None:
    _, run = made(tmp_path / "run")
    shutil.copytree(Path(tba.__file__).parent, tmp_path / "other" / "tba", ignore=shutil.ignore_patterns("*.pyc"))
    with (tmp_path / "other" / "tba" / "types.py").open("a") as file:
        file.write("# a comment\n")
    with run.hold_lock(0.0):
        process = subprocess.run(
            [sys.executable, "-m", "tba", "search", "--run", str(run.path)],
            env=os.environ | {"PYTHONPATH": str(tmp_path / "other")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    output = " ".join(process.stderr.split())
    versions = re.fullmatch(
        r"tba: a searcher that would join uses tba (.+ \(\w{12}\)), but the run uses tba (.+ \(\w{12}\)): "
        "start it from the same source files",
        output,
    )
    assert process.returncode == 2
    assert versions is not None, output
    assert versions[2] == version() != versions[1]
    assert not (run.path / "joined").exists()


def test_a_guest_says_its_version_and_a_run_that_does_not_say_its_own_is_another(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    visitors = Visitors(run, recipe)
    with (
        run.hold_lock(0.0),
        pytest.raises(UserError, match=r"would join uses tba 0\.0\.9 \(0f\), but the run uses tba "),
    ):
        visitors.join("0.0.9 (0f)")
    for facts in ({}, {"incarnations": []}, {"incarnations": ["begun"]}, {"incarnations": [{"why": "begun"}]}):
        with pytest.raises(UserError, match="the run uses tba of an earlier version, which does not say which"):
            require_same_version(facts, "somebody")
    require_same_version(run.facts, "somebody")


def test_a_run_goes_on_with_another_version_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    inline(path, "--steps", "2", "--evaluation.every", "0", "--evaluation.problems", "1")
    recorded = json.loads((path / "recipe.json").read_text())
    recorded["incarnations"][0]["program"] = "0.0.9 (0f)"
    RunDirectory(path).write_facts(recorded)
    assert main(["resume", str(path), "--steps", "4", "--runtime", "inline"]) == 0
    assert f"with tba {version()}; until now with 0.0.9 (0f)" in " ".join(capsys.readouterr().out.split())
    assert [i["program"] for i in RunDirectory.open(path).facts["incarnations"]] == ["0.0.9 (0f)", version()]
    assert version_of(RunDirectory.open(path).facts) == version()
