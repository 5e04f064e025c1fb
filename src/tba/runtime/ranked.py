"""A trainer of several ranks, seen from the driver: parts that live and end together.

Invariant: it is one part. Once any rank has ended other than well the others are ended too, and what the first of them
to fail says is the part's failure (the others fail because it is gone). It runs until all ranks have ended. In each of
its lives the ranks are made anew, and what they meet by with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tba.runtime.supervisor import Part

P = TypeVar("P", bound=Part)
SETTLE = 5.0  # seconds after the first failure in which the others may still tell what came first


@dataclass
class RankedPart(Generic[P]):
    """Rank 0 speaks for all: the others have no sign of life but its."""

    begin: Callable[[int, ExitStack], Sequence[P]]  # all ranks of its n-th life, 0 the first; undone when that ends
    culprit: Callable[[Sequence[P], bool], P | None]  # of those that failed (and whether more may be learnt), the one
    # that did so by itself; None while that cannot be told
    attempt: int = 0
    ranks: Sequence[P] = field(init=False)
    _failed: P | None = None
    _first: float | None = None  # when one had failed
    _ends: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.ranks = self.begin(self.attempt, self._ends)

    def start_again(self) -> None:
        """Start all ranks again after one has died."""
        self.kill()
        self.attempt += 1
        self._failed = self._first = None
        self.ranks = self.begin(self.attempt, self._ends)

    @property
    def code(self) -> int | None:
        """That of the rank that failed; None while any goes on; 0 once all have ended well."""
        if self._failed is None and (failed := [rank for rank in self.ranks if rank.code]):
            now = time.monotonic()
            self._first = now if self._first is None else self._first
            others_go_on = any(rank.code is None for rank in self.ranks)
            self._failed = self.culprit(failed, others_go_on and now - self._first < SETTLE)
            if self._failed is not None:
                self.end()
        if self._failed is not None:
            return self._failed.code
        return None if any(rank.code is None for rank in self.ranks) else 0

    @property
    def name(self) -> str:
        return self.ranks[0].name

    @property
    def who(self) -> str:
        return self._speaker.who

    @property
    def log(self) -> str:
        return self._speaker.log

    @property
    def how(self) -> str:
        own = self._speaker
        return own.how if own.name == self.name else f"was ended, for its {own.name} {own.how}"

    @property
    def heard(self) -> bool:
        return self.ranks[0].heard

    def silence(self) -> float:
        """Seconds since rank 0's last sign of life."""
        return self.ranks[0].silence()

    def ask_to_stop(self) -> None:
        self.ranks[0].ask_to_stop()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self._ends.close()

    def end(self) -> None:
        """As something that hangs: those that have not ended. One that had failed before is why."""
        failed = [rank for rank in self.ranks if rank.code]
        if self._failed is None and failed:
            self._failed = self.culprit(failed, False)
        for rank in self.ranks:
            if rank.code is None:
                rank.end()

    def failure(self) -> Exception:
        return self._speaker.failure()

    @property
    def _speaker(self) -> P:
        return self.ranks[0] if self._failed is None else self._failed
