"""Folders of others: nothing in them is executed, and whatever their files hold ends in one sentence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tba
from tba.__main__ import main
from tba.errors import UserError
from tba.policy.loading import load_model
from tba.record.jsonl import write_json
from tba.record.metrics import read_metrics
from tba.record.summary import Summary
from tba.runtime.run_directory import RunDirectory, new_path
from tba.training.checkpoint import Checkpoint, newest_checkpoint
from tba.training.tiny_models import ScratchModel, character_tokenizer
from tba.types import Problem, Version, is_name
from tba.user_code import print_error, problems_of
from tba_lab.study import Study

TOY = Path(__file__).with_name("toy") / "recipe.py"
DEEP = 200_000
HOSTILE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe\xfd",
    b"[" * DEEP,
    b'{"a":' * DEEP,
    b'{"recipe": "quickstart", "version": [], "state": 1, "files": [], "kind": 5, "resolved": "x"}',
    b"[" * 500 + b"]" * 500,
]


def said(capsys: Any, *arguments: object) -> tuple[int, str]:
    """The exit code, and what was said on standard error."""
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


def refused(capsys: Any, *arguments: object) -> str:
    """The one sentence with which a command ends."""
    code, error = said(capsys, *arguments)
    assert (code, error.count("\n"), error[:5]) == (2, 1, "tba: "), error
    return error


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Is there when the recipe's file has been executed."""
    return tmp_path_factory.mktemp("marker") / "executed"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, marker: Path) -> Path:
    """A run of a recipe's file that has made its 4 steps."""
    folder = tmp_path_factory.mktemp("foreign")
    source = folder / "theirs.py"
    source.write_text(f"{TOY.read_text()}\n__import__('pathlib').Path({str(marker)!r}).touch()\n")
    small = [
        "--steps",
        "4",
        "--evaluation.problems",
        "1",
        "--replay.pacing.warm-up",
        "16",
        "--run.checkpoint-every",
        "2",
    ]
    assert main(["train", str(source), "--runs", str(folder), "--run-name", "r", "--runtime", "inline", *small]) == 0
    return folder / "r"


@pytest.fixture
def run(whole: Path, tmp_path: Path, marker: Path) -> Path:
    marker.unlink(missing_ok=True)
    return Path(shutil.copytree(whole, tmp_path / "r"))


def test_who_reads_a_run_executes_nothing_of_it(run: Path, marker: Path, tmp_path: Path, capsys: Any) -> None:
    lines = tmp_path / "answers.jsonl"
    lines.write_text("{}\n")
    assert said(capsys, "show", run) == (0, "")
    assert said(capsys, "replay", run) == (0, "")
    for reader in (["import", run, lines], ["sft", run, "--min-reward", "0", "--out", tmp_path / "model"]):
        assert "theirs.py, which would be executed: look at it, then give --trust too" in refused(capsys, *reader)
        assert not marker.exists()
    elsewhere = tmp_path / "journals"
    facts = json.loads((run / "recipe.json").read_text())
    facts["resolved"]["run"]["journal_dir"] = str(elsewhere)
    RunDirectory(run).write_facts(facts)
    elsewhere.mkdir()
    (run / "journal.sqlite").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(RunDirectory.open(run).journal_to_read())
    assert [path.parent for path in elsewhere.iterdir()] == [elsewhere]
    assert said(capsys, "replay", run) == (0, "")
    assert not marker.exists()
    # its recipe, which is executed now, has the journal in its own folder
    assert "journal.sqlite is gone" in refused(capsys, "import", run, lines, "--trust")
    assert marker.exists()


@pytest.mark.parametrize(
    "name", ["os", "tba.__main__", "..quickstart", "toy_study", "quickstart.recipe", "_base", "a::b"]
)
def test_a_run_cannot_name_a_module_that_is_no_recipe(run: Path, capsys: Any, name: str) -> None:
    facts = json.loads((run / "recipe.json").read_text())
    RunDirectory(run).write_facts({**facts, "recipe": name, "digest": None})
    assert "there is no " in refused(capsys, "resume", run)


def test_a_run_cannot_ask_for_help_in_the_place_of_its_user(run: Path, capsys: Any) -> None:
    facts = json.loads((run / "recipe.json").read_text())
    RunDirectory(run).write_facts({**facts, "overrides": [*facts["overrides"], "--help"]})
    assert "has an override that no run has (--help)" in refused(capsys, "resume", run)


READERS: dict[str, list[Callable[[Path], list[object]]]] = {
    "recipe.json": [
        lambda run: ["resume", run],
        lambda run: ["search", "--run", run],
        lambda run: ["import", run, run / "metrics.jsonl"],
        lambda run: ["sft", run, "--min-reward", "0", "--out", run / "model"],
        lambda run: ["train", "quickstart", "--data", run, "--runs", run.parent, "--run-name", "r"],
    ],
    "summary.json": [lambda run: ["show", run]],
    "failure.json": [lambda run: ["show", run]],
    "checkpoints/step-*/run.json": [lambda run: ["resume", run, "--steps", "6"]],
    "checkpoints/step-*/optimizer.json": [lambda run: ["resume", run, "--steps", "6", "--runtime", "inline"]],
}


