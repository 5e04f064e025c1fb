"""Episodes in processes of their own: what fails costs its own episode, and nothing is left behind."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from tests.environments.turning_toy import Turning, task
from tests.runtime.runs import alive, ended, forked, until

from tba.environments.engine import EpisodeEngine
from tba.environments.episode import Observation
from tba.environments.hosts import Beginning, EpisodeLimits, EpisodeReply, Hosts, InProcessHost, Question
from tba.environments.turn_encoding import TurnEncoder
from tba.errors import UserError
from tba.generation import generate
from tba.protocols import Environment
from tba.rollout.prompts import PromptSettings, encode
from tba.types import Judgement, Sampling, StopReason
from toy.engine import TabularEngine
from toy.policy import TabularTokenizer


class Fated:
    """Does what it is told, and says how often it was told something."""

    def reset(self, seed: int) -> None:
        self.seed, self.turns = seed, 0

    def step(self, text: str) -> str | None:
        self.turns += 1
        match text:
            case "raise":
                raise ZeroDivisionError("nothing is divided")
            case "exit":
                os._exit(0)
            case "interrupt":
                raise KeyboardInterrupt("\x1b]0;owned\x07")
            case "leave":
                raise SystemExit(0)
            case "crash":
                ctypes.string_at(0)
            case "hang":
                threading.Event().wait()
            case "hoard":
                self.hoard = bytearray(2 << 30)
            case "talk":
                return "x" * (2 << 20)
        return None if text == "end" else f"{self.seed}: {self.turns}"

    def get_reward(self) -> float:
        return self.turns


@dataclass(frozen=True)
class Playing:
    environment: Callable[[], Environment] = Fated
    turns: int = 9


def hosts(processes: int = 8, seconds: float = 60.0) -> Hosts:
    return Hosts(Playing(), EpisodeLimits(processes, seconds, memory_gb=0.5))


@pytest.fixture
def worlds() -> Iterator[Hosts]:
    made = hosts()
    yield made
    made.end()


def begin(worlds: Hosts | InProcessHost, count: int) -> None:
    for number in range(count):
        worlds.ask(number, Question(Beginning({}, number, ""), "hello"))


def answered(worlds: Hosts | InProcessHost, count: int) -> Mapping[int, EpisodeReply]:
    found: dict[int, EpisodeReply] = {}

    def enough() -> bool:
        found.update(worlds.replies(wait=True))
        return len(found) >= count

    until(enough, 60.0, f"{count} answers")
    return found


FATES = {
    "raise": "step() raised ZeroDivisionError: nothing is divided",
    "leave": "step() raised SystemExit",
    "hoard": "step() raised MemoryError",
    "exit": "its process died",
    "crash": "its process died",
    "talk": "its process died",
}


def test_what_raises_ends_crashes_or_takes_too_much_costs_its_own_episode_and_no_other(worlds: Hosts) -> None:
    begin(worlds, 8)
    observations = [reply.observation for _, reply in sorted(answered(worlds, 8).items())]
    assert observations == [Observation(f"{n}: 1") for n in range(8)]
    for number, fate in enumerate([*FATES, "end", "go on"]):
        worlds.ask(number, Question(None, fate))
    found = answered(worlds, 8)
    for number, why in enumerate(FATES.values()):
        assert found[number].failure.startswith(why), found[number]
        assert found[number].judgement is None
    assert found[6] == EpisodeReply(judgement=Judgement(2.0, {"turns": 2.0}))
    assert found[7].observation is not None
    assert found[7].observation.text == "7: 2"
    worlds.ask(7, Question(None, None))  # cut off, and judged as it stands
    assert answered(worlds, 1) == {7: EpisodeReply(judgement=Judgement(2.0, {"turns": 2.0}))}


def test_what_ends_a_process_is_in_the_log_before_it_is_known_and_without_what_a_terminal_obeys(
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = hosts(processes=1)  # here, so that it writes into what is captured
    begin(made, 1)
    answered(made, 1)
    made.ask(0, Question(None, "interrupt"))
    found = answered(made, 1)
    said = capfd.readouterr().err
    made.end()
    assert found[0].failure.startswith("its process died")
    assert said.endswith(r"KeyboardInterrupt: \x1b]0;owned\x07" + "\n")
    assert "\x1b" not in said


class Waiting:
    """Waits, when it is collected in another process, for a thread that is not there: as a gloo group does."""

    def __init__(self) -> None:
        self.own, self.cycle = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.own:
            threading.Event().wait()


def test_garbage_of_this_process_is_not_collected_in_those_that_it_forks() -> None:
    gc.disable()
    try:
        Waiting()
        made = hosts(1)
    finally:
        gc.enable()
    begin(made, 1)
    assert answered(made, 1).keys() == {0}
    made.end()


class Till:
    """What a tool gives."""

    def reset(self, seed: int) -> None: ...

    def pay(self, amount: int) -> int:
        """Pay.

        Args:
            amount: how much
        """
        return amount


def test_what_tools_give_comes_back_from_a_process_under_the_names_of_their_calls() -> None:
    said = '[TOOL_CALLS]pay[CALL_ID]abc123def[ARGS]{"amount": 3}[TOOL_CALLS]pay[ARGS]{"amount": true}'
    wrong = "error: amount is True, it must be a whole number"
    here, there = InProcessHost(Playing(Till)), Hosts(Playing(Till), EpisodeLimits(1, 60.0, memory_gb=0.5))
    for worlds in (here, there):
        worlds.ask(0, Question(Beginning({}, 0, ""), said))
        told = Observation(f"3\n{wrong}", (("pay", "3"), ("pay", wrong)), ("abc123def", ""))
        assert answered(worlds, 1) == {0: EpisodeReply(told)}
        worlds.ask(0, Question(None, "done"))
        assert answered(worlds, 1) == {0: EpisodeReply(judgement=Judgement(0.0, {"turns": 2.0, "wrong_calls": 1.0}))}
    there.end()


def test_what_hangs_ends_after_its_time_while_others_are_answered() -> None:
    worlds = hosts(seconds=2.0)
    begin(worlds, 3)
    answered(worlds, 3)
    worlds.ask(0, Question(None, "hang"))
    worlds.ask(1, Question(None, "go on"))
    worlds.ask(2, Question(None, "end"))
    first = answered(worlds, 2)
    assert set(first) == {1, 2}
    assert answered(worlds, 1) == {0: EpisodeReply(failure="its process took more than 2 s")}
    assert worlds.losses == {"took more than 2 s": 1}
    worlds.end()


def test_more_episodes_than_processes_wait_for_one_and_all_are_played() -> None:
    worlds = hosts(processes=2)
    judged: dict[int, Judgement] = {}
    begin(worlds, 5)
    while len(judged) < 5:
        for number, answer in answered(worlds, 1).items():
            if answer.judgement is None:
                worlds.ask(number, Question(None, "end"))
            else:
                judged[number] = answer.judgement
    assert judged == dict.fromkeys(range(5), Judgement(2.0, {"turns": 2.0}))
    assert len(worlds) == 2
    worlds.end()


def test_where_all_that_play_wait_for_those_that_do_not_there_are_more_processes() -> None:
    worlds = hosts(processes=2)
    begin(worlds, 5)
    assert set(answered(worlds, 5)) == set(range(5))
    assert len(worlds) == 5
    for number in range(5):
        worlds.ask(number, Question(None, "end"))
    answered(worlds, 5)
    assert len(worlds) == 2
    worlds.end()


def test_an_environment_that_is_none_ends_what_asks_for_it(worlds: Hosts) -> None:
    nothing = Hosts(Playing(dict), EpisodeLimits(1))
    nothing.ask(0, Question(Beginning({}, 0, ""), "hello"))
    with pytest.raises(UserError, match="has no reset"):
        answered(nothing, 1)
    nothing.end()


def processes_of(pid: int) -> list[int]:
    """The nurseries of a process, and what these have forked."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            if name.startswith("tba-nursery") and int(rest.split()[1]) == pid:
                found += [int(entry.name), *processes_of_nursery(int(entry.name))]
    return found


