"""Marks a completion by its text alone: it is the right answer, character by character, or it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tba.rewards.exact_answer import right_answer
from tba.types import Completion, Judgement, Prompt


@dataclass(frozen=True)
class ExactText:
    """1 if the completion's text equals the prompt's field `answer`, else 0."""

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Raises `UserError` for a prompt that has no such field."""
        return [Judgement(float(c.text == right_answer(p))) for p, c in answered]
