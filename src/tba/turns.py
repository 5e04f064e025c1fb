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
from tba.markup import THOUGHT, ControlTokens, Markup, continuation, control_tokens
from tba.types import Json

# stand-ins in a conversation that the template writes
ASKED, SAID, HEARD = "\u2039asked\u203a", "\u2039said\u203a", "\u2039heard\u203a"
_ASKED = {"role": "user", "content": ASKED}
_ANSWERED = {"role": "assistant", "content": SAID}
_THINKING = ("thinking", "reasoning_content")  # where templates look for the thoughts of an answer
_LEAD = 32  # characters of a prompt with which an answer to it is encoded
CALL_ID = "0toolcall"  # nine letters and digits, as Mistral's templates want them


@dataclass(frozen=True)
class End:
    """The token that ends a turn."""

    token: int
    text: str
    gap: str = ""  # what the template writes before it: blanks, or other special tokens

    @property
    def written(self) -> str:
        """All that is written behind an answer, up to and with the token."""
        return self.gap + self.text


@dataclass(frozen=True)
class Frame:
    """Holds what a template writes around an answer."""

    opening: str = ""  # behind what begins the turn in a prompt: blanks, or thoughts for an answer that has none
    end: End | None = None

    @property
    def token(self) -> int | None:
        """The token that ends the answer; None: nothing does."""
        return None if self.end is None else self.end.token

    @property
    def gap(self) -> str:
        """Returns what stands between the answer and its end."""
        return "" if self.end is None else self.end.gap


@dataclass(frozen=True)
class AssistantTurn:
    """Holds how a template writes an assistant's turn: as the last one, before a user's message, before what tools
    give.

    Without a template an answer ends in the end-of-text token, if there is one.
    """

    last: Frame = Frame()
    heard: Frame = Frame()
    called: Frame = Frame()
    heads: bool = False  # the ends are written with the message that follows and tell who speaks in it (GLM)
    parts: bool = False  # what ends a turn that others have answered also ends its thoughts, and no turn (gpt-oss)
    lead: str = ""  # the end of what begins the turn in a prompt, from its last special token on
    marks: tuple[str, ...] = ()  # the special tokens
    control: ControlTokens = field(default_factory=ControlTokens)

    @property
    def thinks(self) -> bool:
        """Returns whether turns begin within a thought."""
        return self.lead.rstrip().endswith(THOUGHT[0])

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a turn when it is said."""
        frames = (self.last,) if self.parts else (self.last, self.heard, self.called)
        return frozenset(frame.token for frame in frames if frame.token is not None)

    def text(self, answer: str, frame: Frame | None = None) -> Markup:
        """Returns an answer with what the template writes around it, but for its end. frame: `last`, unless another is
        given.

        A thought that the prompt has begun already is not begun again. Marks of turns in the answer are text.
        """
        frame = frame or self.last
        answer = answer.removesuffix(frame.gap)
        if self.thinks and answer.lstrip().startswith(THOUGHT[0]):
            opening, answer = "", answer.lstrip().removeprefix(THOUGHT[0]).removeprefix("\n")
        else:
            opening = self._opening(answer, frame.opening)
            answer = answer.removeprefix(opening)
        return Markup(opening + self.control.markup(answer, turn=True) + frame.gap)

    def _opening(self, answer: str, opening: str) -> str:
        """Returns what the template writes before an answer that has some of it already."""
        blanks = opening[: len(opening) - len(opening.lstrip())]
        if opening == blanks and answer.startswith(self.marks):
            return ""  # a call that is written with marks of its own
        if THOUGHT[1] in answer and THOUGHT[1] in opening:
            return blanks if THOUGHT[0] in opening else ""
        return opening

    def tokens(self, answer: str, encode: Callable[[str], list[int]], frame: Frame | None = None) -> list[int]:
        """Returns the tokens of an answer as the template writes it, up to and with the one that ends it; `encode` as
        `markup.encoded` does. What it raises is raised.
        """
        return self.closed(self.text(answer, frame), encode, frame)

    def closed(self, text: Markup, encode: Callable[[str], list[int]], frame: Frame | None = None) -> list[int]:
        """Returns the tokens of a text that is written as a turn's already, and the one that ends it."""
        end = (frame or self.last).end
        return [*continuation(encode, text, self.lead), *([end.token] if end else ())]

    def behind(self, prompt: str) -> AssistantTurn:
        """Returns how an answer to a text is written, behind its last characters."""
        return replace(self, lead=prompt[-_LEAD:])