def processes_of_nursery(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()]


def test_nothing_outlives_a_searcher_that_is_killed(tmp_path: Path) -> None:
    """Two of its processes hang, and cannot see that it is gone."""

    def search() -> None:
        worlds = hosts()
        begin(worlds, 4)
        answered(worlds, 4)
        for number in (0, 1):
            worlds.ask(number, Question(None, "hang"))
        (tmp_path / "ready").touch()
        threading.Event().wait()

    searcher = forked(search)
    until((tmp_path / "ready").exists, 60.0, "the episodes to begin")
    left = processes_of(searcher)
    assert len(left) == 5
    os.kill(searcher, signal.SIGKILL)
    assert ended(searcher) == -signal.SIGKILL
    until(lambda: not any(map(alive, left)), 30.0, "its processes to be gone")


def test_with_its_nursery_killed_episodes_fail_and_the_next_ones_are_played(worlds: Hosts) -> None:
    begin(worlds, 3)
    answered(worlds, 3)
    nursery, *_ = left = processes_of(os.getpid())[-4:]
    os.kill(nursery, signal.SIGKILL)
    until(lambda: not any(map(alive, left)), 30.0, "its processes to be gone with it")
    worlds.replies(wait=True)
    for number in range(3):
        worlds.ask(number, Question(None, "go on"))
    assert {a.failure for a in answered(worlds, 3).values()} == {"its process died"}
    worlds.ask(9, Question(Beginning({}, 5, ""), "hello"))
    said = answered(worlds, 1)[9].observation
    assert said is not None
    assert said.text == "5: 1"


