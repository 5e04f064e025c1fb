"""Turns and observations as tokens.

Invariant: what the policy has sampled is never made into tokens again. An observation is encoded by itself and
appended, with all that the model's own chat template puts between the end of one turn and the beginning of the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tba.assistant_turns import (
    LATER_SLOT,
    AnswerFrame,
    AssistantTurn,
    assistant_turn,
    render_after_answer,
    tool_message,
)
from tba.environments.episode import EpisodeFailed, Observation
from tba.errors import UserError
from tba.markup import THOUGHT, Markup, control_tokens, decode_tokens, encode_continuation, encode_markup, visible_text
from tba.protocols import Tokenizer
from tba.types import IntArray, Json, Message, quote


class TurnEncoder:
    """Writes observations and scripted turns as tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, chat: bool, tools: Sequence[Json] = ()) -> None:
        """chat: prompts are chats; observations are messages of the user, or of the `tools` (their schemas)."""
        self._tokenizer, self._tools, self._chat = tokenizer, tools, chat
        turns_end = getattr(tokenizer, "end_of_turn", True)  # false: its turns have no end, its answers have
        self._frames = assistant_turn(tokenizer, chat, tools) if turns_end else AssistantTurn()
        self._user_prefix, self._user_suffix = self._text_around_user() if chat else ("", "")
        self._has_tool_messages = (
            chat and bool(tools) and LATER_SLOT in self._text_after_turn([tool_message("tool", LATER_SLOT)])
        )

    def turn_text(self, tokens: Sequence[int], text: str | None = None) -> str:
        """Returns a turn's text for its environment. text: its own, without a stop string; None: that of its tokens.

        Where calls are read from it, it has the beginning of a thought that the template has begun and the turn does
        not end.
        """
        text = decode_tokens(self._tokenizer, tokens) if text is None else text
        if not self._tools:
            return text
        return f"{THOUGHT[0]}\n{text}" if self._frames.begins_in_thought and THOUGHT[1] not in text else text

    def observation(self, observation: Observation, has_end: bool = True, end_token: int | None = None) -> IntArray:
        """Returns the tokens of an observation. With `has_end` the turn before it already has the token that ends it,
        which is `end_token`; None: the template's own.

        Raises `EpisodeFailed` where tools have given what the tokenizer cannot write: it may be what the policy gave
        them. Raises `UserError` where the environment itself says so.
        """
        is_from_tools = self._is_tool_message(observation)
        text = self._tool_messages(observation) if is_from_tools else self._user_message(observation)
        try:
            return self._encode_after_turn(text, self.frame_before(observation), has_end, end_token)
        except UserError as error:
            if observation.results:
                raise EpisodeFailed(str(error)) from error
            raise

    def messages(self, messages: Sequence[Message], has_end: bool = True, end_token: int | None = None) -> IntArray:
        """Returns the tokens of any messages that follow a turn, as the chat template writes them. Raises `UserError`
        where it cannot write them, or prompts are no chats. The rest is as in `observation`.
        """
        if not self._chat:
            raise UserError("several messages of different speakers follow a turn: only a chat template writes them")
        text = render_after_answer(self._tokenizer, messages, self._tools, complete=True)
        return self._encode_after_turn(text, self._frames.user_frame, has_end, end_token)

    def _encode_after_turn(self, text: Markup, frame: AnswerFrame, has_end: bool, end_token: int | None) -> IntArray:
        end = frame.end
        if not has_end or (self._frames.end_names_speaker and end is not None and end_token not in (None, end.token)):
            end = None
        tokens = self._encode(text) if self._chat else encode_continuation(self._encode, text)
        if end is not None and text.startswith(end.closing_text) and end.token in tokens:
            # cut off here and not in the text, since some tokens take the blanks behind them
            tokens = tokens[tokens.index(end.token) + 1 :]
        return np.array(tokens, dtype=np.int32)

    def turn(self, text: str, following_observation: Observation | None = None) -> IntArray:
        """Returns the tokens of a turn that somebody else has written, before the observation that follows it; None: it
        is the last.
        """
        frame = self.frame_before(following_observation)
        return np.array(self._frames.tokens(text, self._encode, frame), dtype=np.int32)

    @property
    def form(self) -> AssistantTurn:
        """Returns how turns are written; empty where no token ends them."""
        return self._frames

    def frame_before(self, observation: Observation | None) -> AnswerFrame:
        """Returns what stands around a turn that an observation follows; None: around the last one."""
        if observation is None:
            return self._frames.final_frame
        return self._frames.tool_frame if self._is_tool_message(observation) else self._frames.user_frame

    @property
    def has_tools(self) -> bool:
        """Returns whether prompts have tools."""
        return bool(self._tools)

    def end_of(self, turn: Sequence[int]) -> tuple[bool, int | None]:
        """Returns whether a turn (its tokens) has a token that ended it, and its last token."""
        last_token = int(turn[-1]) if len(turn) else None
        return last_token in self._frames.end_tokens, last_token

    def text(self, tokens: IntArray) -> str:
        """Returns tokens as text, without special ones but for the marks of thoughts and calls."""
        return decode_tokens(self._tokenizer, tokens.tolist())

    def _encode(self, text: str) -> list[int]:
        try:
            return encode_markup(self._tokenizer, text) if text else []
        except Exception as error:  # tokenizers of the Rust library raise nothing more precise
            raise UserError(
                f"the model's tokenizer cannot write what the environment said, {quote(visible_text(text))} ({error}): "
                "let it say what can be written with the characters that it knows, or take another model (--model.path)"
            ) from error

    def _user_message(self, observation: Observation) -> Markup:
        """Returns an observation as a message of the user's, or as the text that goes on."""
        return Markup(self._user_prefix + control_tokens(self._tokenizer).markup(observation.text) + self._user_suffix)

    def _is_tool_message(self, observation: Observation) -> bool:
        return bool(observation.results) and self._has_tool_messages

    def _text_around_user(self) -> tuple[str, str]:
        """Returns what the chat template writes between a turn and the user's message that follows, and between that
        message and the next turn.
        """
        template_text = render_after_answer(self._tokenizer, [{"role": "user", "content": LATER_SLOT}], self._tools)
        prefix, separator, suffix = template_text.partition(LATER_SLOT)
        if not separator:
            raise UserError(
                "the tokenizer's chat template does not write a user's message after a turn: take another model"
            )
        return prefix, suffix

    def _tool_messages(self, observation: Observation) -> Markup:
        """Returns what the chat template writes after a turn whose calls are answered: under the names that the policy
        gave them, unless the template refuses these.
        """
        call_ids, no_ids = observation.call_ids, ("",) * len(observation.results)
        messages = [
            [tool_message(name, result, id_) for (name, result), id_ in zip(observation.results, ids, strict=True)]
            for ids in ((call_ids, no_ids) if call_ids else (no_ids,))
        ]
        return next(filter(None, map(self._text_after_turn, messages)), Markup(""))

    def _text_after_turn(self, messages: Sequence[dict[str, str]]) -> Markup:
        """Returns what the chat template writes after a turn that tools answer; empty where it knows no tools: what
        they give becomes a message of the user.
        """
        try:
            return render_after_answer(self._tokenizer, messages, self._tools)
        except UserError:
            return Markup("")
