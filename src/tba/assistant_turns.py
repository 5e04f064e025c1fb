"""Finds how a model's chat template writes an assistant's turn: what begins it, and the token that ends it.

Invariant: all of it is read off what the template itself writes around an answer. Nothing here knows a family of
models, and whoever needs the end of a turn (sampling, imports, supervised training, environments) asks here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tba.chat_prompts import chat_markup
from tba.errors import UserError
from tba.markup import THOUGHT, ControlTokens, Markup, control_tokens, encode_continuation
from tba.types import Json

# stand-ins for texts in a conversation that the template writes
USER_SLOT, ANSWER_SLOT, LATER_SLOT = "\u2039asked\u203a", "\u2039said\u203a", "\u2039heard\u203a"
_USER_MESSAGE = {"role": "user", "content": USER_SLOT}
_ANSWER_MESSAGE = {"role": "assistant", "content": ANSWER_SLOT}
_THOUGHT_FIELDS = ("thinking", "reasoning_content")  # where templates look for the thoughts of an answer
_LEAD_CHARACTERS = 32  # characters of a prompt with which an answer to it is encoded
CALL_ID = "0toolcall"  # nine letters and digits, as Mistral's templates want them


@dataclass(frozen=True)
class TurnEnd:
    """Holds the token that ends a turn."""

    token: int
    text: str
    gap: str = ""  # what the template writes before it: blanks, or other special tokens

    @property
    def closing_text(self) -> str:
        """Returns all that the template writes behind an answer, up to and with the token."""
        return self.gap + self.text


@dataclass(frozen=True)
class AnswerFrame:
    """Holds what a template writes around an answer."""

    opening: str = ""  # behind what begins the turn in a prompt: blanks, or thoughts for an answer that has none
    end: TurnEnd | None = None

    @property
    def token(self) -> int | None:
        """Returns the token that ends the answer; None where nothing does."""
        return None if self.end is None else self.end.token

    @property
    def gap(self) -> str:
        """Returns what stands between the answer and its end."""
        return "" if self.end is None else self.end.gap


@dataclass(frozen=True)
class AssistantTurn:
    """Holds how a template writes an assistant's turn: as the last one, before a user's message and before a tool's.

    Without a template an answer ends in the end-of-text token, if there is one.
    """

    final_frame: AnswerFrame = AnswerFrame()
    user_frame: AnswerFrame = AnswerFrame()
    tool_frame: AnswerFrame = AnswerFrame()
    end_names_speaker: bool = False  # the ends begin the next message and tell who speaks in it (GLM)
    end_closes_thoughts: bool = False  # the end of earlier turns ends thoughts too, and so no turn (gpt-oss)
    lead: str = ""  # the end of what begins the turn in a prompt, from its last special token on
    special_texts: tuple[str, ...] = ()  # the special tokens
    control: ControlTokens = field(default_factory=ControlTokens)

    @property
    def begins_in_thought(self) -> bool:
        """Returns whether turns begin within a thought."""
        return self.lead.rstrip().endswith(THOUGHT[0])

    @property
    def frames(self) -> tuple[AnswerFrame, AnswerFrame, AnswerFrame]:
        """Returns what stands around the last turn, one before a user's message and one before a tool's."""
        return self.final_frame, self.user_frame, self.tool_frame

    @property
    def end_tokens(self) -> frozenset[int]:
        """Returns the tokens that may end a turn which is being generated."""
        frames = self.frames[: 1 if self.end_closes_thoughts else None]
        return frozenset(frame.token for frame in frames if frame.token is not None)

    def text(self, answer: str, frame: AnswerFrame | None = None) -> Markup:
        """Returns an answer with what the template writes around it, without the token that ends it. `frame` defaults
        to `final_frame`.

        A thought that the prompt has begun already is not begun again. Marks of turns in the answer are text.
        """
        frame = frame or self.final_frame
        answer = answer.removesuffix(frame.gap)
        if self.begins_in_thought and answer.lstrip().startswith(THOUGHT[0]):
            opening, answer = "", answer.lstrip().removeprefix(THOUGHT[0]).removeprefix("\n")
        else:
            opening = self._text_before_answer(answer, frame.opening)
            answer = answer.removeprefix(opening)
        return Markup(opening + self.control.markup(answer, is_turn=True) + frame.gap)

    def _text_before_answer(self, answer: str, opening: str) -> str:
        """Returns the part of `opening` that is still missing before an answer, which may begin with a part of it."""
        blanks = opening[: len(opening) - len(opening.lstrip())]
        if opening == blanks and answer.startswith(self.special_texts):
            return ""  # a call that is written with marks of its own
        if THOUGHT[1] in answer and THOUGHT[1] in opening:
            return blanks if THOUGHT[0] in opening else ""
        return opening

    def tokens(self, answer: str, encode: Callable[[str], list[int]], frame: AnswerFrame | None = None) -> list[int]:
        """Returns the tokens of an answer as the template writes it, up to and with the token that ends it. `encode`
        does what `markup.encode_markup` does for one tokenizer, and raises what that raises.
        """
        return self.with_end(self.text(answer, frame), encode, frame)

    def with_end(self, text: Markup, encode: Callable[[str], list[int]], frame: AnswerFrame | None = None) -> list[int]:
        """Returns the tokens of a text that `text` has written, and the token that ends the turn."""
        end = (frame or self.final_frame).end
        return [*encode_continuation(encode, text, self.lead), *([end.token] if end else ())]

    def after_prompt(self, prompt: str) -> AssistantTurn:
        """Returns this turn for an answer that continues a prompt without a template."""
        return replace(self, lead=prompt[-_LEAD_CHARACTERS:])


def assistant_turn(tokenizer: Any, chat: bool = True, tools: Sequence[Json] = ()) -> AssistantTurn:
    """Returns how the tokenizer's template writes an assistant's turn.

    Without `chat` prompts are texts, and an answer ends in the end-of-text token. `tools` are schemas, which a template
    may need in order to write a tool's message. A template that cannot write a conversation counts as empty.
    """
    eos = getattr(tokenizer, "eos_token_id", None)
    text_end = None if eos is None else TurnEnd(eos, tokenizer.decode([eos], skip_special_tokens=False))
    text_frame = AnswerFrame("", text_end)
    if not chat or not getattr(tokenizer, "chat_template", None):
        return AssistantTurn(text_frame, text_frame, text_frame)  # a text may be written out in full, with its markup
    starts = {getattr(tokenizer, "bos_token_id", None)} - {eos}  # a token that begins texts ends no turn
    special_tokens = {text: token for text, token in _special_tokens(tokenizer).items() if text and token not in starts}
    prompt = _render(tokenizer, [_USER_MESSAGE], tools)
    final_text = _render(tokenizer, [_USER_MESSAGE, _ANSWER_MESSAGE], tools, ends_with_answer=True)
    user_text = _render(tokenizer, [_USER_MESSAGE, _ANSWER_MESSAGE, {"role": "user", "content": LATER_SLOT}], tools)
    tool_text = _render(tokenizer, [_USER_MESSAGE, _ANSWER_MESSAGE, tool_message("tool", LATER_SLOT)], tools)
    thoughtful_answer = {**_ANSWER_MESSAGE, **dict.fromkeys(_THOUGHT_FIELDS, LATER_SLOT)}
    thought_text = _render(tokenizer, [_USER_MESSAGE, thoughtful_answer], tools, ends_with_answer=True)
    before_answer = _text_before_answer(thought_text, prompt)
    final_tail, user_tail, tool_tail = (text.partition(ANSWER_SLOT)[2] for text in (final_text, user_text, tool_text))
    # The tail after the last message may hold more than its end: whatever closes the conversation.
    leading_ends = _leading_ends(final_tail, special_tokens)
    possible_ends = [end for end in leading_ends if user_tail.startswith(end.closing_text)] or leading_ends[:1]
    final_end = possible_ends[-1] if possible_ends else None

    def end_before(tail: str) -> TurnEnd | None:
        """Returns the end of a turn that another message follows."""
        if final_end is not None and tail.startswith(final_end.closing_text):
            return final_end
        return next(iter(_leading_ends(tail, special_tokens)), None)

    user_end = end_before(user_tail)
    turn_start = prompt.rfind(USER_SLOT) + len(USER_SLOT) if USER_SLOT in prompt else len(prompt)
    lead_start = max((turn_start, *(prompt.rfind(mark) for mark in special_tokens)))
    usual_end = user_end or final_end or text_frame.end
    return AssistantTurn(
        AnswerFrame(_text_before_answer(final_text, prompt), final_end or usual_end),
        AnswerFrame(_text_before_answer(user_text, prompt), usual_end),
        AnswerFrame(_text_before_answer(tool_text, prompt), end_before(tool_tail) or usual_end),
        end_names_speaker=user_end is not None and bool(final_text) and final_end is None,
        end_closes_thoughts=bool(final_end and user_end and user_end != final_end and user_end.text in before_answer),
        lead=prompt[lead_start:],
        special_texts=tuple(special_tokens),
        control=control_tokens(tokenizer),
    )


def _text_before_answer(text: str, prompt: str) -> str:
    """Returns what stands between the prompt and the answer in a conversation that begins with the prompt."""
    before, slot, _ = text.partition(ANSWER_SLOT)
    return before.removeprefix(prompt) if slot and prompt and before.startswith(prompt) else ""


def _leading_ends(tail: str, special_tokens: Mapping[str, int]) -> list[TurnEnd]:
    """Returns the special tokens at the beginning of a text that have nothing but blanks between them."""
    turn_ends: list[TurnEnd] = []
    remaining_text = tail
    while matches := [special for special in special_tokens if remaining_text.lstrip().startswith(special)]:
        special = max(matches, key=len)
        remaining_text = remaining_text.lstrip().removeprefix(special)
        gap = tail[: len(tail) - len(remaining_text)].removesuffix(special)
        turn_ends.append(TurnEnd(special_tokens[special], special, gap))
    return turn_ends


def add_end_tokens(generation_config: Any, tokenizer: Any) -> None:
    """Adds the tokens that end a turn in the tokenizer's template to a model's generation settings, in place. So other
    programs that sample from the model end its answers where it has learnt to.
    """
    eos_ids = generation_config.eos_token_id
    end_ids = set(eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids])
    if getattr(tokenizer, "chat_template", None) and not (turn_ids := assistant_turn(tokenizer).end_tokens) <= end_ids:
        eos_token = tokenizer.eos_token_id
        generation_config.eos_token_id = sorted(end_ids | turn_ids | (set() if eos_token is None else {eos_token}))


def tool_message(name: str, content: str, call: str = "") -> dict[str, str]:
    """Returns the chat message with a tool's result; `call` is the id of the call, where the policy gave it one."""
    return {"role": "tool", "name": name, "content": content, "tool_call_id": call or CALL_ID}


def render_after_answer(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Json] = (), complete: bool = False
) -> Markup:
    """Returns what the template writes behind an answer (its end included) for the messages that follow it. Raises
    `UserError` where the template cannot write them. complete: as in `chat_markup`.
    """
    text = chat_markup(tokenizer, [_USER_MESSAGE, _ANSWER_MESSAGE, *messages], tools, complete=complete)
    return Markup(text.partition(ANSWER_SLOT)[2])


def special_id(tokenizer: Any, text: str) -> int | None:
    """Returns the special token that is spelled as `text`; None where there is none, or decoded answers show it."""
    token = _special_tokens(tokenizer).get(text)
    return None if token is None or tokenizer.decode([token], skip_special_tokens=True) else token


def _render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Json], ends_with_answer: bool = False
) -> str:
    try:
        return chat_markup(tokenizer, messages, tools, ends_with_answer, complete=False)
    except UserError:
        return ""


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the tokens that a tokenizer looks for in a text before anything else, by their text."""
    added: dict[str, int] = dict(tokenizer.get_added_vocab()) if hasattr(tokenizer, "get_added_vocab") else {}
    names, ids = getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ())
    return added | dict(zip(names, ids, strict=True))
