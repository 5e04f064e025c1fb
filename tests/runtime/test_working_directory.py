"""A reward that changes the working directory: all paths of the run mean what they meant when it began."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tba.__main__ import main
from tba.models.source import resolve_model_path
from tba.recipes.quickstart import BASE
from tba.runtime.run_directory import RunDirectory

MOVING = """
import os
from pathlib import Path
import tba

def moving(prompt, completion, answer):
    os.chdir(os.environ["ELSEWHERE"])
    return float(completion == answer)

recipe = tba.Recipe(
    name="moving",
    task=tba.Jsonl(train=Path("train.jsonl"), eval=Path("eval.jsonl"), marked_by=moving),
    model=tba.HuggingFace(
        path="base", generation=tba.EngineSettings(slots=16, max_completion_tokens=6), device="cpu"
    ),
    reference="base",
    objective=tba.TrajectoryBalance(beta=0.05),
    replay=tba.ReplaySettings(pacing=tba.Pacing(warm_up=8), buffer=tba.BufferSettings(deduplicate=False)),
    evaluation=tba.EvaluationSettings(problems=4, every=2),
    steps=4, groups_per_step=2, group_size=4, samples_per_prompt=4, prompts_per_round=2,
)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the working directory, with a recipe and the files that it names by relative paths."""
    folder, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(BASE, folder / "base")
    for name, numbers in (("train", range(100, 130)), ("eval", range(130, 140)), ("more", range(100, 105))):
        lines = [{"prompt": f"{n}+{n}=", "answer": (a := str(2 * n)[::-1]), "response": a} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "moving.py").write_text(MOVING)
    (folder / "again.jsonl").write_bytes((folder / "more.jsonl").read_bytes())
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ELSEWHERE", str(elsewhere))
    return folder


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_a_run_whose_reward_changes_the_directory_ends_as_any_other(
    here: Path, runtime: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "moving.py", "--runtime", runtime, "--run-name", "it", "--data", "more.jsonl"]
    assert main([*words, "--run.journal-dir", "journals"]) == 0
    assert "The run lies in runs/it " in capsys.readouterr().out
    assert Path.cwd() == here
    assert json.loads((here / "runs/it/summary.json").read_text())["steps"] == 4
    assert [path.suffix for path in (here / "journals").iterdir() if path.name.startswith("it-")]
    assert list((here.parent / "elsewhere").iterdir()) == []


def test_other_commands_write_where_they_were_told_to_and_read_every_file(here: Path) -> None:
    assert main(["eval", "moving.py", "--out", "scores.json", "--texts", "texts.jsonl"]) == 0
    assert main(["sample", "moving.py", "--out", "some.jsonl", "--samples", "1", "--prompts", "2"]) == 0
    assert main(["import", "runs/it", "more.jsonl", "again.jsonl", "--recipe", "moving.py"]) == 0
    assert Path.cwd() == here
    assert {"scores.json", "texts.jsonl", "some.jsonl", "runs"} <= {path.name for path in here.iterdir()}
    assert list((here.parent / "elsewhere").iterdir()) == []


def test_the_paths_of_a_run_and_of_a_model_are_resolved_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "runs").mkdir()
    run = RunDirectory(Path("runs/it"))
    assert resolve_model_path("base", print) == str(here / "base")
    monkeypatch.chdir(here.parent / "elsewhere")
    assert (run.path, run.displayed_path) == (here / "runs" / "it", Path("runs/it"))
    assert RunDirectory(here / "it").displayed_path == here / "it"
