"""The processes runtime, with real processes: where it leads, what it survives, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.runtime.runs import (
    SECONDS,
    TOY,
    alive,
    children,
    distance,
    final_weights,
    forkserver_of,
    made,
    processes,
    quiet,
    steps_of,
    train,
    until,
)

from tba.__main__ import main
from tba.errors import DeadlineExceeded, PartFailed, UserError
from tba.record.evaluations import read_evaluations
from tba.record.metrics import read_metrics
from tba.record.run_record import RunRecord
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.runtime.local.processes import Processes
from tba.types import Version


@dataclass(frozen=True)
class Finished:
    """A run that has ended, and its summary."""

    path: Path
    summary: Summary


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """300 steps on uniformly random answers, two searchers, weights sent up every 20 steps."""
    path = tmp_path_factory.mktemp("oracle") / "run"
    overrides = (
        *("--objective.beta.value", "0.25", "--optimizer.lr", "0.1", "--optimizer.schedule.steps", "300"),
        *("--steps", "300", "--sync-every", "20", "--groups-per-step", "4", "--group-size", "16"),
        *("--samples-per-prompt", "32", "--exploration.temperature", "1e6", "--searchers", "2"),
        *(
            "--evaluation.every",
            "100",
            "--evaluation.problems",
            "1",
            "--record.hide-text",
            "--run.checkpoint-every",
            "200",
        ),
    )
    return Finished(path, processes(path, *overrides))


def test_it_reaches_the_ideal_policy_of_the_toy_from_random_answers_of_two_searchers(oracle: Finished) -> None:
    assert distance(oracle.path, 0.25) <= 0.02
    assert oracle.summary.lag.mean >= 10
    with JournalFollower(oracle.path / "journal.sqlite") as journal:
        makers = Counter(t.provenance["searcher"] for t in journal.drain())
    assert set(makers) == {"searcher-0", "searcher-1"}
    counts = oracle.summary.trajectories
    assert makers.total() == counts.generated - counts.in_flight_at_stop


def test_every_token_and_trajectory_is_accounted_for(oracle: Finished) -> None:
    for ledger in (oracle.summary.tokens, oracle.summary.trajectories):
        assert ledger.closes(), ledger
    assert oracle.summary.trajectories.trained_total == 300 * 4 * 16
    assert oracle.summary.trajectories.evaluation == 2 * 4  # greedy and sampled, at 4 versions
    assert oracle.summary.faults["searcher_restarts"] == 0


def test_each_version_asked_for_is_evaluated_exactly_once_by_one_of_the_two(oracle: Finished) -> None:
    versions = [e.version for e in read_evaluations(oracle.path) if e.metric == "pass@1/greedy"]
    assert sorted(versions) == [Version(0, step) for step in (0, 100, 200, 300)]
    with JournalFollower(oracle.path / "journal.sqlite") as journal:
        assert all(journal.job_done(f"evaluate {version}") for version in versions)


def test_a_run_leaves_its_last_checkpoints_and_weights_and_a_log_of_every_part(oracle: Finished) -> None:
    assert {p.name for p in (oracle.path / "checkpoints").iterdir()} == {"step-200", "step-300"}
    assert {p.name for p in (oracle.path / "weights").glob("*.safetensors")} >= {"0.300.safetensors"}
    for part in ("trainer", "searcher-0", "searcher-1"):
        assert f"{part} starts as process" in (oracle.path / "logs" / f"{part}.log").read_text()
        assert oracle.summary.peak_memory_bytes[part] > 0


def test_hidden_text_stays_hidden(oracle: Finished) -> None:
    assert RunRecord.read(oracle.path).answers == []
    logs = "".join(p.read_text() for p in (oracle.path / "logs").glob("*.log"))
    assert not re.search(r"\b[A-D]{2,3}\b", logs)


def test_a_searcher_that_is_killed_is_started_again_and_ctrl_c_ends_the_run_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run"
    driver = train(path, "--steps", "1000000", "--evaluation.problems", "1")
    try:
        until(lambda: steps_of(path) > 20, SECONDS, "the first steps")
        parts = children(driver.pid)
        os.kill(parts["searcher-0"], signal.SIGKILL)
        again = until(
            lambda: (now := children(driver.pid)).get("searcher-0") not in (None, parts["searcher-0"]) and now,
            SECONDS,
            "a new searcher",
        )
        assert again["trainer"] == parts["trainer"]
        log = path / "logs" / "searcher-0.log"
        until(lambda: log.read_text().count("starts as process") == 2, SECONDS, "the new searcher's start")
        done = steps_of(path)
        until(lambda: steps_of(path) > done, SECONDS, "more steps")
        driver.send_signal(signal.SIGINT)
        output, errors = driver.communicate(timeout=SECONDS)
    finally:
        driver.kill()
    assert driver.returncode == 130, errors
    assert errors == ""
    assert not [pid for pid in again.values() if alive(pid)]
    summary = Summary.read(path)
    assert summary is not None
    assert summary.faults["searcher_restarts"] == 1
    assert summary.faults["stopped"] is True
    assert summary.steps == steps_of(path)
    assert final_weights(path)
    assert summary.tokens.closes(), summary.tokens
    assert summary.trajectories.closes(), summary.trajectories
    assert "the run was stopped before its last step" in output


def test_when_the_driver_is_killed_no_process_stays_behind(tmp_path: Path) -> None:
    path = tmp_path / "run"
    driver = train(path, "--steps", "1000000", "--evaluation.problems", "1")
    try:
        until(lambda: steps_of(path) > 5, SECONDS, "the first steps")
        parts = children(driver.pid)
        assert set(parts) == {"trainer", "searcher-0"}
    finally:
        driver.kill()
        driver.communicate(timeout=SECONDS)
    until(lambda: not [pid for pid in parts.values() if alive(pid)], 15.0, f"{parts} to end")


def test_when_the_forkserver_is_killed_the_parts_are_started_again_from_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run"
    driver = train(path, "--steps", "1000000", "--evaluation.problems", "1", "--run.checkpoint-every", "5")
    try:
        until(lambda: steps_of(path) > 10, SECONDS, "the first checkpoint")
        os.kill(forkserver_of(driver.pid), signal.SIGKILL)
        until(lambda: any(row["version"].startswith("1.") for row in read_metrics(path)), SECONDS, "steps again")
        driver.send_signal(signal.SIGTERM)
        _, errors = driver.communicate(timeout=SECONDS)
    finally:
        driver.kill()
    assert (driver.returncode, errors) == (143, "")
    summary = Summary.read(path)
    assert summary is not None
    assert (summary.faults["trainer_restarts"], summary.faults["searcher_restarts"]) == (1, 1)
    assert summary.tokens.closes(), summary.tokens
    assert summary.trajectories.closes(), summary.trajectories


def test_a_reward_that_raises_ends_the_run_with_the_searchers_own_traceback_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = str(Path(__file__).parents[1] / "broken_reward.py")
    assert main(["train", broken, "--runs", str(tmp_path), "--run-name", "run"]) == 1
    output = capsys.readouterr().err
    first_line = r"tba: searcher-0 \(process \d+\) ended with ZeroDivisionError; its log is .*searcher-0\.log\n"
    assert re.match(first_line, output)
    assert "broken_reward.py" in output
    assert "1.0 / (len(completion.text) - len(completion.text))" in output
    assert "runtime/local/processes.py" not in output
    assert not children(os.getpid())


def test_a_searcher_that_dies_every_time_is_given_up_after_so_many_restarts(tmp_path: Path) -> None:
    broken = Path(__file__).parents[1] / "broken_reward.py"
    with pytest.raises(PartFailed, match=r"searcher-0 \(process \d+\) was killed by signal 9; its log is"):
        processes(tmp_path / "run", "--task.deadly", "--run.restarts", "1", source=broken)
    assert (tmp_path / "run" / "logs" / "searcher-0.log").read_text().count("starts as process") == 2


def test_a_recipe_file_that_changed_is_refused_by_every_part_in_one_sentence(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(TOY.read_text())
    recipe, run = made(tmp_path / "run", source=source)
    source.write_text(TOY.read_text().replace("steps=600", "steps=601"))
    with pytest.raises(UserError, match=r"mine.py has changed since the run at .* began: start a new run$"):
        Processes(recipe, run, quiet).go()
    errors = [json.loads(p.read_text()) for p in (run.path / "logs").glob("*.error.json")]
    assert {error["kind"] for error in errors} == {"UserError"}


def test_a_trainer_that_waits_too_long_is_named_with_its_process_and_its_log(tmp_path: Path) -> None:
    (tmp_path / "hangs").write_text("99")  # a reward that never comes back: nothing arrives
    hangs = ("--task.hangs", str(tmp_path / "hangs"), "--run.idle-deadline", "0.5")
    with pytest.raises(DeadlineExceeded) as error:
        processes(tmp_path / "run", *hangs, source=Path(__file__).parents[1] / "faulty.py")
    assert re.match(
        r"trainer \(process \d+\): the trainer waited 0\.5 s for a batch \(warm_up\).*; its log is .*trainer\.log$",
        str(error.value),
    )
    assert not children(os.getpid())
