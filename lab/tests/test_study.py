"""Studies end to end on the enumerable toy: what is run, what is not run again, what is written."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.runtime.runs import command

from tba import field_names
from tba.__main__ import main as train_main
from tba.errors import UserError
from tba.evaluation.estimators import mean_interval
from tba.fields import fields_of
from tba.recipe import ClusterSettings, Recipe
from tba.recipe_names import recipe_names
from tba.record.run_record import RunRecord
from tba.record.summary import Summary
from tba.runs.recipe_resolution import with_weights
from tba.runtime.run_directory import RunDirectory
from tba.settings import find
from tba_lab import STUDIES, trial_process
from tba_lab.__main__ import main
from tba_lab.command import StudyOptions, run_study
from tba_lab.study import Study, Variant, find_study, positions, varying_field_plots
from tba_lab.trial import Trial

TOY = str(Path(__file__).with_name("toy_study.py"))
SAME = (
    "pass@1/sampled",
    "pass@1/greedy",
    "fall",
    "reward",
    "kl",
    "distinct",
    "pass@4/of4",
    "log_ratio",
    "lag",
    "uses",
    "tokens_trained",
)


class InThisProcess:
    """Runs trials as a child would, here; remembers which, and is stopped after so many."""

    def __init__(self, last: int = 1000) -> None:
        self.ran: list[tuple[str, int]] = []
        self.last = last

    def __call__(self, trial: Trial, stop: Callable[[], bool]) -> int:
        self.ran.append((trial.variant, trial.seed))
        code = trial_process.carry_out(trial.order())
        if len(self.ran) >= self.last:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C while the study is in charge
        return code


def study(out: Path, *fields: str, last: int = 1000, **options: Any) -> tuple[int, list[tuple[str, int]]]:
    """Exit code and what was run."""
    runner = InThisProcess(last)
    code = run_study(TOY, StudyOptions(out=out, **options), fields, runner)
    return code, runner.ran


def figures(out: Path) -> dict[tuple[str, str], dict[str, str]]:
    """table.csv by variant and figure."""
    with (out / "table.csv").open() as file:
        return {(row["variant"], row["figure"]): row for row in csv.DictReader(file)}


def repeatable(out: Path) -> list[tuple[str, ...]]:
    """What of table.csv is the same in every run: all but times and memory."""
    return [tuple(row.values()) for (_, name), row in figures(out).items() if name in SAME]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study, not interrupted."""
    out = tmp_path_factory.mktemp("whole")
    code, ran = study(out, keep="all")
    assert code == 0
    assert ran == [(v, seed) for seed in (0, 1) for v in ("often", "rarely", "broken")]  # seeds in the outer loop
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_study_that_was_stopped_goes_on_and_ends_with_the_table_of_one_that_was_not(
    whole: Path, tmp_path: Path
) -> None:
    assert study(tmp_path, only="often,broken", last=2) == (130, [("often", 0), ("broken", 0)])
    assert figures(tmp_path)["often", "lag"]["n"] == "1"
    assert study(tmp_path, only="often,broken") == (0, [("often", 1), ("broken", 1)])
    assert {p.name for p in (tmp_path / "runs" / "often-0").iterdir()} >= {"checkpoints", "recipe.json"}
    assert not {"weights", "journal.sqlite"} & {p.name for p in (tmp_path / "runs" / "often-0").iterdir()}
    assert repeatable(tmp_path) == [row for row in repeatable(whole) if row[0] != "rarely"]
    assert len(repeatable(whole)) == 2 * len(SAME)


def test_a_run_that_was_cut_off_is_made_anew_and_one_without_its_divergence_is_measured(
    whole: Path, copy: Path
) -> None:
    (copy / "runs" / "often-0" / "summary.json").unlink()
    (copy / "runs" / "often-1" / "divergence.json").unlink()
    (copy / "runs" / "rarely-1" / "diversity.json").unlink()
    assert study(copy) == (0, [("often", 0), ("often", 1), ("rarely", 1)])
    assert repeatable(copy) == repeatable(whole)
    metrics = [(folder / "runs" / "often-1" / "metrics.jsonl").read_bytes() for folder in (whole, copy)]
    assert metrics[0] == metrics[1]  # with its wall-clock: it was not run again


