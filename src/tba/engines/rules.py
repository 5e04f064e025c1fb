"""What an answer may not be: shorter than so many tokens, or one that begins otherwise.

Invariant: a rule takes tokens out before a draw, after which probabilities are renormalised, so that `log_behavior` is
of what was really drawn from. The policy knows nothing of rules: what they forbid is never sampled, and Trajectory
Balance says nothing about it.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tba.errors import UserError
from tba.protocols import Tokenizer


@dataclass(frozen=True)
class Rules:
    """As tensors on the model's device. `none` is no rule."""

    eos_V: Tensor  # bool, the tokens that end an answer
    least: int = 0  # tokens before the one that ends an answer
    never_first_V: Tensor | None = None  # bool, the tokens that no answer begins with

    def first(self, logits_RV: Tensor) -> Tensor:
        """What an answer's first token is drawn from."""
        if self.never_first_V is not None:
            logits_RV = logits_RV.masked_fill(self.never_first_V, -torch.inf)
        return logits_RV.masked_fill(self.eos_V, -torch.inf) if self.least else logits_RV

    def next(self, logits_RV: Tensor, count_R1: Tensor) -> Tensor:
        """What the token after `count_R1` others is drawn from."""
        if self.least < 2:
            return logits_RV
        return logits_RV.masked_fill((count_R1 < self.least) & self.eos_V, -torch.inf)


def rules_of(
    tokenizer: Tokenizer, eos_V: Tensor, least: int, first: Sequence[str], never_first: Sequence[str]
) -> Rules:
    """Raises `UserError` for a text that is not one token, and when no token is left to begin with."""
    banned_V = torch.zeros_like(eos_V)
    if first:
        banned_V[:] = True
        banned_V[[_token(tokenizer, text, len(eos_V)) for text in first]] = False
    banned_V[[_token(tokenizer, text, len(eos_V)) for text in never_first]] = True
    if bool((banned_V | (eos_V if least else torch.zeros_like(eos_V))).all()):
        raise UserError("the engine's rules leave no token that an answer could begin with: relax first or never_first")
    return Rules(eos_V, least, banned_V if first or never_first else None)


def _token(tokenizer: Tokenizer, text: str, vocabulary: int) -> int:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) != 1 or tokens[0] >= vocabulary:
        raise UserError(
            f"an answer's first token is to be, or not to be, {text!r}, which is {len(tokens)} tokens of this model: "
            "give texts of exactly one token (often with the space before the word)"
        )
    return tokens[0]
