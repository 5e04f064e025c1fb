"""Grades an expression over given digits: it must use each exactly once and have the target as its value.

Invariant: any such expression is right, however it is written; two texts are two answers. Nothing is evaluated as code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tba.errors import UserError
from tba.types import Completion, Judgement, Prompt

_EXPRESSION = re.compile(r"[0-9](?:[+*-][0-9])*")
_TERM = re.compile(r"([+-]?)([0-9*]+)")


def value_of(text: str) -> int | None:
    """Returns the value of digits joined by + - *, products first, such as `7+2*3-5`; None for any other text."""
    if _EXPRESSION.fullmatch(text) is None:
        return None
    terms = [(sign, prod(map(int, digits.split("*")))) for sign, digits in _TERM.findall(text)]
    return sum(-value if sign == "-" else value for sign, value in terms)


@dataclass(frozen=True)
class Expression:
    """1 if the completion uses each of the prompt's `digits` once and has its `target` as value, else 0.

    `operations` are those that it may use.
    """

    operations: str = "+-*"

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Raises `UserError` for a prompt without these fields."""
        return [Judgement(float(self._is_right(p, c.text))) for p, c in answered]

    def _is_right(self, prompt: Prompt, text: str) -> bool:
        try:
            digits, target = prompt.fields["digits"], prompt.fields["target"]
        except KeyError as error:
            raise UserError(
                f"prompt {prompt.key} of task {prompt.task} has no field {error}: an expression is marked by the "
                "fields digits, as '2357', and target, as 11"
            ) from error
        used, joined = text[::2], text[1::2]
        if len(used) != len(digits):
            return False  # whatever its length, at once
        return sorted(used) == sorted(digits) and set(joined) <= set(self.operations) and value_of(text) == target
