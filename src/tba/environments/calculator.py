"""Products that are too hard for a small policy, and a calculator that it may ask.

`Calculator`: `347*86=` is answered by `29842`, or first by `?347*86`, which the calculator answers; each question costs
a little. `Multiplication`: the same for a language model, which calls a tool in its own chat template. Products of
numbers that add up to one ending in 7 are held out.
"""

from __future__ import annotations

import random
import re

from tba.environments.task import HELD_OUT
from tba.rewards.exact_answer import grade
from tba.types import Message

COST = 0.05  # of each question to the calculator
ASKS = 0.4  # share of the problems at which the player asks
_QUESTION = re.compile(r"\?([0-9]{1,3})\*([0-9]{1,3})")


# One product is worked out before it asks: a model of 135 M parameters does not call a tool that is only described.
EXAMPLE: tuple[Message, ...] = (
    {"role": "user", "content": "What is 12 * 34?"},
    {"role": "assistant", "content": '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'},
    {"role": "tool", "content": "408"},
    {"role": "assistant", "content": "408"},
    {"role": "user", "content": ""},
)


def factors(seed: int) -> tuple[int, int]:
    """Returns a number of three digits and one of two; no product is both trained and held out."""
    rng = random.Random(seed)  # noqa: S311 - a problem
    while True:
        a, b = rng.randint(100, 999), rng.randint(10, 99)
        if ((a + b) % 10 == 7) == (seed >= HELD_OUT):
            return a, b


class Calculator:
    """A product of a number of three digits and one of two; the episode ends with the first turn that asks nothing."""

    def reset(self, seed: int) -> str:
        """Begin with the two numbers that the seed decides."""
        self._a, self._b = factors(seed)
        self._question_count, self._is_right = 0, False
        return f"{self._a}*{self._b}="

    def step(self, text: str) -> str | None:
        """Returns what the calculator says, `?` where it cannot read the question; None after an answer."""
        if not text.startswith("?"):
            self._is_right = text == str(self._a * self._b)
            return None
        self._question_count += 1
        question = _QUESTION.fullmatch(text)
        return f"{int(question[1]) * int(question[2])}=" if question else "?="

    def get_reward(self) -> float:
        """Returns 1 for the right answer, else 0, less the cost of the questions."""
        return float(self._is_right) - COST * self._question_count


class Multiplication:
    """Asks for the product of a number of three digits and one of two. The last number of the answer counts."""

    def reset(self, seed: int) -> str:
        """Begin with two numbers that the seed decides."""
        self._a, self._b = factors(seed)
        return f"What is {self._a} * {self._b}?"

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: the first number
            b: the second number
        """
        return a * b

    def get_reward(self, answer: str | None) -> float:
        """Returns 1 for the right product, whichever way it was found, else 0."""
        return float(answer is not None and grade(answer, str(self._a * self._b)))


def overconfident(observations: list[str], rng: random.Random) -> str:
    """Returns the next turn of a scripted player that mostly guesses a number of the right size, and seldom asks."""
    if len(observations) > 1:
        return observations[-1].removesuffix("=")
    a, b = map(int, observations[0].removesuffix("=").split("*"))
    return f"?{a}*{b}" if rng.random() < ASKS else str(round(a * b * rng.uniform(0.9, 1.1)))
