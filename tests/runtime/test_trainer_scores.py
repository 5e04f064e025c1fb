"""The trainer scores answers under the reference as a searcher does, each once, whatever kills it."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import SECONDS, children, inline, inline_again, made, quiet, steps_of, until

from tba.errors import UserError
from tba.recipe import Recipe
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.runtime.local.processes import Processes
from tba.runtime.needs import needs, with_trainer_scores
from tba.runtime.reference import PIN_REASON
from tba.runtime.reporting import summarise
from tba.runtime.run_directory import RunDirectory
from tba.runtime.teaching import reference_model_of
from tba.runtime.trainer_scores import OWNER
from tba.types import ELSEWHERE, Version
from tba.weights.directory import WeightDirectory

SUMS = Path(__file__).parents[1] / "tiny_sums.py"
BY_TRAINER = ("--reference-scorer", "trainer")
LORA = ("--model.lora.rank", "2", "--optimizer.lr", "0.05")


def require_equal_scores(path: Path, recipe: Recipe) -> None:
    """Each answer of the run has one score, that of the model that a searcher would have loaded."""
    model = recipe.model.prepared(recipe.task)
    reference = reference_model_of(recipe, model).reference(recipe.policy_temperature, Version())
    with JournalFollower(path / "journal.sqlite", create=False) as journal:
        trajectories = {trajectory.uid: trajectory for trajectory in journal.drain()}
        scores = journal.drain_scores()
        counts = journal.counters()
    assert {trajectory.reference for trajectory in trajectories.values()} == {ELSEWHERE}
    assert len({score.uid for score in scores}) == len(scores) > 20
    assert counts[OWNER]["rescored_trajectories"] == len(scores)
    for score in scores:
        trajectory = trajectories[score.uid]
        ((expected_scores,),) = reference.log_probabilities_of([(trajectory.prompt, [trajectory.completion])])
        assert np.abs(score.log_reference - expected_scores).max() < 1e-5
        assert np.abs(expected_scores).max() > 0.1
    with closing(sqlite3.connect(path / "journal.sqlite")) as connection:
        unscored_uids = {uid for (uid,) in connection.execute("SELECT uid FROM unscored JOIN trajectories USING (seq)")}
    assert not unscored_uids & {score.uid for score in scores}


@pytest.mark.parametrize("adapters", [(), LORA], ids=["all weights", "lora"])
def test_one_rank_scores_as_searchers_do_and_a_resumed_run_scores_nothing_again(
    tmp_path: Path, adapters: tuple[str, ...]
) -> None:
    path = tmp_path / "run"
    summary = inline(path, *BY_TRAINER, *adapters, "--runtime", "inline", "--steps", "6", source=SUMS)
    assert summary.trajectories.closes()
    assert summary.trajectories.trained_total > 0
    exit_code = inline_again(path, "--steps", "10")
    assert (exit_code.steps, exit_code.trajectories.closes()) == (10, True)
    require_equal_scores(path, RunDirectory.open(path).recipe())


@pytest.mark.parametrize("adapters", [(), LORA], ids=["all weights", "lora"])
def test_two_ranks_score_as_searchers_do_and_a_killed_one_loses_and_repeats_nothing(
    tmp_path: Path, adapters: tuple[str, ...]
) -> None:
    path = tmp_path / "run"
    two_ranks = ("--runtime", "processes", "--trainer.ranks", "2", "--run.checkpoint-every", "2", "--steps", "12")
    recipe, run = made(path, *BY_TRAINER, *adapters, *two_ranks, source=SUMS)
    recipe.model.prepared(recipe.task)

    def kill_one() -> None:
        until(lambda: steps_of(path) >= 4, SECONDS, "the first steps")
        os.kill(children(os.getpid())["trainer-1"], signal.SIGKILL)

    murder = threading.Thread(target=kill_one)
    murder.start()
    driver = Processes(recipe, run, quiet)
    faults = driver.go()
    murder.join()
    summary: Summary = summarise(recipe, run, driver.searchers, faults, 0.0)
    assert (summary.steps, summary.faults["trainer_restarts"]) == (12, 1)
    assert summary.trajectories.closes()
    require_equal_scores(path, recipe)


def test_a_trainer_that_scores_needs_its_part_of_the_reference_and_searchers_none(tmp_path: Path) -> None:
    recipe, _ = made(tmp_path / "run", "--trainer.ranks", "2", "--runtime", "processes", source=SUMS)
    recipe = replace(recipe, model=recipe.model.prepared(recipe.task))
    by_trainer = with_trainer_scores(recipe)
    assert by_trainer is not None
    assert with_trainer_scores(by_trainer) is None
    searcher_needs, trainer_needs = ({need.part: need for need in needs(r)} for r in (recipe, by_trainer))
    assert set(searcher_needs) - set(trainer_needs) == {"reference"}
    rows = searcher_needs["reference"].parts["weights"] // 2
    assert trainer_needs["trainer"].total == searcher_needs["trainer"].total + rows
    assert trainer_needs["searcher"] == searcher_needs["searcher"]


def test_a_reference_that_changes_cannot_be_scored_by_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is the base, which no reset changes"):
        made(tmp_path / "run", *BY_TRAINER, *LORA, "--reference-reset", "10", source=SUMS)


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_after_a_reset_answers_are_scored_by_the_policy_of_that_step_also_in_a_resumed_run(
    tmp_path: Path, ranks: str
) -> None:
    path = tmp_path / "run"
    resets = ("--reference-reset", "3", "--optimizer.lr", "0.02", "--run.checkpoint-every", "4", "--sync-every", "1")
    recipe, run = made(
        path, *BY_TRAINER, *resets, "--runtime", "processes", "--trainer.ranks", ranks, "--steps", "8", source=SUMS
    )
    driver = Processes(recipe, run, quiet)
    first_summary = summarise(recipe, run, driver.searchers, driver.go(), 0.0)
    assert first_summary.trajectories.closes()
    run.begin_again("resumed", ["--steps", "14"])
    driver = Processes(run.recipe(), run, quiet)
    second_summary = summarise(run.recipe(), run, driver.searchers, driver.go(), 0.0)
    assert (second_summary.steps, second_summary.trajectories.closes()) == (14, True)
    weights = WeightDirectory(run.weights)
    pinned_versions = [v for v in weights.versions() if PIN_REASON in weights.pins(v)]
    model = recipe.model.prepared(recipe.task)
    with JournalFollower(path / "journal.sqlite", create=False) as journal:
        trajectories, scores = {trajectory.uid: trajectory for trajectory in journal.drain()}, journal.drain_scores()
    score_count = 0
    for version in pinned_versions:
        reference = model.reference(recipe.policy_temperature, Version())
        reference.load(weights.at(version).read(), version)
        for score in (s for s in scores if s.reference == version):
            trajectory = trajectories[score.uid]
            ((expected_scores,),) = reference.log_probabilities_of([(trajectory.prompt, [trajectory.completion])])
            assert np.abs(score.log_reference - expected_scores).max() < 1e-5
            score_count += 1
    assert len(pinned_versions) >= 2
    assert score_count > 20
    assert len({(s.uid, s.reference) for s in scores}) == len(scores)
