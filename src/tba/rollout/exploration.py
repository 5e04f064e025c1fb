"""Exploration: at which temperature a searcher samples, and from which tokens.

Invariant: these settings are behaviour only. They are recorded with the completion and never enter Trajectory Balance,
whose one temperature is the recipe's `policy_temperature`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tba.errors import UserError
from tba.fields import as_declared
from tba.types import Sampling


@dataclass(frozen=True)
@as_declared
class Fixed:
    """Samples with equal settings in every round. Raises `UserError` for what is out of range."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # below 1 cuts support
    top_k: int = 0  # so many of the most probable tokens are sampled from; 0: all. Cuts support
    min_p: float = 0.0  # least probability, as a share of the best token's, of a token that is sampled. Cuts support
    repetition_penalty: float = 1.0  # above 1: tokens that the prompt or the answer has already become less likely

    def __post_init__(self) -> None:
        _check(self.temperature, self.temperature, self.top_p)
        if self.top_k < 0 or not 0 <= self.min_p <= 1 or not 0 < self.repetition_penalty < math.inf:
            raise UserError(
                f"exploration got top_k {self.top_k}, min_p {self.min_p} and repetition_penalty "
                f"{self.repetition_penalty}: give 0 or more tokens, a share of 0 to 1, and a penalty above 0 (1: none)"
            )

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields that are off."""
        remedies = {} if self.top_k else {"top_k": "top_k above 0"}
        remedies |= {} if self.min_p else {"min_p": "min_p above 0"}
        return remedies | ({"repetition_penalty": "repetition_penalty above 1"} if self.repetition_penalty == 1 else {})

    def draw(self, rng: np.random.Generator) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty)

    @property
    def full_support(self) -> bool:
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p).full_support

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
@as_declared
class RandomPerRound:
    """Draws as the paper's off-policy decoding (its future work, off by default there): one draw for each round.

    With probability `p_temperature` the temperature is uniform in [`temperature_low`, `temperature_high`], else
    `temperature`; with probability `p_top_p` top-p is uniform in [`top_p_low`, 1], else 1. Raises `UserError` for what
    is out of range.
    """

    temperature: float = 1.0  # temperature of the other rounds
    p_temperature: float = 0.3  # probability that a round draws a temperature
    temperature_low: float = 0.7  # lowest temperature drawn
    temperature_high: float = 1.1  # highest temperature drawn
    p_top_p: float = 0.3  # probability that a round draws top-p; otherwise it is 1
    top_p_low: float = 0.7  # lowest top-p drawn; the highest is 1

    def __post_init__(self) -> None:
        _check(self.temperature, self.temperature, 1.0)
        _check(self.temperature_low, self.temperature_high, self.top_p_low)
        for name in ("p_temperature", "p_top_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"exploration's {name} is {getattr(self, name)}, it is a probability: give 0 to 1")

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect where no temperature, or no top-p, is drawn."""
        remedies = {} if self.p_temperature else dict.fromkeys(("temperature_low", "temperature_high"), "p_temperature")
        return remedies if self.p_top_p else remedies | {"top_p_low": "p_top_p"}

    def draw(self, rng: np.random.Generator) -> Sampling:
        by_temperature, by_top_p = rng.random(2)  # always two draws, so that one setting does not shift the other
        temperature, top_p = rng.uniform([self.temperature_low, self.top_p_low], [self.temperature_high, 1.0])
        return Sampling(
            float(temperature) if by_temperature < self.p_temperature else self.temperature,
            float(top_p) if by_top_p < self.p_top_p else 1.0,
        )

    @property
    def full_support(self) -> bool:
        is_warm = (self.p_temperature < 1 and self.temperature > 0) or (
            self.p_temperature > 0 and self.temperature_high > 0
        )
        return is_warm and (self.p_top_p < 1 or self.top_p_low >= 1)

    @property
    def greedy(self) -> bool:
        can_be_usual, can_be_drawn = self.p_temperature < 1, self.p_temperature > 0
        return (can_be_usual and self.temperature == 0) or (can_be_drawn and self.temperature_high == 0)


def _check(low: float, high: float, top_p: float) -> None:
    if not 0 <= low <= high < math.inf or not 0 < top_p <= 1:
        raise UserError(
            f"exploration got temperature {low}..{high} and top_p {top_p}: "
            "temperatures must not be negative, low <= high, and 0 < top_p <= 1"
        )
