"""Parts that live and end together: whose end is the trainer's, and when it can be told."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from tba.errors import PartFailed, UserError
from tba.runtime.ranks import worker
from tba.runtime.ranks.worker import RankedWorker
from tba.training.ranks.messages import _restrict_interfaces


@dataclass
class Fake:
    """A part that ends as it is told."""

    name: str
    attempt: int
    code: int | None = None
    cause_of_death: str = ""
    has_heartbeat: bool = True
    requests: list[str] = field(default_factory=list)

    @property
    def description(self) -> str:
        return f"{self.name} (here)"

    @property
    def log(self) -> str:
        return f"logs/{self.name}.log"

    def silence(self) -> float:
        return 3.0

    def ask_to_stop(self) -> None:
        self.requests.append("stop")

    def kill(self) -> None:
        self.requests.append("kill")

    def end(self) -> None:
        self.code, self.cause_of_death = -1, "was killed, for it was silent"

    def start_again(self) -> None:
        raise AssertionError("its ranks are made anew")

    def failure(self) -> Exception:
        return PartFailed(f"{self.description} {self.cause_of_death}")


def died_first(failed: Sequence[Fake], more_to_learn: bool) -> Fake | None:
    died = [part for part in failed if (part.code or 0) < 0]
    return died[0] if died else None if more_to_learn else failed[0]


def trainer(count: int = 2) -> tuple[RankedWorker[Fake], list[str]]:
    ended: list[str] = []

    def begin(attempt: int, closers: ExitStack) -> list[Fake]:
        closers.callback(ended.append, f"life {attempt}")
        return [Fake(f"trainer-{rank}" if rank else "trainer", attempt) for rank in range(count)]

    return RankedWorker(begin, died_first), ended


def test_it_goes_on_until_all_ranks_have_ended_and_is_stopped_through_the_first() -> None:
    part, _ = trainer()
    part.ask_to_stop()
    assert [rank.requests for rank in part.ranks] == [["stop"], []]
    part.ranks[0].code = 0
    assert part.code is None
    part.ranks[1].code = 0
    assert part.code == 0
    assert (part.name, part.description, part.has_heartbeat, part.silence()) == ("trainer", "trainer (here)", True, 3.0)


def test_one_that_dies_ends_the_others_and_all_are_made_anew() -> None:
    part, ended = trainer()
    part.ranks[1].code, part.ranks[1].cause_of_death = -9, "was killed by signal 9"
    assert part.code == -9
    assert part.ranks[0].code == -1
    assert part.cause_of_death == "was ended, for its trainer-1 was killed by signal 9"
    part.start_again()
    assert ended == ["life 0"]
    assert [(rank.attempt, rank.code) for rank in part.ranks] == [(1, None), (1, None)]
    assert (part.attempt, part.code) == (1, None)


def test_what_failed_may_have_done_so_for_one_whose_death_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    part, _ = trainer()
    part.ranks[1].code = 1
    assert part.code is None
    part.ranks[0].code, part.ranks[0].cause_of_death = -1, "died"
    assert part.code == -1
    assert str(part.failure()) == "trainer (here) died"
    monkeypatch.setattr(worker, "SETTLE", 0.0)
    alone, _ = trainer()
    alone.ranks[1].code, alone.ranks[1].cause_of_death = 1, "raised"
    assert alone.code == 1
    assert str(alone.failure()) == "trainer-1 (here) raised"


def test_one_that_is_ended_for_its_silence_says_what_had_failed_before() -> None:
    part, _ = trainer(3)
    part.ranks[2].code, part.ranks[2].cause_of_death = 1, "raised"
    part.end()
    assert part.code == 1
    assert str(part.failure()) == "trainer-2 (here) raised"


def test_ranks_listen_where_they_are_to_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UserError, match=r"no network interface of this machine has the address 203\.0\.113\.77"):
        _restrict_interfaces("203.0.113.77")
    set_by_us: dict[str, Any] = {}
    monkeypatch.setattr("os.environ", set_by_us)
    _restrict_interfaces("127.0.0.1")
    assert set_by_us == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