def test_two_runs_at_a_time_end_in_the_same_table(whole: Path, tmp_path: Path) -> None:
    barrier, lock = threading.Barrier(2), threading.Lock()

    def together(trial: Trial, stop: Callable[[], bool]) -> int:
        barrier.wait(60)  # breaks unless another run has begun
        with lock:  # in this process torch has one state for all
            return trial_process.carry_out(trial.order())

    assert run_study(TOY, StudyOptions(out=tmp_path, only="often,rarely", jobs=2), (), together) == 0
    assert repeatable(tmp_path) == [row for row in repeatable(whole) if row[0] != "broken"]


def test_fewer_than_one_run_at_a_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--jobs is 0: give the number of runs at a time"):
        study(tmp_path, jobs=0)


def test_nothing_is_run_twice(whole: Path) -> None:
    assert study(whole) == (0, [])


def test_a_variant_that_diverges_is_a_row_and_its_study_goes_on(whole: Path) -> None:
    page = (whole / "table.md").read_text()
    assert "| broken | 0 | - |" in page
    assert "2 of 2: NonFiniteLoss at step 1" in page
    assert "- broken, seed 1: NonFiniteLoss at step 1: 3 steps in a row" in page
    broken = figures(whole)["broken", ""]
    assert (broken["n"], broken["failed"], broken["runs"]) == ("0", "2", "2")
    record = RunRecord.read(whole / "runs" / "broken-0")
    assert record.summary is None
    assert str(record.failure) == "NonFiniteLoss at step 1"


def test_failed_runs_are_made_again_on_request_only(copy: Path) -> None:
    assert study(copy, again="failed", seeds="1") == (0, [("broken", 1)])


def test_a_table_is_what_the_runs_own_files_say(whole: Path) -> None:
    runs = [whole / "runs" / f"rarely-{seed}" for seed in (0, 1)]
    summaries = [s for run in runs if (s := Summary.read(run))]
    for name, values in {
        "lag": [s.lag.mean for s in summaries],
        "tokens_generated": [s.tokens.generated for s in summaries],
        "uses": [s.trajectories.samples_per_insert for s in summaries],
        "pass@1/greedy": [[e.value for e in s.evaluations if e.metric == "pass@1/greedy"][-1] for s in summaries],
        "kl": [json.loads((run / "divergence.json").read_text())["kl"] for run in runs],
        "seconds": [s.wall_seconds.train for s in summaries],
    }.items():
        row = figures(whole)["rarely", name]
        mean = sum(values) / 2
        assert float(row["mean"]) == pytest.approx(mean)
        assert float(row["spread"]) == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
        interval = mean_interval(values)
        assert (float(row["low"]), float(row["high"])) == pytest.approx((interval.low, interval.high))
        assert row["n"] == "2"


def test_diversity_is_of_the_weights_before_and_after_by_the_same_draws(whole: Path) -> None:
    diversities = [json.loads((whole / "runs" / f"{v}-0" / "diversity.json").read_text()) for v in ("often", "rarely")]
    assert diversities[0]["before"] == diversities[1]["before"]  # both began with the same weights
    for when in ("before", "after"):
        measured = diversities[0][when]
        assert (measured["prompts"], measured["samples"], len(measured["pass_at"])) == (2, 4, 4)
        assert measured["pass_at"] == sorted(measured["pass_at"])
        assert measured["pass_at"][3] <= measured["distinct"] <= 4
    assert float(figures(whole)["often", "distinct_before"]["mean"]) == pytest.approx(
        sum(
            json.loads((whole / "runs" / f"often-{s}" / "diversity.json").read_text())["before"]["distinct"]
            for s in (0, 1)
        )
        / 2
    )


def test_every_run_is_an_ordinary_one_with_its_settings_in_its_folder(whole: Path) -> None:
    facts = json.loads((whole / "runs" / "rarely-1" / "recipe.json").read_text())
    assert facts["recipe"] == f"{TOY}::rarely"
    assert facts["overrides"] == ["--seed", "1"]
    assert (facts["resolved"]["seed"], facts["resolved"]["sync_every"]) == (1, 3)
    assert find(f"{TOY}::rarely").sync_every == 3
    with (whole / "runs.csv").open() as file:
        assert [(r["variant"], r["seed"]) for r in csv.DictReader(file)] == [
            (v, s) for v in ("often", "rarely", "broken") for s in "01"
        ]


