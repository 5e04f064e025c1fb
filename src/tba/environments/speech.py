"""Turns and observations as tokens.

Invariant: what the policy has sampled is never made into tokens again. An observation is encoded by itself and
appended, with all that the model's own chat template puts between the end of one turn and the beginning of the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tba.errors import UserError
from tba.foreign import templated
from tba.protocols import Tokenizer
from tba.types import IntArray, quoted

_SAID, _HEARD = "\u2039said\u203a", "\u2039heard\u203a"  # stand-ins in a conversation that the template writes


class Speech:
    """How observations and scripted turns are written for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, chat: bool) -> None:
        """chat: prompts are chats, so that observations become messages of the user."""
        self._tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        self._ends: list[int] = getattr(tokenizer, "end_of_turn", [] if eos is None else [eos])
        self._before, self._after = _between(tokenizer) if chat else ("", "")

    def observation(self, text: str, ended: bool = True) -> IntArray:
        """Returns the tokens of an observation. `ended`: the turn before it has its end-of-text token already."""
        before = self._before
        if ended and self._ends:
            before = before.removeprefix(self._tokenizer.decode(self._ends, skip_special_tokens=False))
        return np.array(self._encoded(before + text + self._after), dtype=np.int32)

    def turn(self, text: str) -> IntArray:
        """Returns the tokens of a turn that somebody else has written."""
        return np.array([*self._encoded(text), *self._ends], dtype=np.int32)

    def text(self, tokens: IntArray) -> str:
        """Returns tokens as text, without special ones."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def _encoded(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []
        except Exception as error:  # tokenizers of the Rust library raise nothing more precise
            raise UserError(
                f"the model's tokenizer cannot write what the environment said, {quoted(text)} ({error}): let it say "
                "what can be written with the characters that it knows, or take another model (--model.path)"
            ) from error


def _between(tokenizer: Any) -> tuple[str, str]:
    """Returns what a chat template writes between a turn and the message that follows, and between that message and the
    next turn.
    """
    turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SAID}]
    text = templated(tokenizer, [*turns, {"role": "user", "content": _HEARD}])
    before, heard, after = text.partition(_SAID)[2].partition(_HEARD)
    if not heard:
        raise UserError(
            "the tokenizer's chat template does not write a user's message after a turn: take another model"
        )
    return before, after
