"""Kill -9 in the middle of episodes: nothing acknowledged is lost, and the account closes, observations apart."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.environments.test_hosts import processes_of
from tests.runtime.runs import children, command, steps_of, until

from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.runtime.run_directory import RunDirectory

TOY = Path(__file__).with_name("turning_toy.py")
SECONDS = 120.0
FOR_LONG = ("--steps", "1000000", "--optimizer.schedule.steps", "1000000", "--replay.pacing.samples-per-insert", "4")


def uids_of(path: Path) -> list[str]:
    with JournalFollower(RunDirectory.open(path).journal_to_read()) as journal:
        return [t.uid for t in journal.drain(1_000_000)]


def test_a_run_outlives_its_environments_its_searcher_and_its_trainer(tmp_path: Path) -> None:
    path = tmp_path / "run"
    named = ("--runs", str(tmp_path), "--run-name", "run")
    driver = command("train", str(TOY), *named, *FOR_LONG, "--run.checkpoint-every", "20")
    try:
        for victim in ("an environment", "a nursery", "searcher-0", "trainer"):
            wanted = steps_of(path) + 25
            until(lambda wanted=wanted: steps_of(path) > wanted or driver.poll() is not None, SECONDS, "steps")
            assert driver.returncode is None, (victim, driver.communicate(1.0)[1][-2000:])
            there = uids_of(path)
            parts = until(
                lambda: p if {"searcher-0", "trainer"} <= (p := children(driver.pid)).keys() else None, SECONDS, "parts"
            )
            worlds = until(lambda: processes_of(parts["searcher-0"])[1:], SECONDS, "episodes")  # noqa: B023
            nursery = processes_of(parts["searcher-0"])[0]
            pid = {"an environment": worlds[0], "a nursery": nursery}.get(victim) or parts[victim]
            os.kill(pid, signal.SIGKILL)
            if victim in parts:
                until(lambda: children(driver.pid).get(victim) not in (None, pid), SECONDS, victim)  # noqa: B023
        wanted = steps_of(path) + 10
        until(lambda: steps_of(path) > wanted, SECONDS, "steps after the last kill")
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=SECONDS)
    finally:
        driver.kill()
    assert (driver.returncode, errors) == (130, "")
    assert uids_of(path)[: len(there)] == there
    summary = Summary.read(path)
    assert summary is not None
    assert summary.tokens.closes(), summary.tokens
    assert summary.trajectories.closes(), summary.trajectories
    assert 0 < summary.tokens.observed < summary.tokens.generated
    assert summary.trajectories.failed == summary.trajectories.rejected >= 1
    assert (summary.faults["searcher_restarts"], summary.faults["trainer_restarts"]) == (1, 1)
