"""Products that a small language model gets wrong, and a tool that knows them, called in the model's chat template."""

from __future__ import annotations

import random

from tba.rewards.exact_answer import grade
from tba.types import Message

# One product is worked out before it asks: a model of 135 M parameters does not call a tool that is only described.
EXAMPLE: tuple[Message, ...] = (
    {"role": "user", "content": "What is 12 * 34?"},
    {"role": "assistant", "content": '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'},
    {"role": "tool", "content": "408"},
    {"role": "assistant", "content": "408"},
    {"role": "user", "content": ""},
)


class Multiplication:
    """Asks for the product of a number of three digits and one of two. The last number of the answer counts."""

    def reset(self, seed: int) -> str:
        """Begin with two numbers that the seed decides."""
        rng = random.Random(seed)  # noqa: S311 - a problem
        self._a, self._b = rng.randint(100, 999), rng.randint(11, 99)
        return f"What is {self._a} * {self._b}?"

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: the first number
            b: the second number
        """
        return a * b

    def get_reward(self, answer: str | None) -> float:
        """1 for the right product, whichever way it was found, else 0."""
        return float(answer is not None and grade(answer, str(self._a * self._b)))