@pytest.mark.parametrize("file", list(READERS))
def test_whatever_a_file_of_a_run_holds_ends_in_one_sentence(file: str, run: Path, capsys: Any) -> None:
    for content in HOSTILE if file != "checkpoints/step-*/optimizer.json" else HOSTILE[:2]:
        for place in [*run.glob(file)] or [run / file]:
            place.write_bytes(content)
        for command in READERS[file]:
            assert file.rpartition("/")[2] in refused(capsys, *command(run))


@pytest.mark.parametrize("file", ["summary.json", "failure.json"])
def test_a_run_goes_on_without_what_is_only_for_reading(file: str, run: Path, capsys: Any) -> None:
    (run / file).write_bytes(HOSTILE[0])
    assert main(["resume", str(run), "--steps", "6", "--runtime", "inline"]) == 0
    assert file in capsys.readouterr().out.replace("\n", "")  # said once, however long the path is
    assert read_metrics(run)[-1]["step"] == 6


@pytest.mark.parametrize("file", ["weights/*.json", "weights/*.pins", "weights/*.safetensors"])
def test_a_run_goes_on_when_published_weights_are_damaged(file: str, run: Path) -> None:
    """They are published again from the checkpoint; one whose tensors are gone is removed with the rest of it."""
    (run / "weights" / f"{newest_version(run)}.pins").write_text("[")
    for damaged in run.glob(file):
        damaged.unlink() if file.endswith("tensors") else damaged.write_bytes(HOSTILE[1])
    assert main(["resume", str(run), "--steps", "6", "--runtime", "inline"]) == 0
    assert read_metrics(run)[-1]["step"] == 6


def newest_version(run: Path) -> str:
    return max((run / "weights").glob("*.json"), key=lambda path: Version.parse(path.stem)).stem


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("evaluations.jsonl", {"metric": "pass@1/greedy", "value": 0.5, "n": 0}),
        ("evaluations.jsonl", {"metric": "pass@1/greedy", "value": 0.5, "n": 10**30}),
        ("evaluations.jsonl", {"metric": "pass@1/greedy", "value": 7, "n": 5}),
        ("faults.jsonl", {"kind": "held_out_falls", "what": [1]}),
        (
            "answers.jsonl",
            {"prompt": ["a"], "completion": 3, "reward": 0.0, "correct": True, "metric": "pass@1/greedy"},
        ),
    ],
)
def test_a_line_with_a_value_that_cannot_be_is_passed_over_and_told(
    file: str, line: dict[str, Any], run: Path, capsys: Any
) -> None:
    of_a_version = {} if file == "faults.jsonl" else {"version": "0.4", "wall_seconds": 1.0}
    with (run / file).open("a") as lines:
        lines.write(json.dumps(line | of_a_version) + "\n")
    assert main(["show", str(run)]) == 0
    assert f"{file}: line " in capsys.readouterr().out


def test_every_field_of_a_summary_has_its_type(run: Path, capsys: Any) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert len(summary) > 15
    for name, value in summary.items():
        if name not in (
            "slow_side",
            "samples_per_insert",
            "trained_share",
        ):  # which follow from others and are not read
            wrong = 3 if isinstance(value, str) else "\x1b[31mtext"
            write_json(run / "summary.json", {**summary, name: wrong})
            assert f"{name} is {wrong!r}, it must be " in refused(capsys, "show", run)


