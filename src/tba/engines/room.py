"""How long a prompt may be, and how long an answer to it: the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass

from tba.errors import UserError
from tba.types import Prompt


@dataclass(frozen=True)
class Room:
    """What the settings allow and what the model has positions for."""

    max_completion_tokens: int
    max_prompt_tokens: int | None
    positions: int | None  # None: the model has no limit

    def check(self, prompt: Prompt) -> None:
        """Raises `UserError` for a prompt that is empty or too long."""
        n, limit, positions = len(prompt.tokens), self.max_prompt_tokens, self.positions
        if n < 1:
            raise UserError(f"a prompt of task {prompt.task} has no tokens, but at least 1 is needed")
        if limit is not None and n > limit:
            raise UserError(
                f"a prompt has {n} tokens, more than max_prompt_tokens = {limit}: drop it or raise the limit"
            )
        if positions is not None and n >= positions:
            raise UserError(
                f"a prompt has {n} tokens, which leaves no room for an answer in the model's {positions} positions"
            )

    def of(self, prompt: Prompt) -> int:
        """The most tokens a completion of `prompt` can have."""
        most = self.max_completion_tokens
        return most if self.positions is None else min(most, self.positions - len(prompt.tokens))