def test_a_run_whose_process_was_killed_or_said_nothing_is_a_row_too(tmp_path: Path) -> None:
    codes = iter((-9, 1))

    def killed(trial: Trial, stop: Callable[[], bool]) -> int:
        trial_process.carry_out(trial.order())
        (trial.path / "summary.json").unlink()
        return next(codes)

    assert run_study(TOY, StudyOptions(out=tmp_path, only="rarely"), (), killed) == 0
    page = (tmp_path / "table.md").read_text()
    assert "- rarely, seed 0: killed by signal 9 at step 6" in page
    assert f"- rarely, seed 1: it said nothing in {tmp_path}" in page
    assert "| rarely | 0 |" in page


def test_studies_lists_each_study_with_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["studies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names(STUDIES)
    known = {"staleness", "ablations", "selection", "frontier", "sizes", "noise", "correction"}
    assert known <= set(recipe_names(STUDIES))


def test_plots_are_drawn_of_what_varies(whole: Path) -> None:
    names_of_plots = {path.name for path in whole.glob("*.png")}
    assert names_of_plots == {
        "over-time.png",
        "frontier.png",
        "pass@1-sampled-against-sync_every.png",
        "pass@1-sampled-against-optimizer.lr.png",
        "pass-at-k.png",
        "diversity.png",
    }
    for path in whole.glob("*.png"):
        with Image.open(path) as image:
            assert image.size[0] > 500


def test_what_a_run_finds_when_it_begins_and_what_has_no_effect_make_it_no_other_recipe(tmp_path: Path) -> None:
    recipe, overrides = with_weights(find("quickstart"), [], lambda line: None)
    assert "--model.dtype" in overrides
    run_recipe = replace(recipe, cluster=ClusterSettings(searcher_gpus=0.0))  # as was the default once
    RunDirectory.create(tmp_path / "run", "quickstart", overrides, run_recipe)
    trial = Trial(find_study(TOY), "often", 0, "quickstart", (), find("quickstart"), tmp_path / "run")
    assert trial.difference() is None
    assert replace(trial, recipe=replace(trial.recipe, seed=7)).difference() == "seed was 0 and is 7"


def test_a_changed_recipe_is_refused_in_one_sentence_and_made_anew_on_request(copy: Path) -> None:
    with pytest.raises(UserError, match=r"often-0 is of another recipe \(steps was 6 and is 4\): give --again changed"):
        study(copy, "--steps", "4")
    assert study(copy, "--steps", "4", only="often", seeds="0", again="changed") == (0, [("often", 0)])
    summary = Summary.read(copy / "runs" / "often-0")
    assert summary is not None
    assert summary.steps == 4
    assert {variant for variant, _ in figures(copy)} == {"often"}  # the others are of another recipe now


def test_seeds_that_are_there_stay_in_the_table(copy: Path) -> None:
    assert study(copy, only="rarely", seeds="7") == (0, [("rarely", 7)])
    assert study(copy, only="rarely", seeds="0") == (0, [])
    assert figures(copy)["rarely", "lag"]["n"] == "3"


def test_ctrl_c_ends_the_run_in_its_own_process_where_it_is_whole(tmp_path: Path) -> None:
    options = ("--only", "often", "--seeds", "5", "--steps", "1000000")
    child = command("study", TOY, "--out", str(tmp_path), *options, program=main)
    try:
        metrics = tmp_path / "runs" / "often-5" / "metrics.jsonl"
        pause = threading.Event()
        while child.poll() is None and not (metrics.exists() and metrics.stat().st_size):  # a step is in it
            pause.wait(0.05)
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate(timeout=120)
    finally:
        child.kill()
    assert (child.returncode, errors) == (130, "")
    assert "the same command continues from here" in " ".join(output.split())
    summary = Summary.read(tmp_path / "runs" / "often-5")
    assert summary is not None
    assert summary.faults["stopped"] is True
    assert "summary.json" in (tmp_path / "logs" / "often-5.log").read_text()
    assert not (tmp_path / "table.md").exists()


def quick() -> Recipe:
    return find_study(TOY).recipe


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"variants": {}}, "study it has no variants: give at least one"),
        ({"variants": {"a b": ()}}, "study it has a variant 'a b': use letters"),
        ({"baseline": "b"}, "study it has baseline 'b', but no variant 'b'"),
        ({"seeds": (1, 1)}, "study it has seeds 1, 1: give different ones"),
        ({"columns": ("speed",)}, "study it has no column 'speed': use some of pass@1/sampled"),
        ({"name": "a/b"}, "a study is named 'a/b'"),
    ],
)
def test_a_study_that_does_not_fit_together_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Study(**{"name": "it", "recipe": quick(), "variants": {"a": ()}, **changes})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["study"], "`tba-lab study STUDY` needs a study's name"),
        (["study", "nothing"], "there is no study 'nothing'; give one of"),
        (["study", TOY, "--only", "of*,x"], "study toy-study has no variant 'x': it has often, rarely, broken"),
        (["study", TOY, "--seeds", "0,a"], "--seeds is '0,a': give integers with commas between"),
        (["study", TOY, "--seed", "1"], "tba-lab study takes --seeds, as 0,1,2, and not --seed"),
        (["study", TOY, "--stepss", "1"], "has no field --stepss; did you mean --steps"),
        (["train", f"{TOY}::offten"], "study toy-study has no variant 'offten': did you mean 'often'"),
    ],
)
def test_what_cannot_be_asked_ends_in_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (train_main if arguments[0] == "train" else main)(arguments) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_where_a_variant_stands_is_its_recipes_field_or_what_was_measured() -> None:
    recipes = {"a": quick(), "b": replace(quick(), sync_every=9)}
    assert positions("sync_every", recipes, []) == {"a": 5.0, "b": 9.0}
    assert positions("objective.beta.value", recipes, []) == {"a": 0.5, "b": 0.5}
    assert positions("objective.clip", recipes, []) == {}
    assert [against.x for against in varying_field_plots(recipes)] == ["sync_every"]


