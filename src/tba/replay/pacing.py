"""When a batch may be taken: after the warm-up, and not more often than reuse allows.

Invariant: mean uses per trajectory received never exceed `max_mean_uses`. "The trainer never waits" is honest only with
such a bound: a trainer that chews one batch over and over is never idle either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from tba.errors import UserError

Held: TypeAlias = Literal["warm_up", "paced"]


@dataclass(frozen=True)
class Pacing:
    """How the trainer is held back."""

    warm_up: int = 500  # trajectories received before the first batch (paper: 500 GSM8K, 10,000 TL;DR)
    max_mean_uses: float = 8.0  # uses per trajectory received; the trainer is held (`paced`) beyond

    def __post_init__(self) -> None:
        if self.warm_up < 0:
            raise UserError(f"--replay.pacing.warm-up is {self.warm_up}: give a number of trajectories, 0 or more")
        if not self.max_mean_uses > 0:
            raise UserError(f"--replay.pacing.max-mean-uses is {self.max_mean_uses}: give a positive number, or inf")

    def held(self, received: int, trained_total: int, batch: int) -> Held | None:
        """Why a batch of `batch` trajectories may not be taken yet, or None: it may."""
        if received < self.warm_up:
            return "warm_up"
        if trained_total + batch > self.max_mean_uses * received:
            return "paced"
        return None
