"""Imports into runs that go on, have ended or not begun; and learning from what was imported alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TASK, TOY, final_weights, inline, made, quiet

from tba.__main__ import main
from tba.command.importing import import_files
from tba.command.options import ImportOptions
from tba.errors import UserError
from tba.recipe import Recipe, RuntimeSettings
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.runs.importing import import_answers
from tba.runtime.importing import adopt_imports, importer_of, is_prepared
from tba.runtime.inline import Inline
from tba.runtime.local.processes import Processes
from tba.runtime.reporting import summarise
from tba.runtime.run_directory import RunDirectory
from tba.types import Trajectory, Version
from toy.policy import WEIGHT, TabularPolicy, TabularTokenizer, distribution, ideal, total_variation

BETA = 0.25
OFFLINE = (
    *("--offline", "--evaluation.problems", "1", "--replay.pacing.warm-up", "0"),
    *("--objective.beta.value", str(BETA)),
)
SMALL = ("--steps", "20", "--samples-per-prompt", "8", "--replay.pacing.warm-up", "16", "--evaluation.problems", "1")


def every_answer() -> list[dict[str, Any]]:
    """Each outcome of both training prompts once: as uniform, and as far from any policy, as data can be."""
    tokenizer = TabularTokenizer(TASK.symbols)
    lines = []
    for problem in TASK.problems("train"):
        for outcome in range(1, TASK.outcomes):  # all but the empty answer, which is no line
            text = tokenizer.decode(TASK.tokens(outcome), skip_special_tokens=True)
            cut = {"stop_reason": "length"} if outcome >= TASK.nodes else {}
            lines.append({"prompt": problem.prompt, "response": text, **cut})
    return lines


def written(path: Path, lines: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def imported(recipe: Recipe, run: RunDirectory, *files: Path) -> None:
    import_answers(recipe, run, files, lambda line: None)


def offline(path: Path, runtime: type[Inline] | type[Processes], lines: list[Any], *flags: str) -> Summary:
    recipe, run = made(path, *OFFLINE, *flags)
    imported(recipe, run, written(path.parent / "lines.jsonl", lines))
    driver = runtime(recipe, run, quiet)
    return summarise(recipe, run, driver.searchers, driver.go(), 0.0)


def trajectories(run: Path) -> list[Trajectory]:
    with JournalFollower(run / "journal.sqlite") as journal:
        return journal.drain()


def closes(summary: Summary) -> bool:
    return summary.tokens.closes() and summary.trajectories.closes()


def shares(probability_QO: torch.Tensor) -> torch.Tensor:
    """Of the training prompts' answers, without the empty one."""
    named = probability_QO[: TASK.prompts, 1:]
    return named / named.sum(1, keepdim=True)


def test_from_imported_answers_alone_their_shares_become_those_of_the_ideal_policy(tmp_path: Path) -> None:
    """The empty answer, which no line has, keeps whatever share it comes to have: it is outside the support."""
    lines = every_answer()
    long = ("--steps", "200", "--optimizer.lr", "0.1", "--optimizer.schedule.steps", "200", "--group-size", "64")
    summary = offline(tmp_path / "run", Inline, lines, *long, "--replay.pacing.max-mean-uses", "inf")
    policy = TabularPolicy(TASK)
    start, target = shares(distribution(policy)), shares(ideal(TASK, BETA))
    policy.load({WEIGHT: final_weights(tmp_path / "run")[WEIGHT]})
    assert total_variation(start, target).min() > 0.35
    assert total_variation(shares(distribution(policy)), target).max() <= 0.02
    assert summary.trajectories.generated == 0
    assert summary.trajectories.imported == len(lines) == 2 * (TASK.outcomes - 1)
    assert summary.trajectories.trained_once == len(lines)
    assert summary.lag.max == 0  # nothing of it has a lag
    assert closes(summary)
    assert {e.version for e in summary.evaluations} == {Version(0, 0), Version(0, 200)}


def test_processes_learn_offline_too_and_evaluate_before_and_after(tmp_path: Path) -> None:
    few = ("--steps", "30", "--replay.pacing.max-mean-uses", "20", "--searchers", "3")
    summary = offline(tmp_path / "run", Processes, every_answer(), *few)
    assert summary.steps == 30
    assert summary.trajectories.trained_total == 30 * 2 * 16
    assert (summary.trajectories.generated, summary.tokens.generated) == (0, 0)
    assert {e.version for e in summary.evaluations} == {Version(0, 0), Version(0, 30)}
    assert set(summary.peak_memory_bytes) == {"trainer", "searcher-0"}  # one is enough to evaluate
    assert closes(summary)


