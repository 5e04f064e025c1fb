"""The commands, from end to end on a model that is made in a second."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.runtime.runs import command
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.__main__ import main
from tba.apps.preference.pairs import read_pairs
from tba.command.train import next_steps
from tba.recipe_names import recipe_names
from tba.record.evaluations import read_evaluations
from tba.record.run_record import RunRecord
from tba.record.summary import Summary
from tba.runtime.run_directory import RunDirectory
from tba.settings import find
from tba.training.checkpoint import newest_checkpoint
from tba.types import Version

SUMS = str(Path(__file__).parents[1] / "tiny_sums.py")
WARM_START = "supervised warm start on the demonstrations"

Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command that has to succeed; what it printed, on one line."""

    def run(*arguments: str | Path) -> str:
        capsys.readouterr()
        assert main([str(a) for a in arguments]) == 0
        found = capsys.readouterr()
        assert found.err == ""
        return " ".join(found.out.split())

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps, its warm start made on the way: in a cache that no other test has filled."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TBA_CACHE", str(root / "cache"))
        assert main(["train", SUMS, "--runs", str(root), "--run-name", "first"]) == 0
    return root / "first"


def test_recipes_lists_each_recipe_with_its_description(said: Said) -> None:
    listed = said("recipes")
    assert all(name in listed for name in recipe_names())
    assert "three-digit sums, last digit first (345+678=3201)" in listed


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in `tba recipes | head -1`."""
    read, write = os.pipe()
    os.close(read)
    process = command("recipes", out=write)
    _, errors = process.communicate(timeout=120)
    os.close(write)
    assert (process.returncode, errors) == (0, "")


def test_a_run_leaves_everything_that_is_promised(run: Path) -> None:
    left = {p.name for p in run.iterdir()}
    assert left >= {
        *("recipe.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "logs", "tensorboard"),
        *("summary.json", "evaluations.jsonl", "answers.jsonl", "weights", "journal.sqlite"),
    }
    record = RunRecord.read(run)
    assert [row["step"] for row in record.metrics] == [1, 2, 3, 4]
    written = json.loads((run / "summary.json").read_text())
    assert set(written) >= {
        *("recipe", "seed", "steps", "wall_seconds", "evaluations", "trainer_idle", "trainer_paced", "searcher_idle"),
        *("samples_per_insert", "tokens", "trajectories", "lag", "faults"),
    }
    assert written["wall_seconds"]["sft"] > 0
    assert {e["metric"] for e in written["evaluations"]} == {"pass@1/greedy", "pass@1/sampled", "pass@2/sampled"}
    assert {e["version"] for e in written["evaluations"]} == {"0.0", "0.4"}


def test_sample_writes_marked_answers_that_are_read_as_pairs(run: Path, said: Said, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    told = said("sample", SUMS, "--checkpoint", run, "--samples", "8", "--prompts", "20", "--out", out)
    assert "8 answers to each of 20 prompts" in told
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert Counter(line["prompt"] for line in lines) == Counter({line["prompt"]: 8 for line in lines})
    assert len(lines) == 8 * 20
    assert {line["reward"] for line in lines} == {0.0, 1.0}
    pairs, report = read_pairs(out)
    assert report.lines == 8 * 20
    right = {(line["prompt"], line["response"]) for line in lines if line["reward"] == 1.0}
    assert {(pair.prompt, pair.chosen) for pair in pairs} <= right
    varied = [
        p for p in {line["prompt"] for line in lines} if len({x["reward"] for x in lines if x["prompt"] == p}) == 2
    ]
    assert {pair.prompt for pair in pairs} == set(varied)
    assert set(report.refused) <= {"an empty answer", "answers with equal marks"}
    assert main(["sample", SUMS, "--out", str(out)]) == 2
    assert main(["sample", SUMS]) == 2
    assert main(["sample", SUMS, "--samples", "0", "--out", str(tmp_path / "none")]) == 2


def test_a_checkpoint_is_a_folder_that_transformers_loads_as_it_is(run: Path) -> None:
    checkpoint = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.version == Version(0, 4)
    model, tokenizer = (kind.from_pretrained(checkpoint.path) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert tokenizer.decode(tokenizer.encode("1+2=")) == "1+2="
    published = load_file(run / "weights" / "0.4.safetensors")
    for name, tensor in model.state_dict().items():
        if name in published:
            assert (tensor == published[name]).all(), name


def test_the_second_run_of_a_recipe_finds_its_warm_start_in_the_cache(
    run: Path, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TBA_CACHE", str(run.parent / "cache"))
    printed = said("train", SUMS, "--runs", tmp_path, "--run-name", "second", "--steps", "1")
    assert WARM_START not in printed
    summary = Summary.read(tmp_path / "second")
    assert summary is not None
    assert summary.wall_seconds.sft == 0
    before = [[e for e in read_evaluations(p) if e.version.step == 0] for p in (run, tmp_path / "second")]
    assert [e.value for e in before[0]] == [e.value for e in before[1]]


def test_a_run_ends_with_before_and_after_and_commands_that_name_its_recipe(said: Said, tmp_path: Path) -> None:
    printed = said("train", SUMS, "--runs", tmp_path, "--run-name", "third", "--steps", "2")
    assert "pass@1/greedy" in printed
    assert f"tba eval {tmp_path / 'third'}" in printed.replace("- ", "")
    assert f"tba show {tmp_path / 'third'}" in printed.replace("- ", "")


def test_show_tells_of_a_finished_run(run: Path, said: Said) -> None:
    printed = said("show", run)
    assert "4 steps" in printed
    assert "pass@1/sampled" in printed


def test_show_tells_of_a_run_that_was_killed_or_has_hardly_begun(run: Path, said: Said, tmp_path: Path) -> None:
    for name in ("recipe.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    assert "step 4, " in (printed := said("show", tmp_path))
    assert "no summary: it is running, or was killed" in printed
    (tmp_path / "metrics.jsonl").unlink()
    assert "step 0, " in said("show", tmp_path)


def test_eval_of_a_runs_newest_checkpoint_gives_the_figures_the_run_ended_with(
    run: Path, said: Said, tmp_path: Path
) -> None:
    printed = said("eval", SUMS, "--checkpoint", run, "--out", tmp_path / "scores.json")
    final = {e.metric: e for e in read_evaluations(run) if e.version.step == 4}
    scores = json.loads((tmp_path / "scores.json").read_text())["scores"]
    assert set(scores) == set(final)
    assert "unlike the run" not in printed
    for metric, e in final.items():
        assert len(scores[metric]) == e.n == 8
        assert sum(scores[metric]) / 8 == pytest.approx(e.value)
        assert metric in printed
    again = ("eval", SUMS, "--checkpoint", run, "--against", tmp_path / "scores.json")
    assert said(*again).count("+0.0 points against") == len(final)  # the same answers
    flipped = {metric: [1 - score for score in values] for metric, values in scores.items()}
    (tmp_path / "other.json").write_text(json.dumps({"scores": flipped}))
    printed = said(*again[:-1], tmp_path / "other.json")
    for metric, values in scores.items():
        assert f"{metric} {100 * (2 * sum(values) / 8 - 1):+.1f} points against" in printed
    kept = tmp_path / "kept.json"
    assert main([*map(str, again), "--evaluation.problems", "4", "--out", str(kept)]) == 2
    assert kept.is_file()  # what cannot be compared is not lost
    (tmp_path / "other.json").write_text(json.dumps({"scores": {"else": [1.0]}}))
    assert main([*map(str, again[:-1]), str(tmp_path / "other.json")]) == 2


def test_eval_of_a_run_is_that_of_its_recipe_with_its_fields_and_its_newest_checkpoint(
    run: Path, said: Said, tmp_path: Path
) -> None:
    said("eval", SUMS, "--checkpoint", run, "--out", tmp_path / "named.json")
    assert " step 4: " in said("eval", run, "--out", tmp_path / "run.json")
    named, of_run = (json.loads((tmp_path / f"{name}.json").read_text())["scores"] for name in ("named", "run"))
    assert of_run == named
    assert len(next(iter(named.values()))) == 8
    assert "4 eval problems" in said("eval", run, "--evaluation.problems", "4")
    assert "1 answers to each of 3 prompts" in said(
        "sample", run, "--out", tmp_path / "answers.jsonl", "--samples", "1", "--prompts", "3"
    )


def test_a_run_is_resumed_and_a_folder_of_runs_is_shown_by_what_they_are(run: Path, said: Said, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy")
    assert main(["resume", str(tmp_path / "copy")]) == 2
    printed = said("resume", tmp_path / "copy", "--steps", "5", "--steps", "6")
    assert "resuming from" in printed
    listed = said("show", tmp_path)
    assert re.search(r"copy ended 6 \S+ s pass@1/", listed), listed


def test_a_hint_sets_each_field_once_and_is_given_where_it_can_be_followed(run: Path) -> None:
    summary, here = Summary.read(run), RunDirectory.open(run)
    assert summary is not None
    given = ["quickstart", "--steps", "3", "--runtime", "processes", "--steps", "5"]
    hints = next_steps(find("quickstart"), given, here, summary, 0)
    assert "tba train quickstart --steps 5 --runtime inline" in hints
    assert f"tba eval {run}" in hints
    hints = next_steps(find("quickstart"), [*given, "--searchers", "2"], here, summary, 0)
    assert not any(line.startswith("tba train quickstart") for line in hints)  # inline there is one


def test_eval_says_what_is_asked_otherwise_than_in_the_run(run: Path, said: Said) -> None:
    others = ("--optimizer.lr", "1", "--prompts-per-round", "3")  # which an evaluation does not ask for
    printed = said("eval", SUMS, "--checkpoint", run, "--policy-temperature", "0.5", *others)
    assert printed.count("unlike the run") == 1
    assert "policy_temperature is 0.5 here, 1.0 there" in " ".join(printed.split())


def test_eval_of_a_folder_and_of_the_training_problems(run: Path, said: Said, tmp_path: Path) -> None:
    checkpoint = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    texts = tmp_path / "answers.jsonl"
    which = ("--checkpoint", checkpoint.path, "--split", "train", "--evaluation.problems", "20")
    printed = said("eval", SUMS, *which, "--texts", texts)
    assert "20 train problems" in printed
    assert "95 % interval" in printed
    assert "20 answers of " in printed
    answers = [json.loads(line) for line in texts.read_text().splitlines()]
    assert len({answer["prompt"] for answer in answers}) == len(answers) == 20
    assert all(set(answer) == {"prompt", "response", "reward", "correct", "metric"} for answer in answers)
    assert main(["eval", SUMS, *map(str, which), "--texts", str(texts), "--record.hide-text"]) == 2


def test_evaluations_of_other_problems_are_not_compared_and_files_do_not_replace_each_other(
    run: Path, said: Said, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, held_out = ("--evaluation.problems", "5"), str(tmp_path / "held_out.json")
    said("eval", run, *few, "--out", held_out)
    assert main(["eval", str(run), *few, "--split", "train", "--against", held_out]) == 2
    assert "is of eval problems, and this evaluation of train" in capsys.readouterr().err
    assert main(["eval", str(run), *few, "--out", str(tmp_path)]) == 2
    assert main(["eval", str(run), *few, "--out", f"{tmp_path}/a", "--texts", f"{tmp_path}/b/../a"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", ["sample", "sft"])
def test_the_fields_of_a_recipe_are_listed_whatever_else_the_command_needs(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, SUMS, "--help"])
    assert ended.value.code == 0
    assert "--policy-temperature" in capsys.readouterr().out


def test_of_a_field_that_is_set_twice_the_last_counts_for_the_rate_too(said: Said, tmp_path: Path) -> None:
    words = ("--steps", "900", "--steps", "2", "--runs", tmp_path, "--run-name", "twice")
    said("train", SUMS, "--runtime", "inline", *words)
    assert RunDirectory.open(tmp_path / "twice").facts["overrides"].count("--steps") == 1


def test_an_argument_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "r\udce9c.py"]) == 2
    assert "is not valid UTF-8" in capsys.readouterr().err


def test_an_import_ends_with_the_command_that_begins_its_run(said: Said, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    words = [str(tmp_path / "imported"), str(tmp_path / "answers.jsonl"), "--recipe", SUMS, "--steps", "2"]
    assert f"tba train {SUMS} --runs {tmp_path} --run-name imported --steps 2 [--offline]" in said("import", *words)
    assert main(["import", str(tmp_path / "my run"), *words[1:]]) == 2


def test_at_least_one_answer_is_learnt(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", str(run), "--out", str(tmp_path / "a"), "--min-reward", "0", "--most", "-1", "--trust"]) == 2
    assert "--most is -1: give" in capsys.readouterr().err


def test_sft_makes_a_recipes_model_once_and_then_copies_it(said: Said, tmp_path: Path) -> None:
    arguments = ("--model.warm-start.sft.steps", "3", "--model.warm-start.sft.seed", "8")
    first = said("sft", SUMS, "--out", tmp_path / "a", *arguments)
    second = said("sft", SUMS, *arguments, "--out", tmp_path / "b")
    assert WARM_START in first
    assert WARM_START not in second
    assert f"tba train RECIPE --model.path {tmp_path / 'a'}" in first
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "a").num_parameters() > 1000
    assert main(["sft", SUMS, "--out", str(tmp_path / "a")]) == 2


def test_sft_learns_lines_of_prompt_and_response_from_nothing_and_goes_on_from_a_model(
    said: Said, tmp_path: Path
) -> None:
    lines = [{"prompt": f"What comes after {n}?", "response": f"{n + 1}."} for n in range(60)]
    (tmp_path / "count.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    small = ("--warm-start.scratch.hidden-size", "16", "--warm-start.scratch.layers", "1")
    settings = ("--warm-start.vocab-size", "300", "--warm-start.sft.steps", "12", "--warm-start.sft.lr", "0.01")
    said("sft", tmp_path / "count.jsonl", "--out", tmp_path / "a", *small, *settings)
    model, tokenizer = (k.from_pretrained(tmp_path / "a") for k in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.hidden_size == 16
    assert tokenizer.decode(tokenizer.encode("What comes after 7?")) == "What comes after 7?"
    said("sft", tmp_path / "count.jsonl", "--out", tmp_path / "b", "--model", tmp_path / "a", *settings)
    losses = [json.loads((tmp_path / name / "warm_start.json").read_text())["loss"] for name in "ab"]
    assert losses[1] < losses[0]


def test_show_compares_runs_by_their_settings(run: Path, said: Said, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    facts = json.loads((other / "recipe.json").read_text())
    facts["resolved"]["optimizer"]["lr"] = 0.5
    (other / "recipe.json").write_text(json.dumps(facts))
    printed = said("show", run, other)
    assert re.search(r"optimizer\.lr +\S+ +0\.5", printed)
    assert main(["show", str(run), str(run)]) == 2
    assert main(["show", str(run), "--all"]) == 2
