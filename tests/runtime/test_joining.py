"""Searchers that join a run while it goes on, each in a process of its own, and leave it."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from runs import SECONDS, TASK, Command, children, command, made, steps_of, train, until

from tba.__main__ import main
from tba.command.search import _search
from tba.protocols import Manifest
from tba.record.faults import count_faults
from tba.record.summary import Summary
from tba.record.terminal import terminal
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.runtime.elastic import FIRST_NUMBER, JoinedSearchers, join_run
from tba.runtime.searcher_loop import SearcherLoop, start_searching
from tba.types import Version
from tba.weights.directory import WeightDirectory
from toy.policy import TabularPolicy


def search(path: Path) -> Command:
    """`tba search` in a process of its own."""
    return command("search", "--run", str(path))


def makers(path: Path) -> Counter[str]:
    with JournalFollower(path / "journal.sqlite") as journal:
        return Counter(t.provenance["searcher"] for t in journal.drain())


def test_searchers_join_leave_and_die_while_the_trainer_goes_on_and_all_is_accounted_for(tmp_path: Path) -> None:
    path = tmp_path / "run"
    driver = train(path, "--steps", "1000000", "--evaluation.problems", "1")
    commands: list[Command] = []
    try:
        until(lambda: steps_of(path) > 5, SECONDS, "the first steps")
        trainer = children(driver.pid)["trainer"]
        commands += [search(path) for _ in range(3)]
        names = [f"searcher-{FIRST_NUMBER + i}" for i in range(3)]
        until(lambda: set(names) <= set(makers(path)), SECONDS, "something of all three who joined")
        commands[0].send_signal(signal.SIGINT)
        output, errors = commands[0].communicate(timeout=SECONDS)
        assert (commands[0].returncode, errors) == (130, "")
        assert "rounds: Ctrl-C" in output
        commands[1].kill()
        commands[1].communicate(timeout=SECONDS)
        until(lambda: count_faults(path)["joined_deaths"] == 1, SECONDS, "the driver to see that one died")
        done = steps_of(path)
        until(lambda: steps_of(path) > done, SECONDS, "more steps")
        assert children(driver.pid)["trainer"] == trainer
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=SECONDS)
        assert (driver.returncode, errors) == (130, "")
        output, errors = commands[2].communicate(timeout=SECONDS)
        assert (commands[2].returncode, errors) == (0, "")
        assert "the run ended" in output
    finally:
        for process in (driver, *commands):
            process.kill()
            process.communicate(timeout=SECONDS)
    summary = Summary.read(path)
    assert summary is not None
    assert summary.tokens.closes(), summary.tokens
    assert summary.trajectories.closes(), summary.trajectories
    assert sorted(str(s["how"]) for s in summary.joined) == ["Ctrl-C", "it died", "the run ended"]
    assert sum(makers(path).values()) == summary.trajectories.generated - summary.trajectories.in_flight_at_stop
    for name in names:
        assert f"{name} starts as process" in (path / "logs" / f"{name}.log").read_text()
    assert main(["search", "--run", str(path)]) == 2  # it has ended


def test_when_the_driver_is_killed_who_joined_leaves_too(tmp_path: Path) -> None:
    path = tmp_path / "run"
    driver = train(path, "--steps", "1000000", "--evaluation.problems", "1")
    searcher = None
    try:
        until(lambda: steps_of(path) > 5, SECONDS, "the first steps")
        searcher = search(path)
        until(lambda: f"searcher-{FIRST_NUMBER}" in makers(path), SECONDS, "something of who joined")
        driver.kill()
        driver.communicate(timeout=SECONDS)
        output, errors = searcher.communicate(timeout=SECONDS)
        assert (searcher.returncode, errors) == (0, "")
        assert "the run ended" in output
    finally:
        for process in (driver, searcher):
            if process is not None:
                process.kill()
                process.communicate(timeout=SECONDS)


def test_no_two_who_join_have_the_same_name_and_a_name_is_not_given_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = made(tmp_path / "run")
    with run.hold_lock(0.0):
        with join_run(run, recipe, lambda: False) as a, join_run(run, recipe, lambda: False) as b:
            assert [a.number, b.number] == [FIRST_NUMBER, FIRST_NUMBER + 1]
            assert JoinedSearchers(run).present_names() == [a.name, b.name]
            assert not a.stop()
        with join_run(run, recipe, lambda: True) as c:
            assert c.number == FIRST_NUMBER + 2
            assert c.stop()
        assert JoinedSearchers(run).present_names() == []
        assert [s["how"] for s in JoinedSearchers(run).record()] == ["it was done", "it was done", "Ctrl-C"]
        driver = JoinedSearchers(run)
        records = driver.record()
        (run.path / "joined" / f"{a.name}.json").write_text("{}")  # who has left is not looked at again
        assert driver.record() == records != JoinedSearchers(run).record()
        assert JoinedSearchers(run).dismiss(0.0, lambda: None) == []
        search = ["search", "--run", str(run.path)]
        assert main(search) == 2
        assert "is ending: no searcher can join it now" in capsys.readouterr().err
        driver.await_start()
        assert main(search) == 2
        assert "is starting: try again in a moment" in capsys.readouterr().err


def test_what_cannot_be_joined_is_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, run = made(tmp_path / "run")
    assert main(["search", "--run", str(run.path)]) == 2
    assert "is not in progress: start (`tba train`)" in capsys.readouterr().err
    _, turns = made(tmp_path / "turns", "--runtime", "inline")
    with turns.hold_lock(0.0):
        assert main(["search", "--run", str(turns.path)]) == 2
    assert "takes turns in one process: no searcher can join it" in capsys.readouterr().err
    assert main(["search", "--run", str(tmp_path / "nothing")]) == 2
    assert main(["search"]) == 2
    assert main(["search", "--run", str(run.path), "--steps", "3"]) == 2


def test_who_joined_waits_where_the_trainer_is_done_and_goes_on_for_one_that_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "nice", lambda increment: increment)  # the tests go on in this process
    recipe, run = made(tmp_path / "run", "--evaluation.problems", "1", "--replay.pacing.warm-up", "0")
    waits, loops, weights = threading.Semaphore(0), list[SearcherLoop](), WeightDirectory(run.weights)
    tensors = TabularPolicy(TASK).weights()

    def start(log: Path) -> SearcherLoop:
        loop = start_searching(recipe, run, place.number, 0, place.stop, False)
        drain = loop.searcher.drain

        def drain_and_tell(stop: bool = False) -> None:
            drain(stop)
            waits.release()

        loop.searcher.drain = drain_and_tell
        loops.append(loop)
        return loop

    def restart_trainer() -> None:
        for _ in range(2):
            assert waits.acquire(timeout=SECONDS)
        weights.publish(tensors, Version(1, 4), Manifest())
        until(lambda: loops[0].searcher.rounds, SECONDS, "another round")
        (run.path / "logs" / "ending").write_text("")

    weights.publish(tensors, Version(0, 6), Manifest(stop=True))
    JournalWriter(run.journal(recipe), "x").close()
    with run.hold_lock(SECONDS), join_run(run, replace(recipe, runtime="processes"), lambda: False) as place:
        trainer = threading.Thread(target=restart_trainer)
        trainer.start()
        _search(place, recipe, run, start, terminal(), None)
        trainer.join(SECONDS)
    assert loops[0].searcher.rounds > 0
    assert place.reason == "the run ended"
