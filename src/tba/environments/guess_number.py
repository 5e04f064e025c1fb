"""Guess a number from 1 to 100, told after each guess in which range it is.

What is best is known: halving the range finds it in 5.8 guesses on average.
"""

from __future__ import annotations

import random

LAST = 100
GUESSES = 20  # after so many the number counts as not found
LOWEST = 0.75  # share of the timid player's guesses that are the lowest number
BEST = 5.8  # mean guesses of halving: (1 + 2 * 2 + 4 * 3 + 8 * 4 + 16 * 5 + 32 * 6 + 37 * 7) / 100


class GuessNumber:
    """Says `051-100?` while the number may be any from 51 to 100. A guess outside of the range, or none, is wasted."""

    def reset(self, seed: int) -> str:
        """Begin with a number that the seed decides."""
        self._number = random.Random(seed).randint(1, LAST)  # noqa: S311 - a game
        self._low, self._high = 1, LAST
        self._guesses, self._is_found = 0, False
        return self._range()

    def step(self, text: str) -> str | None:
        """Returns the range that is left; None once the number is found, and after 20 guesses."""
        self._guesses += 1
        guess = int(text) if text.isascii() and text.isdigit() and len(text) <= 3 else 0
        if guess == self._number:
            self._is_found = True
            return None
        if self._low <= guess <= self._high:
            self._low, self._high = (guess + 1, self._high) if guess < self._number else (self._low, guess - 1)
        return None if self._guesses == GUESSES else self._range()

    def get_reward(self) -> float:
        """Returns 1 less a twentieth for each guess but the first, so that all guesses count the same; 0: not found."""
        return 1 - (self._guesses - 1) / GUESSES if self._is_found else 0.0

    def _range(self) -> str:
        return f"{self._low:03}-{self._high:03}?"


def timid(observations: list[str], rng: random.Random) -> str:
    """Returns the guess of a scripted player: most often the lowest number of the range, else the middle."""
    low, high = map(int, observations[-1].removesuffix("?").split("-"))
    return f"{low if rng.random() < LOWEST else (low + high) // 2:03}"