def test_of_one_that_shows_a_run_nothing_is_a_style_or_a_command_to_the_terminal(run: Path, capsys: Any) -> None:
    summary = json.loads((run / "summary.json").read_text())
    hostile = "[/][bold]$x_{$\x1b[31m:smile:\n"
    summary["recipe"] = summary["machine"]["cpu"] = summary["evaluations"][0]["metric"] = hostile
    summary["faults"][hostile] = hostile
    write_json(run / "summary.json", summary)
    (run / "evaluations.jsonl").unlink()
    assert main(["show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[/][bold]$x_{$\\x1b[31m:smile:\\n" in shown
    (run / "summary.json").unlink()
    write_json(run / "failure.json", {"kind": hostile, "message": hostile, "step": 1})
    assert main(["show", str(run)]) == 0
    assert "[/][bold]$x_{$\\x1b[31m:smile:\\n" in capsys.readouterr().out


def test_a_manifest_is_covered_by_its_digest_and_names_every_file(run: Path) -> None:
    checkpoint = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    path = checkpoint.path / "run.json"
    manifest = json.loads(path.read_text())
    checkpoint.verify()
    for changed in (
        {**manifest, "version": "0.3"},
        {**manifest, "state": {**manifest["state"], "skipped": 1}},
        {**manifest, "files": {}},
        {**{k: v for k, v in manifest.items() if k != "digest"}, "digesu": manifest["digest"]},
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match=r"run.json: its digest (differs|is missing)"):
            Checkpoint.load(checkpoint.path)
    path.write_text(json.dumps({k: v for k, v in manifest.items() if k != "digest"}))  # of an earlier version
    assert Checkpoint.load(checkpoint.path).version == Version(0, 4)
    outside = {
        **{k: v for k, v in manifest.items() if k != "digest"},
        "files": {**manifest["files"], "/dev/zero": [0, 0]},
    }
    path.write_text(json.dumps(outside))
    with pytest.raises(UserError, match="/dev/zero: No such file"):
        Checkpoint.load(checkpoint.path).verify()
    path.write_text(json.dumps(manifest))
    (checkpoint.path / "pytorch_model.bin").write_bytes(b"planted")
    with pytest.raises(UserError, match=r"was not made with \(pytorch_model.bin\): remove it"):
        newest_checkpoint(run / "checkpoints")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    folder = tmp_path_factory.mktemp("model") / "m"
    tokenizer = character_tokenizer("ab")
    ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=24, max_positions=16).start(tokenizer).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    load_model(folder, "cpu", torch.float32)
    return folder


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_model_whose_files_are_something_else_is_refused_in_one_sentence(
    file: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "m"))
    for content in (*HOSTILE, b'{"model_type": "llama", "hidden_size": "x", "architectures": 5}'):
        if file == "tokenizer_config.json" and content[-1:] == b"}":
            continue  # an object is a configuration, whatever unknown fields it has
        (copy / file).write_bytes(content)
        with pytest.raises(UserError, match="cannot load a causal language model and its tokenizer"):
            load_model(copy, "cpu", torch.float32)


def test_no_model_brings_code_or_a_pickle(model: Path, tmp_path: Path, marker: Path) -> None:
    marker.unlink(missing_ok=True)
    copy = Path(shutil.copytree(model, tmp_path / "m"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "theirs.py").write_text(f"__import__('pathlib').Path({str(marker)!r}).touch()\n")
    auto = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model", "AutoTokenizer": ["theirs.T", None]}
    for changes in ({"model_type": "theirs"}, {}):
        (copy / "config.json").write_text(json.dumps({**config, **changes, "auto_map": auto}))
        if changes:
            with pytest.raises(UserError, match="cannot load a causal language model"):
                load_model(copy, "cpu", torch.float32)
        else:
            load_model(copy, "cpu", torch.float32)  # of a known kind: its code is the library's
        assert not marker.exists()
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot load a causal language model"):
        load_model(copy, "cpu", torch.float32)


@pytest.mark.parametrize("name", ["..", ".", "-rf", ".hidden", "a/b", "a b", "", "x" * 300, "a\n", "$(x)"])
def test_a_name_is_no_path_no_option_and_not_hidden(name: str, tmp_path: Path, capsys: Any) -> None:
    assert not is_name(name)
    assert "--run-name is" in refused(capsys, "train", TOY, "--runs", tmp_path, f"--run-name={name}")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="a study is named"):
        Study(name=name, recipe=None, variants={"a": ()})
    with pytest.raises(UserError, match="the recipe is named"):
        new_path(tmp_path, name, None)


def test_names_that_are_used_are_names() -> None:
    assert all(map(is_name, ["quickstart", "tb-k4", "a.b_c-1", "run-20260101-000000", "x=1+2", "großes"]))


def test_a_summary_that_a_run_writes_is_of_its_own_kind(run: Path) -> None:
    assert Summary.read(run) is not None


def test_a_field_that_cannot_be_written_as_json_is_named_with_what_it_may_be() -> None:
    class Mine:
        name = "mine"

        def problems(self, split: str) -> list[Problem]:
            return [Problem("1?", {"n": np.int64(1)}), Problem("2?", {"n": 1, "of": {1, 2}})]

    with pytest.raises(
        UserError, match=r"^problem 1 of .* has the field 'of' with \{1, 2\}: make it of texts, numbers"
    ):
        problems_of(Mine(), "train")


def test_the_error_that_ends_a_process_is_printed_without_what_a_terminal_obeys(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With its traceback, but for bad input; an output that is closed keeps no process alive."""
    try:
        raise KeyError("\x1b]0;owned\x07\u202e")
    except KeyError as raised:
        error = raised
    print_error(error)
    said = capfd.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert "raise KeyError(" in said
    assert all(line.isprintable() for line in said.splitlines())
    print_error(UserError("the text \x1b[2J is none:\ngive another"))
    assert capfd.readouterr().err == "tba: the text \\x1b[2J is none:\ngive another\n"
    ended = os.dup(2)
    os.close(2)
    try:
        print_error(error)
    finally:
        os.dup2(ended, 2)
        os.close(ended)


def test_no_process_prints_a_traceback_as_it_is() -> None:
    package = Path(tba.__file__).parent
    assert [str(path) for path in package.rglob("*.py") if "print_exc" in path.read_text()] == []
