"""Whole runs behind rewards that wait, hang or use signals: nothing waits, nothing that was graded is lost."""

from __future__ import annotations

from pathlib import Path

from runs import inline, made

from tba.record.faults import count_faults
from tba.replay.follower import JournalFollower
from tba.runtime.run_directory import RunDirectory
from tba.types import Trajectory

ALARMED = Path(__file__).with_name("alarmed_reward.py")
SHORT = ("--steps", "3", "--evaluation.problems", "2")


def trajectories(path: Path) -> list[Trajectory]:
    run = RunDirectory.open(path)
    with JournalFollower(run.journal(run.recipe())) as follower:
        return follower.drain()


def test_a_reward_that_uses_signals_grades_in_a_run_as_it_does_in_a_main_thread(tmp_path: Path) -> None:
    summary = inline(tmp_path / "run", *SHORT, source=ALARMED)
    rows = trajectories(tmp_path / "run")
    assert rows
    assert all(t.reward == 1.0 + len(t.completion.text) / 10 for t in rows)
    assert summary.trajectories.closes
    assert count_faults(tmp_path / "run")["reward_retries"] >= 1  # what says that it moved


def test_a_warm_up_is_never_longer_than_what_the_run_trains(tmp_path: Path) -> None:
    recipe, _ = made(tmp_path / "run", *SHORT, "--replay.pacing.warm-up", "1000000")
    assert recipe.warm_up == 3 * recipe.groups_per_step * recipe.group_size
    summary = inline(tmp_path / "again", *SHORT, "--replay.pacing.warm-up", "1000000")
    assert summary.steps == 3
