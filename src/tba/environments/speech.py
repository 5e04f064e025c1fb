"""Turns and observations as tokens.

Invariant: what the policy has sampled is never made into tokens again. An observation is encoded by itself and
appended, with all that the model's own chat template puts between the end of one turn and the beginning of the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tba.environments.episode import EpisodeFailed, Observation
from tba.errors import UserError
from tba.foreign import templated
from tba.protocols import Tokenizer
from tba.types import IntArray, Json, quoted

_SAID, _HEARD = "\u2039said\u203a", "\u2039heard\u203a"  # stand-ins in a conversation that the template writes


class Speech:
    """How observations and scripted turns are written for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, chat: bool, tools: Sequence[Json] = ()) -> None:
        """chat: prompts are chats, so that observations become messages of the user, or of the `tools` (schemas)."""
        self._tokenizer, self._tools = tokenizer, tools
        eos = tokenizer.eos_token_id
        self._ends: list[int] = getattr(tokenizer, "end_of_turn", [] if eos is None else [eos])
        self._before, self._after = self._between() if chat else ("", "")
        self._by_tools = chat and bool(tools) and _HEARD in self._following(_tool_messages([("tool", _HEARD)]))

    def observation(self, observation: Observation, ended: bool = True) -> IntArray:
        """Returns the tokens of an observation. `ended`: the turn before it has its end-of-text token already.

        Raises `EpisodeFailed` where tools have given what the tokenizer cannot write: it may be what the policy gave
        them. Raises `UserError` where the environment itself says so.
        """
        if observation.results and self._by_tools:
            text = self._following(_tool_messages(observation.results))
        else:
            text = self._before + observation.text + self._after
        if ended and self._ends:
            text = text.removeprefix(self._tokenizer.decode(self._ends, skip_special_tokens=False))
        try:
            return np.array(self._encoded(text), dtype=np.int32)
        except UserError as error:
            if observation.results:
                raise EpisodeFailed(str(error)) from error
            raise

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

    def _between(self) -> tuple[str, str]:
        """Returns what the chat template writes between a turn and the user's message that follows, and between that
        message and the next turn.
        """
        before, heard, after = self._following([{"role": "user", "content": _HEARD}]).partition(_HEARD)
        if not heard:
            raise UserError(
                "the tokenizer's chat template does not write a user's message after a turn: take another model"
            )
        return before, after

    def _following(self, messages: Sequence[dict[str, str]]) -> str:
        """Returns what the chat template writes after a turn that these messages follow; empty where it cannot."""
        turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SAID}, *messages]
        try:
            return templated(self._tokenizer, turns, self._tools).partition(_SAID)[2]
        except UserError:
            if messages[0]["role"] == "user":
                raise
            return ""  # a template that knows no tools: what they give becomes a message of the user


def _tool_messages(results: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": "tool", "name": name, "content": result} for name, result in results]