def test_a_killed_process_costs_its_episode_between_two_turns_too(worlds: Hosts) -> None:
    begin(worlds, 1)
    answered(worlds, 1)
    *_, host = processes_of(os.getpid())
    os.kill(host, signal.SIGKILL)
    until(lambda: not worlds.replies(wait=True) and not len(worlds), 30.0, "its process to be missed")
    worlds.ask(0, Question(None, "go on"))
    assert worlds.replies(wait=False) == {0: EpisodeReply(failure="its process died")}


def test_episodes_are_the_same_wherever_they_are_played() -> None:
    prompts = encode(task.problems("train"), task.name, TabularTokenizer(4), PromptSettings()).prompts
    found = []
    for worlds in (InProcessHost(task), Hosts(task, EpisodeLimits(4))):
        engine = EpisodeEngine(TabularEngine(task), task, TurnEncoder(TabularTokenizer(4), chat=False), worlds)
        rows = generate(engine, prompts, 12, Sampling(1e6), np.random.default_rng(0))
        found.append([(c.digest, c.stop_reason, c.judgement) for c in chain.from_iterable(rows)])
        if isinstance(worlds, Hosts):
            worlds.end()
    assert found[0] == found[1]
    assert len(found[0]) == 24
    assert all(judgement is not None and judgement.reward > 0 for _, _, judgement in found[0])


class Deadly(Turning):
    """Its process ends where the first turn is an A."""

    def step(self, text: str) -> str | None:
        if text == "A" and self.turns == 0:
            os._exit(1)
        return super().step(text)


def test_a_process_that_ends_is_a_failed_episode_of_the_engines_and_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = encode(task.problems("train"), task.name, TabularTokenizer(4), PromptSettings()).prompts
    worlds = Hosts(Playing(Deadly, task.turns), EpisodeLimits(8))
    engine = EpisodeEngine(TabularEngine(task), task, TurnEncoder(TabularTokenizer(4), chat=False), worlds)
    rows = generate(engine, prompts, 20, Sampling(1e6), np.random.default_rng(0))
    failed = 0
    for completion in chain.from_iterable(rows):
        assert completion.judgement is not None
        assert math.isnan(completion.judgement.reward) == (completion.tokens[0] == 1)
        assert completion.stop_reason is not StopReason.INTERRUPTED
        failed += int(completion.tokens[0] == 1)
    assert 2 <= failed <= 16
    assert f"{failed} of 40 episodes failed and are rejected, the last: its process died" in caplog.text
    worlds.end()


def test_a_nursery_that_dies_while_many_processes_start_is_one_failed_start(worlds: Hosts) -> None:
    begin(worlds, 8)  # none of them has been looked at: all are starting
    nursery = worlds._nurseries[-1]
    os.kill(nursery.process, signal.SIGKILL)
    observations = [reply.observation for _, reply in sorted(answered(worlds, 8).items())]
    assert observations == [Observation(f"{n}: 1") for n in range(8)]
    assert nursery.has_ended()
    assert nursery.has_counted_failure
    assert not worlds._nurseries[-1].has_ended()
    assert not worlds._nursery_by_host
