"""What a source of trajectories has on record and cannot give.

Invariant: each is counted by whoever passes it over, once for each time that he passes.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Gone:
    """What is on record and cannot be taken in (any more): retired before it was, or damaged."""

    retired_trajectories: int = 0
    retired_tokens: int = 0
    damaged_trajectories: int = 0
    damaged_tokens: int = 0

    def __add__(self, other: Gone) -> Gone:
        return Gone(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
