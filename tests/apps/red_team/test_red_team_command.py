"""`tba red-team`: a world, a run in it and its figures, end to end and without a text in what is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.scripts import script

from tba.__main__ import main
from tba.apps.red_team.trigger_world import MARKERS, THINGS
from tba.training.tiny_models import ScratchModel, train_bpe_tokenizer

WORLD = (
    *("--attacks", "300", "--exchanges", "400", "--answers", "300", "--train.steps", "20", "--train.batch-size", "32"),
    *("--size.hidden-size", "16", "--size.layers", "1", "--size.heads", "2", "--size.ff-size", "24"),
)
SMALL = (
    *("--model.warm-start.scratch.hidden-size", "16", "--model.warm-start.scratch.layers", "1"),
    *("--model.warm-start.scratch.heads", "2", "--model.warm-start.scratch.ff-size", "24"),
    *("--model.warm-start.sft.steps", "40", "--model.warm-start.sft.batch-size", "32", "--task.evaluated", "8"),
)
RUN = (
    *("--runtime", "inline", "--steps", "3", "--sync-every", "1", "--replay.pacing.warm-up", "0"),
    *("--group-size", "8", "--samples-per-prompt", "8", "--task.count", "2", "--record.samples-every", "1"),
    *(
        "--evaluation.every",
        "0",
    ),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("red") / "world"
    assert main(["red-team", "world", "--out", str(out), *WORLD]) == 0
    return out


def of(world: Path) -> list[str]:
    return [
        *("--task.attacks", str(world / "attacks.jsonl"), "--task.victim.path", str(world / "victim")),
        *("--task.classifier.path", str(world / "classifier")),
    ]


def test_a_run_leaves_no_text_of_an_attack_and_is_measured_with_intervals(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    families = json.loads((world / "families.json").read_text())
    assert len(families) == 20
    start = ["train", "red_team_small", "--runs", str(tmp_path), "--run-name", "r", *of(world), *SMALL, *RUN]
    assert main(start) == 0
    run, said = tmp_path / "r", capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    assert [(e["metric"], e["n"]) for e in summary["evaluations"]] == [("pass@1/sampled", 8)] * 2
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert samples
    assert all({"toxic", "success"} == set(s["reward_parts"]) and s["reward"] <= 0 for s in samples)
    texts = [said, *((run / name).read_text() for name in ("samples.jsonl", "metrics.jsonl", "evaluations.jsonl"))]
    texts += [log.read_text() for log in (run / "logs").iterdir()]
    said_words = (*MARKERS, "kettle", "violin", "teapot", "bicycle", "photograph", "how would you")
    assert not [word for word in said_words if any(word in text for text in texts)]
    answers = run / "answers.jsonl"
    assert not answers.exists() or not answers.read_text()

    embedder = tmp_path / "embedder"
    tokenizer = train_bpe_tokenizer(THINGS, 300)
    ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=24).start(tokenizer).save_pretrained(embedder)
    tokenizer.save_pretrained(embedder)
    found = tmp_path / "found.json"
    measure = [
        *("red-team", "eval", "red_team_small", "--checkpoint", str(run), "--attacks", "24", "--task.count", "2"),
        *("--families", str(world / "families.json"), "--embedder", str(embedder), "--out", str(found)),
        *("--transfer", str(world / "victim"), "--check", str(world / "classifier"), *of(world)),
    ]
    assert main(measure) == 0
    said = capsys.readouterr().out
    assert "weak spots found" in said
    assert "transferred to" in said
    facts = json.loads(found.read_text())
    assert (facts["attacks"], len(facts["scores"]), len(facts["families"])) == (24, 24, 20)
    assert facts["success"]["low"] <= facts["success"]["estimate"] <= facts["success"]["high"]
    assert 0 <= facts["distance"]["estimate"] <= 2
    assert facts["transfer"]["success"] == facts["success"]  # the same victim gives the same answers
    assert facts["check"]["scores"] == facts["scores"]  # the same classifier finds the same in them
    assert facts["both"]["success"] == facts["success"]
    assert "texts" not in facts
    script("lab/benchmarks/red_team_plane.py").plot([found], tmp_path / "plane.png")
    assert (tmp_path / "plane.png").stat().st_size > 5000


def test_a_classifier_is_made_of_a_csv_file_and_measured_on_held_out_texts(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in (world / "labelled.jsonl").read_text().splitlines()]
    file = tmp_path / "labelled.csv"
    file.write_text("".join(f'"{row["text"]}",{row["label"]}\n' for row in [*rows, rows[0]]) + ",1\n")
    out = tmp_path / "classifier"
    command = ["red-team", "classifier", str(file), "--out", str(out), "--fields.text", "0", "--fields.label", "1"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert f"{len(rows)} texts, {len(rows) // 2} of them toxic" in said
    assert "refused: no text, 1" in said
    assert "refused: a text that was there before, 1" in said
    facts = json.loads((out / "classifier.json").read_text())
    assert facts["held_out"]["auc"]["estimate"] > 0.99
    assert facts["held_out"]["texts"] + 1 < len(rows)
    assert main(command) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_world_can_say_the_texts_of_a_labelled_file(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "other"
    labelled = ("--labelled", str(world / "labelled.jsonl"), "--longest", "200")
    assert main(["red-team", "world", "--out", str(out), *labelled, *WORLD]) == 0
    assert not (out / "labelled.jsonl").exists()
    assert (out / "victim" / "model.safetensors").is_file()


def test_what_is_missing_is_said_in_one_sentence(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("[1]")
    for arguments, said in (
        (["red-team"], "use one of world, classifier, eval"),
        (["red-team", "world"], "needs --out"),
        (["red-team", "classifier", "--out", "x"], "a file of labelled texts"),
        (["red-team", "classifier", str(tmp_path / "none.csv"), "--out", str(tmp_path / "o")], "cannot be read"),
        (["red-team", "classifier", str(world / "labelled.jsonl"), "--out", str(tmp_path / "o"), "--fields.label", "x"],
         "has no labelled text"),
        (["red-team", "eval", "quickstart"], "is not for red-teaming"),
        (["red-team", "eval", "red_team_small", "--families", str(bad)], "a JSON object of names and lists"),
        (["red-team", "eval", "red_team_small", "--attacks", "1"], "at least 3"),
        (["train", "red_team_small", "--task.attacks", str(tmp_path / "none.jsonl")], "make a small world with"),
    ):  # fmt: skip
        assert main(arguments) == 2, arguments
        assert said in capsys.readouterr().err
