"""Short sums with a verifiable answer, made on the spot: the task of the quickstart.

Invariant: a digest of the two operands, in either order and under whatever operation, decides the split, so training
and evaluation never share a pair, also not by commutation.

The format needs only the characters of `alphabet`: `345+678=` is answered by `3201`, the digits of 1023 with the least
significant first (the order in which a sum is worked out, which is what a small model can learn).

Demonstrations can be careless (`forgotten_carries`): a base policy that was shown them has a bad habit, which the
reward then has to break. The field `answer`, and with it the reward, is always right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tba.errors import UserError
from tba.rewards.exact_answer import ExactText
from tba.tasks.held_out import check_share, is_held_out
from tba.types import Problem, Split

_RESULT = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True)
class Arithmetic:
    """`a+b=`, answered by the digits of the result. Every operand has exactly `digits` digits."""

    digits: int = 3  # of each operand, 1 to 9
    operations: str = "+"  # any of + - *, each problem draws one of them
    least_significant_first: bool = True  # write 1023 as 3201; a minus sign stays in front
    train_problems: int = 20_000  # distinct ones, drawn by `seed`
    eval_problems: int = 2_000  # distinct ones, of other operand pairs
    held_out: float = 0.1  # share of the operand pairs that only evaluation may use
    forgotten_carries: float = 0.0  # share of the carries that demonstrations forget: a bad habit to be unlearnt by RL
    seed: int = 0  # of the problems drawn, and of the carries forgotten

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 9:
            raise UserError(f"arithmetic has digits {self.digits}: give a number from 1 to 9")
        if not self.operations or sorted(self.operations) != sorted(set(self.operations) & set(_RESULT)):
            raise UserError(f"arithmetic has operations {self.operations!r}: give each of + - * at most once, as '+-'")
        if min(self.train_problems, self.eval_problems) < 1:
            raise UserError(
                f"arithmetic has {self.train_problems} train_problems and {self.eval_problems} eval_problems: "
                "give at least 1 of each"
            )
        check_share(self.held_out, "arithmetic's held_out")
        if self.forgotten_carries and (self.operations != "+" or not 0 <= self.forgotten_carries <= 1):
            raise UserError(
                f"arithmetic has forgotten_carries {self.forgotten_carries} with operations {self.operations!r}: "
                "give a share from 0 to 1, for sums only"
            )

    @property
    def name(self) -> str:
        return "arithmetic"

    @property
    def alphabet(self) -> str:
        """The characters of every prompt and answer (12 for sums: 14 tokens with EOS and padding)."""
        return "0123456789" + self.operations + "="

    def problems(self, split: Split) -> list[Problem]:
        """Distinct problems in an order fixed by `seed`. Raises `UserError` when there are not that many."""
        rng = np.random.default_rng([self.seed, split == "eval"])
        pairs = self._pairs(split, rng)
        drawn = rng.integers(len(self.operations), size=len(pairs))
        return [self._problem(a, self.operations[o], b, rng) for (a, b), o in zip(pairs, drawn, strict=True)]

    def reward(self) -> ExactText:
        return ExactText()

    def _pairs(self, split: Split, rng: np.random.Generator) -> list[tuple[int, int]]:
        low = 10 ** (self.digits - 1) if self.digits > 1 else 0
        span = 10**self.digits - low
        wanted, share = self.train_problems, 1 - self.held_out
        if split == "eval":
            wanted, share = self.eval_problems, self.held_out
        candidates = int(1.1 * wanted / share) + 100
        while True:
            drawn = rng.choice(span**2, size=min(candidates, span**2), replace=False)
            pairs = [(low + int(code) // span, low + int(code) % span) for code in drawn]
            pairs = [p for p in pairs if is_held_out(f"{min(p)},{max(p)}", self.held_out) == (split == "eval")]
            if len(pairs) >= wanted:
                return pairs[:wanted]
            if candidates >= span**2:
                raise UserError(
                    f"arithmetic has only {len(pairs)} {split} problems of {self.digits} digits, {wanted} are asked "
                    f"for: raise digits, or lower {split}_problems"
                )
            candidates *= 2

    def _problem(self, a: int, operation: str, b: int, rng: np.random.Generator) -> Problem:
        answer = self.written(_RESULT[operation](a, b))
        shown = self.written(self._careless_sum(a, b, rng)) if self.forgotten_carries else answer
        return Problem(f"{a}{operation}{b}=", {"answer": answer}, shown)

    def _careless_sum(self, a: int, b: int, rng: np.random.Generator) -> int:
        """a + b worked out digit by digit, where each carry is forgotten with probability `forgotten_carries`."""
        total, carry = 0, 0
        for place in range(self.digits):
            column = a // 10**place % 10 + b // 10**place % 10 + carry
            total += column % 10 * 10**place
            carry = int(column >= 10 and rng.random() >= self.forgotten_carries)
        return total + carry * 10**self.digits

    def written(self, result: int) -> str:
        """A result as the answer spells it."""
        digits = str(abs(result))
        return ("-" if result < 0 else "") + (digits[::-1] if self.least_significant_first else digits)
