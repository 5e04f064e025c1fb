"""A trainer of several ranks, seen from the driver: processes that live and end together, as one worker.

Invariant: once any rank has failed the others are ended too, and the error of the first one to fail is the worker's
(the others fail because it is gone). The worker runs until all ranks have ended. For each of its lives the ranks, and
the means by which they find each other, are made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tba.runtime.supervisor import Worker

P = TypeVar("P", bound=Worker)
SETTLE = 5.0  # seconds after the first failure in which other ranks may still report an earlier one


@dataclass
class RankedWorker(Generic[P]):
    """All ranks as one worker. Only rank 0 gives a heartbeat, for all of them."""

    # starts all ranks of its n-th life, 0 the first; the stack is unwound when that life ends
    start_ranks: Callable[[int, ExitStack], Sequence[P]]
    find_culprit: Callable[[Sequence[P], bool], P | None]  # (failed ranks, whether more may be learnt) -> the rank
    # that failed by itself; None while that cannot be decided
    attempt: int = 0
    ranks: Sequence[P] = field(init=False)
    _failed_rank: P | None = None
    _failure_time: float | None = None  # when the first one had failed
    _closers: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.ranks = self.start_ranks(self.attempt, self._closers)

    def start_again(self) -> None:
        """Start all ranks again after one has died."""
        self.kill()
        self.attempt += 1
        self._failed_rank = self._failure_time = None
        self.ranks = self.start_ranks(self.attempt, self._closers)

    @property
    def code(self) -> int | None:
        """The exit code of the rank that failed; None while any goes on; 0 once all have ended well."""
        if self._failed_rank is None and (failed_ranks := [rank for rank in self.ranks if rank.code]):
            now = time.monotonic()
            self._failure_time = now if self._failure_time is None else self._failure_time
            is_running = any(rank.code is None for rank in self.ranks)
            self._failed_rank = self.find_culprit(failed_ranks, is_running and now - self._failure_time < SETTLE)
            if self._failed_rank is not None:
                self.end()
        if self._failed_rank is not None:
            return self._failed_rank.code
        return None if any(rank.code is None for rank in self.ranks) else 0

    @property
    def name(self) -> str:
        return self.ranks[0].name

    @property
    def waits_for_room(self) -> bool:
        return any(rank.waits_for_room for rank in self.ranks)

    @property
    def has_lost_node(self) -> bool:
        return self._speaker.has_lost_node

    @property
    def description(self) -> str:
        return self._speaker.description

    @property
    def log(self) -> str:
        return self._speaker.log

    @property
    def cause_of_death(self) -> str:
        name, cause = self._speaker.name, self._speaker.cause_of_death
        return cause if name == self.name else f"was ended, for its {name} {cause}"

    @property
    def has_heartbeat(self) -> bool:
        return self.ranks[0].has_heartbeat

    def silence(self) -> float:
        """Returns the seconds since rank 0's last heartbeat."""
        return self.ranks[0].silence()

    def ask_to_stop(self) -> None:
        self.ranks[0].ask_to_stop()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self._closers.close()

    def end(self) -> None:
        """End the ranks that have not ended, as a worker that hangs. If one had failed before, that is why."""
        failed_ranks = [rank for rank in self.ranks if rank.code]
        if self._failed_rank is None and failed_ranks:
            self._failed_rank = self.find_culprit(failed_ranks, False)
        for rank in self.ranks:
            if rank.code is None:
                rank.end()

    def failure(self) -> Exception:
        return self._speaker.failure()

    @property
    def _speaker(self) -> P:
        return self.ranks[0] if self._failed_rank is None else self._failed_rank
