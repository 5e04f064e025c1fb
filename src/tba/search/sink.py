"""Where trajectories go, as those who bring them see it (`JournalWriter` is one)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tba.search.posterior import Outcome
from tba.types import Trajectory


class CountingSink(Protocol):
    """A trajectory sink that also takes the searcher's own counts, in the same transaction."""

    def put(
        self,
        trajectories: Sequence[Trajectory],
        leases: Sequence[int] = ...,
        counters: Mapping[str, int] | None = ...,
        outcomes: Sequence[Outcome] = ...,
    ) -> None: ...

    def count(self, **increments: int) -> None: ...


class KnowingSink(CountingSink, Protocol):
    """One that can also be asked which trajectories it ever had."""

    def known(self, uids: Sequence[str]) -> set[str]: ...
