"""Turns and observations as tokens.

Invariant: what the policy has sampled is never made into tokens again. An observation is encoded by itself and
appended, with all that the model's own chat template puts between the end of one turn and the beginning of the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tba.environments.episode import EpisodeFailed, Observation
from tba.errors import UserError
from tba.markup import THOUGHT, Markup, control_tokens, decode_tokens, encode_continuation, encode_markup, visible_text
from tba.protocols import Tokenizer
from tba.turns import LATER_SLOT, AssistantTurn, assistant_turn, render_after_answer, tool_message
from tba.types import IntArray, Json, quote


class Speech:
    """How observations and scripted turns are written for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, chat: bool, tools: Sequence[Json] = ()) -> None:
        """chat: prompts are chats, so that observations become messages of the user, or of the `tools` (schemas)."""
        self._tokenizer, self._tools, self._chat = tokenizer, tools, chat
        ends = getattr(tokenizer, "end_of_turn", True)  # false: its turns have no end, its answers have
        self._form = assistant_turn(tokenizer, chat, tools) if ends else AssistantTurn()
        self._before, self._after = self._between() if chat else ("", "")
        self._by_tools = chat and bool(tools) and LATER_SLOT in self._behind([tool_message("tool", LATER_SLOT)])

    def said(self, tokens: Sequence[int], text: str | None = None) -> str:
        """Returns a turn as its environment is told it. text: its own, without a stop string; None: its tokens'.

        Where calls are read from it, it has the beginning of a thought that the template has begun and the turn does
        not end.
        """
        text = decode_tokens(self._tokenizer, tokens) if text is None else text
        if not self._tools:
            return text
        return f"{THOUGHT[0]}\n{text}" if self._form.begins_in_thought and THOUGHT[1] not in text else text

    def observation(self, observation: Observation, ended: bool = True, by: int | None = None) -> IntArray:
        """Returns the tokens of an observation. `ended`: the turn before it has a token that ends it already, `by`
        says which; None: the template's own.

        Raises `EpisodeFailed` where tools have given what the tokenizer cannot write: it may be what the policy gave
        them. Raises `UserError` where the environment itself says so.
        """
        tools = self._spoken_by_tools(observation)
        text = self._heard(observation) if tools else self._spoken(observation)
        end = (self._form.tool_frame if tools else self._form.user_frame).end
        if not ended or (self._form.end_names_speaker and end is not None and by not in (None, end.token)):
            end = None
        try:
            tokens = self._encoded(text) if self._chat else encode_continuation(self._encoded, text)
            if end is not None and text.startswith(end.closing_text) and end.token in tokens:
                # cut off here and not in the text, since some tokens take the blanks behind them
                tokens = tokens[tokens.index(end.token) + 1 :]
            return np.array(tokens, dtype=np.int32)
        except UserError as error:
            if observation.results:
                raise EpisodeFailed(str(error)) from error
            raise

    def turn(self, text: str, heard: Observation | None = None) -> IntArray:
        """Returns the tokens of a turn that somebody else has written, before what is `heard` then; None: it is the
        last.
        """
        frame = self._form.user_frame if heard is not None else None
        if heard is not None and self._spoken_by_tools(heard):
            frame = self._form.tool_frame
        return np.array(self._form.tokens(text, self._encoded, frame), dtype=np.int32)

    def text(self, tokens: IntArray) -> str:
        """Returns tokens as text, without special ones but for the marks of thoughts and calls."""
        return decode_tokens(self._tokenizer, tokens.tolist())

    def _encoded(self, text: str) -> list[int]:
        try:
            return encode_markup(self._tokenizer, text) if text else []
        except Exception as error:  # tokenizers of the Rust library raise nothing more precise
            raise UserError(
                f"the model's tokenizer cannot write what the environment said, {quote(visible_text(text))} ({error}): "
                "let it say what can be written with the characters that it knows, or take another model (--model.path)"
            ) from error

    def _spoken(self, observation: Observation) -> Markup:
        """Returns an observation as a message of the user's, or as the text that goes on."""
        return Markup(self._before + control_tokens(self._tokenizer).markup(observation.text) + self._after)

    def _spoken_by_tools(self, observation: Observation) -> bool:
        return bool(observation.results) and self._by_tools

    def _between(self) -> tuple[str, str]:
        """Returns what the chat template writes between a turn and the user's message that follows, and between that
        message and the next turn.
        """
        written = render_after_answer(self._tokenizer, [{"role": "user", "content": LATER_SLOT}], self._tools)
        before, heard, after = written.partition(LATER_SLOT)
        if not heard:
            raise UserError(
                "the tokenizer's chat template does not write a user's message after a turn: take another model"
            )
        return before, after

    def _heard(self, observation: Observation) -> str:
        """Returns what the chat template writes after a turn whose calls are answered: under the names that the policy
        gave them, unless the template refuses these.
        """
        own, none = observation.calls, ("",) * len(observation.results)
        messages = [
            [tool_message(name, said, call) for (name, said), call in zip(observation.results, calls, strict=True)]
            for calls in ((own, none) if own else (none,))
        ]
        return next(filter(None, map(self._behind, messages)), "")

    def _behind(self, messages: Sequence[dict[str, str]]) -> str:
        """Returns what the chat template writes after a turn that tools answer; empty where it knows no tools: what
        they give becomes a message of the user.
        """
        try:
            return render_after_answer(self._tokenizer, messages, self._tools)
        except UserError:
            return ""