@pytest.mark.parametrize(
    ("lines", "flags", "sentence"),
    [
        (every_answer(), ("--steps", "100"), r"use each of 168 trajectories 19\.0 times.*--steps to at most 42"),
        (every_answer()[:1], ("--steps", "1"), "of the 1 trajectories that are there no 2 answer the same prompt"),
        (every_answer(), ("--steps", "10", "--replay.pacing.warm-up", "200"), "warm-up is 200: set it to 0"),
        (
            every_answer(),
            ("--steps", "20", "--replay.pacing.samples-per-insert", "1"),
            "samples-per-insert is 1.0, which 20 steps go beyond",
        ),
    ],
)
def test_an_offline_run_that_could_not_end_is_refused_before_its_first_step(
    tmp_path: Path, lines: list[Any], flags: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        offline(tmp_path / "run", Inline, lines, *flags)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_references_cannot_be_reset_without_searchers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--offline there are none"):
        made(tmp_path / "run", *OFFLINE, "--reference-reset", "5")


def test_what_was_imported_is_trained_beside_what_searchers_bring_and_is_never_recent(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run", *SMALL, "--replay.selection.m", "0.5")
    imported(recipe, run, written(tmp_path / "lines.jsonl", every_answer()))
    summary = summarise(recipe, run, ["searcher-0"], Inline(recipe, run, quiet).go(), 0.0)
    assert summary.trajectories.generated > 0
    assert summary.trajectories.imported == 168
    assert summary.trajectories.trained_once + summary.trajectories.waiting + summary.trajectories.duplicate > 168
    assert summary.lag.max <= 20
    assert closes(summary)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row.get("lag_max", 0) <= 20 for row in rows)


def test_with_nothing_but_imported_answers_no_group_is_recent_whatever_m(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run", *OFFLINE, "--steps", "5", "--replay.selection.m", "1")
    imported(recipe, run, written(tmp_path / "lines.jsonl", every_answer()))
    Inline(recipe, run, quiet).go()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["groups_recent"], last["groups_reward"]) == (0, 10)


def test_an_ended_run_takes_imports_under_its_own_reference(tmp_path: Path) -> None:
    inline(tmp_path / "run", *SMALL, "--reference-reset", "10", "--optimizer.lr", "0.2")
    run = RunDirectory.open(tmp_path / "run")
    before = len(trajectories(run.path))
    imported(run.recipe(), run, written(tmp_path / "lines.jsonl", every_answer()[:5]))
    new = trajectories(run.path)[before:]
    assert [t.reference for t in new] == [Version(0, 10)] * 5
    recipe = run.recipe()
    scored = recipe.model.reference(recipe.policy_temperature, Version()).log_probabilities(
        new[0].prompt, [new[0].completion]
    )
    assert abs(scored[0] - new[0].log_reference).max() > 1e-3  # not what the run began with


def test_the_trajectories_of_an_old_run_teach_a_new_one_which_knows_them_as_imported(tmp_path: Path) -> None:
    old = inline(tmp_path / "old", *SMALL)
    recipe, run = made(tmp_path / "new", *OFFLINE, "--steps", "10")
    imported(recipe, run, tmp_path / "old")
    new_rows, old_rows = trajectories(tmp_path / "new"), trajectories(tmp_path / "old")
    assert len(new_rows) == len(old_rows) == old.trajectories.generated
    for new, before in zip(new_rows, old_rows, strict=True):
        assert (new.completion.digest, new.reward, new.prompt.key) == (
            *(before.completion.digest, before.reward),
            before.prompt.key,
        )
        assert new.imported
        assert new.completion.log_behavior is not None
        assert new.provenance["version"] == str(before.version)
    summary = summarise(recipe, run, ["searcher-0"], Inline(recipe, run, quiet).go(), 0.0)
    assert summary.trajectories.imported == old.trajectories.generated
    assert closes(summary)
    with pytest.raises(UserError, match="is the run itself"):
        imported(recipe, run, run.path)


def test_what_tba_replay_exports_can_be_imported(tmp_path: Path) -> None:
    """As lines: the same prompts, tokens and rewards."""
    old = inline(tmp_path / "old", *SMALL)
    lines = tmp_path / "exported.jsonl"
    assert main(["replay", str(tmp_path / "old"), "--export", str(lines)]) == 0
    recipe, run = made(tmp_path / "new", *OFFLINE, "--steps", "10")
    imported(recipe, run, lines)
    new_rows, old_rows = trajectories(tmp_path / "new"), trajectories(tmp_path / "old")
    empty = sum(not t.completion.text for t in old_rows)  # which is no answer to learn from
    assert len(new_rows) + empty == len(old_rows) == old.trajectories.generated
    assert sorted((t.prompt.key, t.completion.digest, t.reward) for t in new_rows) == sorted(
        (t.prompt.key, t.completion.digest, t.reward) for t in old_rows if t.completion.text
    )


def test_what_a_hanging_reward_does_not_grade_is_refused_and_a_repeated_import_adds_it(
    tmp_path: Path,
) -> None:
    hangs, lines = tmp_path / "hangs", written(tmp_path / "lines.jsonl", every_answer())
    hangs.write_text("1")
    recipe, run = made(
        *(tmp_path / "run", "--task.hangs", str(hangs), "--run.reward-deadline", "0.5"),
        source=Path(__file__).with_name("faulty.py"),
    )
    with pytest.raises(UserError, match=r"none of .* could be imported"):
        imported(recipe, run, lines)
    imported(replace(recipe, run=RuntimeSettings()), run, lines)
    assert len(trajectories(run.path)) == len(every_answer())


def test_an_objective_with_a_ratio_refuses_a_file_and_learns_from_an_old_run(tmp_path: Path) -> None:
    inline(tmp_path / "old", *SMALL)
    lines = written(tmp_path / "lines.jsonl", every_answer())
    recipe, run = made(tmp_path / "new", *OFFLINE[:-2], "--steps", "5", source=ratio_toy(tmp_path))
    assert "log_behavior" in recipe.objective.needs
    with pytest.raises(UserError, match="needs the log-probabilities of the policy that sampled an answer"):
        imported(recipe, run, lines)
    imported(recipe, run, tmp_path / "old")
    summary = summarise(recipe, run, ["searcher-0"], Inline(recipe, run, quiet).go(), 0.0)
    assert summary.steps == 5


def ratio_toy(folder: Path) -> Path:
    """The toy with PPO, which needs the behaviour's log-probabilities, as a recipe of its own."""
    path = folder / "ratio_toy.py"
    path.write_text(
        "import runpy\nfrom dataclasses import replace\nfrom tba.objectives.ppo import Ppo\n"
        f"recipe = replace(runpy.run_path({str(TOY)!r})['recipe'], objective=Ppo())\n"
    )
    return path


def test_a_prepared_run_is_begun_with_what_was_imported_under_the_settings_that_made_it(tmp_path: Path) -> None:
    lines = written(tmp_path / "lines.jsonl", every_answer())
    options = ImportOptions(recipe=str(TOY))
    assert import_files(tmp_path / "run", [lines], ["--policy-temperature", "0.9"], options) == 0
    assert is_prepared(tmp_path / "run")
    recipe = RunDirectory.open(tmp_path / "run").recipe()
    assert recipe.policy_temperature == 0.9
    with pytest.raises(UserError, match="prepared with another policy_temperature"):
        adopt_imports(tmp_path / "run", made(tmp_path / "other")[0])
    adopt_imports(tmp_path / "run", recipe)
    run = RunDirectory.create(tmp_path / "run", str(TOY), ["--policy-temperature", "0.9"], recipe)
    assert not is_prepared(run.path)
    assert len(trajectories(run.path)) == 168


def test_a_prepared_run_that_is_resumed_has_begun_and_one_that_took_nothing_in_is_gone(tmp_path: Path) -> None:
    lines = written(tmp_path / "lines.jsonl", every_answer())
    assert import_files(tmp_path / "run", [lines], [], ImportOptions(recipe=str(TOY))) == 0
    RunDirectory.open(tmp_path / "run").begin_again("resumed", seconds_before=1.0)
    assert not is_prepared(tmp_path / "run")  # else the next `tba train` of its name would take it over
    path = tmp_path / "other"
    with pytest.raises(UserError, match="--max-tokens is 0"):
        import_files(path, [lines], [], ImportOptions(recipe=str(TOY), max_tokens=0))
    nothing = written(tmp_path / "nothing.jsonl", [3])
    with pytest.raises(UserError, match=r"none of .* could be imported"):
        import_files(path, [nothing], [], ImportOptions(recipe=str(TOY)))
    assert not (path / "recipe.json").exists()
    assert import_files(path, [lines], [], ImportOptions(recipe=str(TOY))) == 0


def test_a_second_import_at_the_same_time_is_refused(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    with (
        importer_of(recipe, run, False, None),
        pytest.raises(UserError, match=r"another import into .* is in progress"),
        importer_of(recipe, run, False, None),
    ):
        raise AssertionError("it was let in")


def test_an_import_of_which_nothing_can_be_used_is_an_error_that_names_the_reasons(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    with pytest.raises(UserError, match=r"none of .* could be imported"):
        imported(recipe, run, written(tmp_path / "lines.jsonl", [{"prompt": "c", "response": "A"}, 3]))
    (record,) = [json.loads(line) for line in (run.path / "imports.jsonl").read_text().splitlines()]
    assert {reason: rejected["count"] for reason, rejected in record["rejected"].items()} == {
        "its prompt is held out for evaluation": 1,
        "JSON, but no object": 1,
    }
    with pytest.raises(UserError, match=r"there is no .*none.jsonl"):
        imported(recipe, run, tmp_path / "none.jsonl")


def test_a_running_trainer_takes_imports_in(tmp_path: Path) -> None:
    """Between two of a searcher's rounds a file is imported: the run trains on it and its account has it."""
    recipe, run = made(tmp_path / "run", *SMALL, "--replay.selection.m", "0")
    lines = written(tmp_path / "lines.jsonl", every_answer())
    driver = Inline(recipe, run, lambda phase, note: once(phase))
    done: list[str] = []

    def once(phase: str) -> None:
        if phase == "training" and not done:
            done.append(phase)
            imported(recipe, run, lines)

    summary = summarise(recipe, run, ["searcher-0"], driver.go(), 0.0)
    assert summary.trajectories.imported == 168
    assert summary.trajectories.trained_once > 168
    assert closes(summary)
