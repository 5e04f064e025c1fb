"""How the driver treats workers that die: how often each is restarted, and when the run goes on without it."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from tests.runtime.runs import made, quiet

from tba.errors import PartFailed
from tba.protocols import Manifest
from tba.record.evaluations import EvaluationWriter
from tba.record.faults import count_faults, read_faults
from tba.runtime.evaluation import evaluated_to_the_end
from tba.runtime.supervisor import LOST_NODES_PER_RESTART, Driver
from tba.types import Evaluation, Version
from tba.weights.directory import WeightDirectory

HOUR = 3600.0


@dataclass
class Mortal:
    """A worker that dies when it is told to, and counts its lives."""

    name: str
    attempt: int = 0
    code: int | None = None
    waits_for_room: bool = False
    has_lost_node: bool = False
    description: str = "a worker"
    log: str = "nowhere"
    cause_of_death: str = "was killed by signal 9"
    has_heartbeat: bool = True
    silent_seconds: float = 0.0

    def silence(self) -> float:
        return self.silent_seconds

    def ask_to_stop(self) -> None: ...

    def kill(self) -> None: ...

    def end(self) -> None:
        self.code = -9

    def start_again(self) -> None:
        self.attempt, self.code = self.attempt + 1, None

    def failure(self) -> Exception:
        return PartFailed(f"{self.name} {self.cause_of_death}")


@dataclass
class Watcher(Driver):
    """A driver whose workers are made by the test, with a clock that the test sets."""

    released: list[str] = field(default_factory=list)

    def start(self, name: str) -> Mortal:
        return Mortal(name)

    def release_leases(self, searcher: str) -> None:
        self.released.append(searcher)


@dataclass
class Story:
    """Two searchers and a trainer under a driver, at a time of the test's choice."""

    path: Path
    time: float = 0.0
    restarts: int = 3

    def __post_init__(self) -> None:
        recipe, run = made(self.path, "--run.restarts", str(self.restarts))
        self.driver = Watcher(recipe, run, quiet, now=lambda: self.time)
        self.searchers = [Mortal("searcher-0"), Mortal("searcher-1")]
        self.trainer = Mortal("trainer")

    def watch(self, time: float) -> None:
        self.time = time
        self.driver._watch(self.searchers)

    def faults(self) -> dict[str, int]:
        return count_faults(self.path)


def test_in_no_window_of_an_hour_is_a_searcher_restarted_more_often_than_allowed_and_it_always_comes_back(
    tmp_path: Path,
) -> None:
    story, rng = Story(tmp_path / "run"), random.Random(0)
    victim, restarts = story.searchers[1], list[float]()
    for minute in range(600):
        if victim.code is None and rng.random() < 0.2:
            victim.code = -9
        previous_attempt = victim.attempt
        story.watch(60.0 * minute)
        restarts += [story.time] * (victim.attempt - previous_attempt)
    assert len(restarts) > 20
    assert all(
        fourth_restart - first_restart >= HOUR
        for first_restart, fourth_restart in zip(restarts, restarts[3:], strict=False)
    )
    victim.code = -9
    story.watch(story.time + HOUR)
    assert victim.code is None


def test_ten_deaths_in_an_hour_leave_a_searcher_out_and_the_run_goes_on_with_the_other(tmp_path: Path) -> None:
    story = Story(tmp_path / "run")
    victim = story.searchers[1]
    for death in range(10):
        victim.code = -9
        story.watch(60.0 * death)
        story.watch(60.0 * death + 30.0)
    assert (victim.attempt, victim.code) == (3, -9)
    assert (story.faults()["searcher_restarts"], story.faults()["searchers_waiting"]) == (3, 1)
    assert story.driver.released == ["searcher-1"]
    assert "starts it again in 57:00 min" in str(read_faults(story.path)[-1]["what"])
    story.watch(HOUR - 1.0)
    assert victim.attempt == 3
    story.watch(HOUR)
    assert (victim.attempt, victim.code) == (4, None)


def test_a_searcher_whose_nodes_are_lost_comes_back_each_time_and_keeps_its_restarts(tmp_path: Path) -> None:
    story = Story(tmp_path / "run")
    victim = story.searchers[1]
    for death in range(10):
        victim.code, victim.has_lost_node = -9, death < 7  # seven nodes, then deaths of its own
        story.watch(60.0 * death)
    assert (victim.attempt, victim.code) == (10, None)
    victim.code = -9
    story.watch(600.0)
    assert (victim.attempt, victim.code) == (10, -9)


