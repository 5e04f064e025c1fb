"""A Beta posterior of each prompt's success rate, by which prompts are chosen.

Invariant: the posterior is a function of the outcomes in the order in which they were recorded, so all searchers that
have read as far share it, also after a restart. Evidence fades: about a prompt that is left alone little is known after
a while, and so it is tried again.

Shape legend: P prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tba.errors import UserError
from tba.fields import as_declared
from tba.types import Outcome


@dataclass(frozen=True)
@as_declared
class PosteriorSettings:
    """Beta posteriors of success rates, with forgetting (after MoPPS, arXiv 2507.04632)."""

    target: float = 0.5  # the success rate to look for: at 0.5 a reward of 0 or 1 varies most
    discount: float = 0.5  # factor on a prompt's earlier outcomes at its next answers; 1: they count in full
    fading: float = 0.5  # factor on a prompt's outcomes per epoch's worth of answers to others; 1: none (MoPPS)
    prior: float = 1.0  # pseudo-counts of success and failure before the first answer; 1: uniform prior
    failure: float = 0.0  # reward that counts as failure; rewards in between count for both, in proportion
    success: float = 1.0  # reward that counts as success

    def __post_init__(self) -> None:
        if not 0 <= self.target <= 1:
            raise UserError(f"--prompts.posterior.target is {self.target}, it is a success rate: give 0 to 1")
        for name, factor in (("discount", self.discount), ("fading", self.fading)):
            if not 0 < factor <= 1:
                raise UserError(f"--prompts.posterior.{name} is {factor}: give more than 0, at most 1 (nothing fades)")
        if not (self.prior > 0 and math.isfinite(self.prior)):
            raise UserError(f"--prompts.posterior.prior is {self.prior}: give a positive number")
        if not self.failure < self.success:
            raise UserError(
                f"--prompts.posterior.failure is {self.failure} and success {self.success}: the first must be lower"
            )

    def outcome(self, position: int, rewards: Sequence[float]) -> Outcome:
        """Converts the rewards of one prompt's answers to successes and failures."""
        share = (np.asarray(rewards, dtype=np.float64) - self.failure) / (self.success - self.failure)
        successes = float(share.clip(0, 1).sum())
        return position, successes, len(rewards) - successes


class Posterior:
    """Beta(prior + successes, prior + failures) of each prompt's success rate, the evidence discounted by its age."""

    def __init__(self, prompts: int, settings: PosteriorSettings) -> None:
        self.settings = settings
        self._successes_P = np.zeros(prompts)
        self._failures_P = np.zeros(prompts)
        self._updated_P = np.zeros(prompts)  # the outcome count at each prompt's last update
        self._outcome_count = 0

    def update(self, outcomes: Iterable[Outcome]) -> None:
        """Update the posterior by new outcomes, one after the other."""
        epoch, settings = len(self._updated_P), self.settings
        for position, successes, failures in outcomes:
            self._outcome_count += 1
            weight = settings.discount * settings.fading ** ((self._outcome_count - self._updated_P[position]) / epoch)
            self._successes_P[position] = weight * self._successes_P[position] + successes
            self._failures_P[position] = weight * self._failures_P[position] + failures
            self._updated_P[position] = self._outcome_count

    def parameters(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Returns the two parameters of each prompt's Beta distribution, [P] each."""
        weight_P = self.settings.fading ** ((self._outcome_count - self._updated_P) / len(self._updated_P))
        prior = self.settings.prior
        return prior + weight_P * self._successes_P, prior + weight_P * self._failures_P

    def order(self, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Returns all positions, the most promising first: by how near a draw of the prompt's rate comes to the target.

        This is Thompson sampling: a rate that is hardly known varies widely between draws, so that its prompt is tried
        now and then.
        """
        return np.argsort(np.abs(rng.beta(*self.parameters()) - self.settings.target), kind="stable")
