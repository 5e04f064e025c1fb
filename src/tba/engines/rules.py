"""Rules of sampling: a minimum length of an answer, and which tokens it may begin with.

Invariant: a rule removes tokens before a draw, after which probabilities are renormalised, so that `log_behavior` is of
the distribution that was really drawn from. The policy knows nothing of rules: what they forbid is never sampled, and
Trajectory Balance determines nothing about it.

Shape legend: R rows, V vocabulary.

`LengthLimits` says how long a prompt may be, and how long an answer to it: the same for every engine. `match_weights`
checks whether weights are those of a model before any of them is copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tba.errors import UserError
from tba.pretrained import require_embedded
from tba.protocols import Tokenizer
from tba.types import Prompt

_AFTER_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert")  # positions begin after padding's


@dataclass(frozen=True)
class Rules:
    """The rules as tensors on the model's device. `none` is no rule."""

    eos_V: Tensor  # bool, the tokens that end an answer
    min_tokens: int = 0  # tokens before the one that ends an answer
    never_first_V: Tensor | None = None  # bool, the tokens that no answer begins with

    def mask_first_token(self, logits_RV: Tensor) -> Tensor:
        """Returns the logits that an answer's first token is drawn from."""
        if self.never_first_V is not None:
            logits_RV = logits_RV.masked_fill(self.never_first_V, -torch.inf)
        return logits_RV.masked_fill(self.eos_V, -torch.inf) if self.min_tokens else logits_RV

    def mask_next_token(self, logits_RV: Tensor, count_R1: Tensor) -> Tensor:
        """Returns the logits that the token after `count_R1` others is drawn from."""
        if self.min_tokens < 2:
            return logits_RV
        return logits_RV.masked_fill((count_R1 < self.min_tokens) & self.eos_V, -torch.inf)


def rules_of(
    tokenizer: Tokenizer, eos_V: Tensor, min_tokens: int, first_texts: Sequence[str], never_first_texts: Sequence[str]
) -> Rules:
    """Makes the rules of an engine's settings. Raises `UserError` for a text that is not one token, and when no first
    token is left.
    """
    banned_V = torch.zeros_like(eos_V)
    if first_texts:
        banned_V[:] = True
        banned_V[[_single_token(tokenizer, text, len(eos_V)) for text in first_texts]] = False
    banned_V[[_single_token(tokenizer, text, len(eos_V)) for text in never_first_texts]] = True
    if bool((banned_V | (eos_V if min_tokens else torch.zeros_like(eos_V))).all()):
        raise UserError(
            "the engine's rules leave no token that an answer could begin with: relax "
            "allowed_first_tokens or forbidden_first_tokens"
        )
    return Rules(eos_V, min_tokens, banned_V if first_texts or never_first_texts else None)


def _single_token(tokenizer: Tokenizer, text: str, vocabulary: int) -> int:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) != 1 or tokens[0] >= vocabulary:
        raise UserError(
            f"the engine's allowed_first_tokens or forbidden_first_tokens has {text!r}, which is "
            f"{len(tokens)} tokens of this model: give texts "
            "of exactly one token (often with the space before the word)"
        )
    return tokens[0]


@dataclass(frozen=True)
class LengthLimits:
    """Holds the lengths that the settings allow and that the model has positions for."""

    max_completion_tokens: int
    max_prompt_tokens: int | None
    positions: int | None  # None: the model has no limit
    embeddings: int = sys.maxsize  # tokens that the model knows

    def check(self, prompt: Prompt) -> None:
        """Raises `UserError` for a prompt that is empty or too long."""
        n, limit, positions = len(prompt.tokens), self.max_prompt_tokens, self.positions
        if n < 1:
            raise UserError(f"a prompt of task {prompt.task} has no tokens, but at least 1 is needed")
        if limit is not None and n > limit:
            raise UserError(
                f"a prompt has {n} tokens, and this engine was made for {limit}: drop it, or raise --prompts.max-tokens"
            )
        require_embedded(int(np.max(prompt.tokens)), self.embeddings)
        if positions is not None and n >= positions:
            raise UserError(
                f"a prompt has {n} tokens, which leaves no room for an answer in the model's {positions} positions"
            )

    def longest_completion(self, prompt: Prompt) -> int:
        """Returns the most tokens a completion of `prompt` can have."""
        limit = self.max_completion_tokens
        return limit if self.positions is None else min(limit, self.positions - len(prompt.tokens))


def match_weights(
    model: nn.Module, weights: Mapping[str, Tensor], is_required: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Returns the parameters into which `weights` (by Hugging Face name) are to be copied, by the names that these have
    there.

    A tied weight may be given under any of its names; `is_required` says which parameters have to be given. Raises
    `KeyError` for an unknown or a missing name and `ValueError` for a wrong shape.
    """
    parameters = model.state_dict(keep_vars=True)
    for name, value in weights.items():
        if name not in parameters:
            raise KeyError(f"the model has no weight named {name}")
        if parameters[name].shape != value.shape:
            shape = tuple(parameters[name].shape)
            raise ValueError(f"weight {name} has shape {tuple(value.shape)}, the model's {shape}")
    matched_ids = {id(parameters[name]) for name in weights}
    missing_names = [name for name, p in model.named_parameters() if is_required(name) and id(p) not in matched_ids]
    if missing_names:
        raise KeyError(f"{len(missing_names)} of the model's weights are missing, the first is {missing_names[0]}")
    return {name: parameters[name] for name in weights}


def positions(config: Any, limit: int) -> int:
    """Returns the number of tokens that a model has positions for, at most `most`."""
    count = getattr(config, "max_position_embeddings", None) or limit
    if config.model_type in _AFTER_PADDING:
        count -= config.pad_token_id + 1
    return min(limit, count)