def test_a_searcher_that_loses_node_after_node_rests_when_its_larger_limit_is_reached(tmp_path: Path) -> None:
    story = Story(tmp_path / "run")
    victim = story.searchers[1]
    for death in range(40):
        victim.code, victim.has_lost_node = -9, True
        story.watch(60.0 * death)
    assert (victim.attempt, victim.code) == (3 * LOST_NODES_PER_RESTART, -9)
    assert "after 30 restarts within 60:00 min" in str(read_faults(story.path)[-1]["what"])


def test_without_restarts_a_run_continues_without_a_dead_searcher_and_promises_nothing(tmp_path: Path) -> None:
    story = Story(tmp_path / "run", restarts=0)
    story.searchers[1].code = -9
    story.watch(2 * HOUR)
    assert (story.searchers[1].attempt, story.searchers[1].code) == (0, -9)
    assert str(read_faults(story.path)[-1]["what"]).endswith("without it, since --run.restarts is 0")


@pytest.mark.parametrize("other", [{"code": -9}, {"waits_for_room": True}])
def test_the_run_ends_when_no_searcher_is_left_that_works(tmp_path: Path, other: dict[str, int | bool]) -> None:
    story = Story(tmp_path / "run")
    victim = story.searchers[0]
    story.searchers[1] = replace(story.searchers[1], **other)
    story.driver._restart_times["searcher-1", False].extend([0.0] * 3)
    for minute in range(3):
        victim.code = -9
        story.watch(60.0 * minute)
    assert (victim.attempt, victim.code) == (3, None)
    victim.code = -9
    with pytest.raises(PartFailed, match="searcher-0 was killed by signal 9"):
        story.watch(180.0)


def test_the_trainer_has_restarts_of_its_own(tmp_path: Path) -> None:
    story = Story(tmp_path / "run")
    for time in (1.0, 2.0, 3.0):
        story.searchers[0].code = -9
        story.watch(time)
    for time, is_restarted in ((4.0, True), (5.0, True), (6.0, True), (7.0, False), (4.0 + HOUR, True)):
        story.time, story.trainer.code = time, -9
        assert story.driver._restart_trainer(story.trainer, []) == is_restarted
    assert story.trainer.attempt == 4
    assert story.faults()["trainer_restarts"] == 4


def test_a_worker_without_a_place_is_never_silent(tmp_path: Path) -> None:
    story = Story(tmp_path / "run")
    hanging, waiting = story.searchers
    hanging.silent_seconds = waiting.silent_seconds = 1e6
    waiting.waits_for_room = True
    story.driver._end_silent(story.searchers)
    assert [hanging.code, waiting.code] == [-9, None]
    assert "for 1800 s and was killed (--run.silence-deadline)" in str(read_faults(story.path)[-1]["what"])


def test_a_searcher_that_ends_for_a_trainer_that_has_died_meanwhile_is_started_again(tmp_path: Path) -> None:
    """The trainer publishes its last version, which asks searchers to stop, and dies before its last checkpoint. One
    searcher still evaluates, and ends by that version after the trainer has been started again.
    """
    story = Story(tmp_path / "run")
    weights, tensors = WeightDirectory(story.driver.run.weights), {"weight": torch.zeros(1)}
    weights.publish(tensors, Version(0, 9), Manifest(stop=True))
    story.searchers[0].code, story.trainer.code = 0, -9
    assert story.driver._restart_trainer(story.trainer, story.searchers)
    story.searchers[1].code = 0
    is_stopped = iter((False, True))
    story.driver._train(story.trainer, story.searchers, lambda: next(is_stopped))
    assert [searcher.code for searcher in story.searchers] == [None, None]
    weights.publish(tensors, Version(1, 7), Manifest())
    story.searchers[0].code = 0
    story.driver._start_misled(story.searchers)
    assert story.searchers[0].code is None
    weights.publish(tensors, Version(1, 9), Manifest(stop=True))  # now the trainer is done
    story.searchers[0].code = 0
    story.driver._start_misled(story.searchers)
    assert story.searchers[0].code == 0


def test_a_last_version_that_a_killed_trainer_took_along_is_not_the_last_of_the_run(
    tmp_path: Path,
) -> None:
    with closing(EvaluationWriter(tmp_path)) as writer:
        writer.write([Evaluation(Version(0, 100), 1.0, "greedy", 0.5, 10)])
        assert evaluated_to_the_end(tmp_path, 100, ())
        assert not evaluated_to_the_end(tmp_path, 100, [Version(1, 100)])
        writer.write([Evaluation(Version(1, 100), 1.0, "greedy", 0.5, 10)])
        assert evaluated_to_the_end(tmp_path, 100, [Version(1, 100)])