def assistant_turn(tokenizer: Any, chat: bool = True, tools: Sequence[Json] = ()) -> AssistantTurn:
    """Returns what begins and what ends a turn.

    chat: prompts are chats; else an answer ends in the end-of-text token. tools: their schemas, which a template may
    need in order to write what they give. A template that cannot write a conversation says nothing.
    """
    eos = getattr(tokenizer, "eos_token_id", None)
    plain = Frame("", None if eos is None else End(eos, tokenizer.decode([eos], skip_special_tokens=False)))
    if not chat or not getattr(tokenizer, "chat_template", None):
        return AssistantTurn(plain, plain, plain)  # a text may be written out in full, with its markup
    begins = getattr(tokenizer, "bos_token_id", None)  # a text, and therefore no end of a turn
    marks = {text: token for text, token in _special(tokenizer).items() if text and (token != begins or token == eos)}
    begun = _written(tokenizer, [_ASKED], tools)
    alone = _written(tokenizer, [_ASKED, _ANSWERED], tools, answered=True)
    heard = _written(tokenizer, [_ASKED, _ANSWERED, {"role": "user", "content": HEARD}], tools)
    called = _written(tokenizer, [_ASKED, _ANSWERED, tool_message("tool", HEARD)], tools)
    thought = _written(tokenizer, [_ASKED, {**_ANSWERED, **dict.fromkeys(_THINKING, HEARD)}], tools, answered=True)
    behind, after, told = (text.partition(SAID)[2] for text in (alone, heard, called))
    # also what stands behind the last message of all; with a user's message, what begins that
    run = _run(behind, marks)
    closing = [end for end in run if after.startswith(end.written)] or run[:1]
    own = closing[-1] if closing else None

    def before(rest: str) -> End | None:
        """Returns what ends a turn that others have answered."""
        return own if own is not None and rest.startswith(own.written) else next(iter(_run(rest, marks)), None)

    end = before(after)
    begins_at = begun.rfind(ASKED) + len(ASKED) if ASKED in begun else len(begun)
    at = max((begins_at, *(begun.rfind(mark) for mark in marks)))
    answered = end or own or plain.end
    return AssistantTurn(
        Frame(_opening(alone, begun), own or answered),
        Frame(_opening(heard, begun), answered),
        Frame(_opening(called, begun), before(told) or answered),
        heads=end is not None and bool(alone) and own is None,
        parts=own is not None and end is not None and end != own and end.text in _opening(thought, begun),
        lead=begun[at:],
        marks=tuple(marks),
        control=control_tokens(tokenizer),
    )


def _opening(text: str, begun: str) -> str:
    """Returns what stands before the answer in a conversation that begins as the prompt `begun` does."""
    before, said, _ = text.partition(SAID)
    return before.removeprefix(begun) if said and begun and before.startswith(begun) else ""


def _run(behind: str, marks: Mapping[str, int]) -> list[End]:
    """Returns the special tokens that a text begins with, one after the other, with nothing but blanks between them."""
    found: list[End] = []
    rest = behind
    while mark := max((mark for mark in marks if rest.lstrip().startswith(mark)), key=len, default=""):
        rest = rest.lstrip().removeprefix(mark)
        found.append(End(marks[mark], mark, behind[: len(behind) - len(rest)].removesuffix(mark)))
    return found


def add_ends(generation_config: Any, tokenizer: Any) -> None:
    """Adds what ends a turn in the tokenizer's template to a model's generation settings, in place, so that whoever
    samples from the model ends its answers where it has learnt to.
    """
    given = generation_config.eos_token_id
    known = set(given if isinstance(given, list) else [] if given is None else [given])
    if getattr(tokenizer, "chat_template", None) and not (ends := assistant_turn(tokenizer).ends) <= known:
        own = tokenizer.eos_token_id
        generation_config.eos_token_id = sorted(known | ends | (set() if own is None else {own}))


def tool_message(name: str, content: str, call: str = "") -> dict[str, str]:
    """Returns the message with what a tool gives; `call`: the call's own name, where the policy gave it one."""
    return {"role": "tool", "name": name, "content": content, "tool_call_id": call or CALL_ID}


def following(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Json] = ()) -> Markup:
    """Returns what the template writes behind an answer that these messages follow, its end included. Raises
    `UserError` where it cannot.
    """
    written = chat_markup(tokenizer, [_ASKED, _ANSWERED, *messages], tools, complete=False)
    return Markup(written.partition(SAID)[2])


def special_id(tokenizer: Any, text: str) -> int | None:
    """Returns the token that a text is, if it is one that no decoded answer shows."""
    token = _special(tokenizer).get(text)
    return None if token is None or tokenizer.decode([token], skip_special_tokens=True) else token


def _written(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Json], answered: bool = False
) -> str:
    try:
        return chat_markup(tokenizer, messages, tools, answered, complete=False)
    except UserError:
        return ""


def _special(tokenizer: Any) -> dict[str, int]:
    """Returns the tokens that are found in a text before anything else is, by their text."""
    added: dict[str, int] = dict(tokenizer.get_added_vocab()) if hasattr(tokenizer, "get_added_vocab") else {}
    names, ids = getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ())
    return added | dict(zip(names, ids, strict=True))
