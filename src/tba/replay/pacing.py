"""Pacing: which side may continue. The trainer is limited by the warm-up and by reuse, and, if wished, both sides by a
band.

Invariant: mean uses per trajectory received never exceed `max_mean_uses`, and the allowance is not saved up: what is
not used soon after an arrival is forfeited, except for `saved_batches` (`forfeit`). So when searchers stall, the
trainer is held after a few updates, and new arrivals let it continue. "The trainer never waits" is honest only with
such a bound: a trainer that reuses old data over and over is never idle either, and what it had learnt is lost within
50 updates (docs/faults.md). All else here is off by default.

With `samples_per_insert` = s, uses are to keep up with what is received after the warm-up, as in Reverb's rate limiter
(Cassirer et al. 2021, arXiv 2102.04736, section 3.4): the balance

    s (received - warm_up) - uses

is kept within +- `saved_batches`. A trainer that would take it below is held (`paced`); searchers are held back while
it is above. Neither can hold the other for ever: see `searcher_limit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tba.errors import UserError
from tba.fields import as_declared


@dataclass(frozen=True)
@as_declared
class Pacing:
    """Holds the trainer and the searchers back. Raises `UserError` when a field makes no sense."""

    warm_up: int = 500  # trajectories received before the first batch (paper: 500 GSM8K, 10,000 TL;DR)
    max_mean_uses: float = 8.0  # bound on the mean uses of what was received; beyond it the trainer is `paced`
    samples_per_insert: float | None = None  # target for the uses of a received trajectory; None: no target
    saved_batches: float = 8.0  # batches of unused allowance that are kept in a stall, and by which either side may be
    # ahead of the target
    throttled_side: Literal["trainer", "searchers", "both"] = "both"  # the side that is throttled beyond that

    def __post_init__(self) -> None:
        if self.warm_up < 0:
            raise UserError(f"--replay.pacing.warm-up is {self.warm_up}: give a number of trajectories, 0 or more")
        if not self.max_mean_uses > 0:
            raise UserError(f"--replay.pacing.max-mean-uses is {self.max_mean_uses}: give a positive number, or inf")
        if not self.saved_batches >= 1:
            raise UserError(f"--replay.pacing.saved-batches is {self.saved_batches}: give 1 batch or more")
        if self.samples_per_insert is not None and not 0 < self.samples_per_insert <= self.max_mean_uses:
            raise UserError(
                f"--replay.pacing.samples-per-insert is {self.samples_per_insert}: give a positive number up to "
                f"--replay.pacing.max-mean-uses, {self.max_mean_uses}"
            )

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect while neither side is to keep up with the other."""
        return {"throttled_side": "samples_per_insert"} if self.samples_per_insert is None else {}

    def hold_reason(
        self, received: int, trained_total: int, batch: int, forfeited: float = 0.0
    ) -> Literal["warm_up", "paced"] | None:
        """Returns why a batch of `batch` trajectories may not be taken yet, or None: it may."""
        if received < self.warm_up:
            return "warm_up"
        if trained_total + batch > self.max_mean_uses * (received - forfeited):
            return "paced"
        if self.samples_per_insert is not None and self.throttled_side != "searchers":
            balance = self.samples_per_insert * (received - self.warm_up) - trained_total - batch
            if balance < -self.saved_batches * batch:
                return "paced"
        return None

    def forfeit(self, received: int, trained_total: int, batch: int, newest: int, forfeited: float = 0.0) -> float:
        """Returns the number of trajectories in all for which the allowance is lost; `newest` of those received came
        last.

        What is left is `saved_batches`, or the whole allowance of the newest where that is more: a run whose data came
        all at once (offline) loses nothing, and one whose rounds are long keeps what it needs until the next. It is
        never less than a batch, so that no loss outlasts the next arrivals. Where searchers are held back nothing is
        lost: they would wait for a trainer that is held.
        """
        are_searchers_held = self.samples_per_insert is not None and self.throttled_side != "trainer"
        if are_searchers_held or math.isinf(self.max_mean_uses):
            return 0.0
        spared = max(self.saved_batches * batch / self.max_mean_uses, newest)
        return max(forfeited, received - trained_total / self.max_mean_uses - spared)

    def searcher_limit(self, trained_total: int, batch: int, updates: int) -> int | None:
        """Returns how many trajectories searchers may have sent in all before they are held back; None: any number.

        It holds until the next `updates` batches have been taken. These are included, so that a trainer that is held
        never waits for searchers that are held back too: with that many received it may take all of the batches.
        """
        if self.samples_per_insert is None or self.throttled_side == "trainer":
            return None
        uses = trained_total + (updates + self.saved_batches) * batch
        return self.warm_up + math.ceil(uses / self.samples_per_insert)