@pytest.mark.parametrize("name", recipe_names(STUDIES))
def test_every_variant_of_every_shipped_study_is_a_recipe_that_can_run(name: str) -> None:
    from tba.runs.validating import validate

    shipped = find_study(name)
    assert shipped.name == name
    assert shipped.description
    assert len(shipped.seeds) >= (1 if "tuning" in name else 3)  # a choice, or a comparison
    resolved = [shipped.recipe_of(variant) for variant in shipped.variants]
    last = list(shipped.variants)[-1]
    assert find(f"{STUDIES / name}.py::{last}").name == resolved[-1].name
    for recipe in resolved:
        validate(recipe)
    unnamed = [replace(recipe, name="") for recipe in resolved]
    assert all(unnamed[i] != unnamed[j] for i in range(len(unnamed)) for j in range(i))
    assert all(isinstance(v, Variant) for v in shipped.variants.values())


def test_a_mistyped_field_is_refused_before_anything_heavy_is_loaded() -> None:
    """Of a study, and of one of its variants for `tba train`; each field of a recipe or of the command may be one."""
    program = (
        "import sys; from importlib import import_module; code = import_module(sys.argv[1]).main(sys.argv[2:]); "
        "sys.exit(99 if {'torch', 'transformers', 'datasets'} & sys.modules.keys() else code)"
    )
    for module, called, words in (
        ("tba_lab.__main__", "tba-lab", "study stability"),
        ("tba.__main__", "tba", f"train {STUDIES / 'stability.py'}::tb-k10"),
    ):
        arguments = [*words.split(), "--stepz", "3", "--seed", "1", "--no-offlin", "--task.unknown", "1"]
        ended = subprocess.run(
            [sys.executable, "-c", program, module, *arguments], capture_output=True, text=True, check=False
        )
        sentence = "has no field --stepz; did you mean --steps? And no field --no-offlin; did you mean --offline?"
        assert (ended.stderr, ended.returncode) == (f"{called}: {called} {words} {sentence}\n", 2)
    names = field_names.of_any_recipe()
    for flag in (field.flag for field in fields_of(find("quickstart"), by_code=True)):
        assert field_names.has(names, flag)
