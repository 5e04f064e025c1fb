r"""Control tokens: which a tokenizer has, which may stand in an assistant's turn, and text that only spells them.

A chat template and the texts that it is given become one text, in which a message that says `<|im_end|>` looks as if
the template had ended the turn. *Markup* is such a text with a BREAK behind each character of the messages' that could
begin a control token: nobody who looks for one finds it there, neither the template nor the tokenizer.

Invariant: the control tokens of encoded markup are those that stand there without a BREAK. Markup without any has
exactly the tokens that the tokenizer itself gives it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NewType
from weakref import WeakKeyDictionary

from tba.errors import UserError
from tba.templates import render_chat
from tba.types import THOUGHTS, Json, quote

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Markup = NewType("Markup", str)

BREAK, _QUOTE = "\ufdd0", "\ufdd2"  # noncharacters, which hardly any text has; the other stands for either in one
THOUGHT = THOUGHTS[0]
DEEPSEEK_CALL = tuple(f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end"))
FAMILY_MARKS = (  # what families write around thoughts and calls
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *DEEPSEEK_CALL),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>"),
    *(mark for pair in THOUGHTS for mark in pair),
)
_BREAKS = re.compile(f"(.){BREAK}|{_QUOTE}(.)", re.DOTALL)
_ESCAPES = {BREAK: f"{_QUOTE}0", _QUOTE: f"{_QUOTE}2"}
_UNESCAPES = {"0": BREAK, "2": _QUOTE}
_NEUTRAL_LEADS = ("\n", "=")  # texts that hardly merge with what follows into one token
_LABEL_FIELDS = frozenset(("role", "type"))  # of messages, which templates do not join to texts
_CONTROL_FORM = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)  # of control tokens that are not special
_QUESTION, _ANSWER, _IDEA = "\u2039question\u203a", "\u2039answer\u203a", "\u2039idea\u203a"
_VALUE, _RESULT = "valuenowhereelse", "resultnowhereelse"
_USER = {"role": "user", "content": _QUESTION}
_CALLING = {"id": "0toolcall", "type": "function", "function": {"name": "f", "arguments": {"a": _VALUE}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}},
    },
}


@dataclass(frozen=True)
class ControlTokens:
    """Holds the tokens of a tokenizer that are found in a text before anything else is, and that are no text."""

    ids: Mapping[str, int] = field(default_factory=dict)
    special_ids: frozenset[int] = frozenset()  # which decoding leaves out with `skip_special_tokens`
    turn_marks: tuple[str, ...] = ()  # what the template writes within an assistant's turn, around thoughts and calls
    thought_marks: tuple[str, str] = THOUGHT  # what it writes before a thought and behind it
    writes_calls: bool = False  # it has a place for calls of tools,
    writes_results: bool = False  # and for what tools give

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Returns the pattern of the control tokens in a text."""
        return _alternatives(self.ids)

    @cached_property
    def _escaped_signs(self) -> re.Pattern[str]:
        return _alternatives({BREAK, _QUOTE, *(text[0] for text in self.ids)})

    @cached_property
    def _turn_signs(self) -> re.Pattern[str]:
        return re.compile(f"{_alternatives(self.turn_marks).pattern}|{self._escaped_signs.pattern}")

    @cached_property
    def turn_mark_ids(self) -> frozenset[int]:
        """Returns the tokens of which marks within a turn consist."""
        return frozenset(self.ids[text] for mark in self.turn_marks for text in self.pattern.findall(mark))

    @cached_property
    def hidden_marks(self) -> frozenset[int]:
        """Returns the tokens of marks within a turn that decoding may leave out."""
        return self.turn_mark_ids & self.special_ids

    def is_spelled_in(self, text: str) -> bool:
        """Returns whether a part of the text would be taken for a control token."""
        return _has_breaks(text) or self.pattern.search(text) is not None

    def escape(self, text: str, is_turn: bool = False) -> Markup:
        """Returns a text as markup. `is_turn`: it is an assistant's, whose marks of thoughts and calls stay marks."""
        pattern = self._turn_signs if is_turn else self._escaped_signs
        return Markup(pattern.sub(lambda match: _break_match(match[0]), text))

    def markup(self, text: str, is_turn: bool = False) -> Markup:
        """Returns a text as markup, itself where it spells no control token."""
        return self.escape(text, is_turn) if self.is_spelled_in(text) else Markup(text)


def control_tokens(tokenizer: Any) -> ControlTokens:
    """Returns the control tokens of a tokenizer and its template.

    They are its special tokens and, of the others that were added to its vocabulary, those that its template writes,
    that mark thoughts or calls, or that look like `<|this|>`: others are words.
    """
    template = getattr(tokenizer, "chat_template", None)
    state = (str(template), *(getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")))
    with suppress(TypeError):  # what has no weak references or no hash is looked at each time
        if (cache_entry := _CONTROL.get(tokenizer)) is not None and cache_entry[0] == state:
            return cache_entry[1]
    control = _control_tokens(tokenizer, str(template or ""))
    with suppress(TypeError):
        _CONTROL[tokenizer] = (state, control)
    return control


_CONTROL: WeakKeyDictionary[Any, tuple[Any, ControlTokens]] = WeakKeyDictionary()
_RENAMED: WeakKeyDictionary[Any, _RenamedTokenizer] = WeakKeyDictionary()


def thoughts_of(tokenizer: Any) -> tuple[tuple[str, str], ...]:
    """Returns the pairs of marks that stand around thoughts in a model's answers."""
    return tuple(dict.fromkeys((*THOUGHTS, control_tokens(tokenizer).thought_marks)))


def _control_tokens(tokenizer: Any, template: str) -> ControlTokens:
    added: dict[str, int] = dict(tokenizer.get_added_vocab()) if hasattr(tokenizer, "get_added_vocab") else {}
    names, numbers = getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ())
    special_ids = dict(zip(names, numbers, strict=True))
    decoder: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special_ids |= {str(token.content): number for number, token in decoder.items() if token.special}
    ids = special_ids | {text: number for text, number in added.items() if _is_control(text, template)}
    ids = {text: number for text, number in ids.items() if text}
    control = ControlTokens(ids, frozenset(special_ids.values()), tuple(mark for mark in FAMILY_MARKS if mark in ids))
    return _with_turn_marks(tokenizer, control) if template else control


def _is_control(text: str, template: str) -> bool:
    if text in FAMILY_MARKS or _CONTROL_FORM.fullmatch(text):
        return True
    return len(text) > 2 and not (text[0].isalnum() or text[-1].isalnum() or text.isspace()) and text in template


def _with_turn_marks(tokenizer: Any, control: ControlTokens) -> ControlTokens:
    """Returns the control tokens with the marks that a tokenizer's own template writes within an assistant's turn:
    those around a call that it does not write around turns, and whatever stands before a thought and behind it.
    """
    answer = {"role": "assistant", "content": _ANSWER}
    plain_chat = _render(tokenizer, [_USER, answer, _USER], begins_turn=True) + _render(tokenizer, [_USER, answer])
    calls = [_USER, {"role": "assistant", "content": "", "tool_calls": [_CALLING]}]
    call_chat = _render(tokenizer, calls, [_TOOL])
    result = {"role": "tool", "name": "f", "content": _RESULT, "tool_call_id": _CALLING["id"]}
    result_chat = _render(tokenizer, [*calls, result], [_TOOL]) + _render(tokenizer, [_USER, answer, result])
    call_marks = control.pattern.findall(call_chat.rpartition(_QUESTION)[2])
    around_turns = {*control.pattern.findall(plain_chat), *call_marks[-1:]} - {*control.turn_marks}
    thinking_chat = [_USER, {**answer, "thinking": _IDEA, "reasoning_content": _IDEA}]
    before_thought, thought, after_prompt = _render(tokenizer, thinking_chat).rpartition(_QUESTION)[2].partition(_IDEA)
    after_thought, has_answer, _ = after_prompt.partition(_ANSWER)
    prompt_end = _render(tokenizer, [_USER], begins_turn=True).rpartition(_QUESTION)[2]
    writes_thoughts = thought and has_answer and before_thought.startswith(prompt_end)
    phrases = (before_thought.removeprefix(prompt_end).strip(), after_thought.strip()) if writes_thoughts else ("", "")
    candidates = dict.fromkeys((*control.turn_marks, *call_marks, *phrases))
    marks_within = tuple(m for m in candidates if m and m not in around_turns and control.pattern.search(m))
    return replace(
        control,
        turn_marks=marks_within,
        thought_marks=phrases if all(phrases) else control.thought_marks,
        writes_calls=_VALUE in call_chat,
        writes_results=_RESULT in result_chat,
    )


def _render(tokenizer: Any, messages: list[Any], tools: list[Any] | None = None, begins_turn: bool = False) -> str:
    """Returns the text that the template writes; empty where it raises."""
    options = {"tools": tools} if tools else {}
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=begins_turn, **options)
    except UserError:
        raise
    except Exception:  # noqa: BLE001 - a template raises what it likes, and one that knows no calls has no marks of them
        return ""


def escape_messages(
    control: ControlTokens, messages: Sequence[Mapping[str, Any]], tools: Sequence[Json]
) -> tuple[list[Mapping[str, Any]], list[Json]]:
    """Returns messages and tools with their texts as markup. They stay as they are where neither a text nor several
    texts that a template may join spell a control token.
    """
    texts = list(_texts([*messages, *tools], _LABEL_FIELDS))
    joined_texts = ("".join(texts), "".join(map(str.strip, texts)))
    separate_count = sum(len(control.pattern.findall(text)) for text in texts)
    is_spelled_by_joining = any(len(control.pattern.findall(text)) > separate_count for text in joined_texts)
    write = control.escape if is_spelled_by_joining else control.markup
    if write == control.markup and not any(map(control.is_spelled_in, _texts([*messages, *tools]))):
        return list(messages), list(tools)
    markups = [_map_texts(message, partial(write, is_turn=message.get("role") == "assistant")) for message in messages]
    return markups, [_map_texts(tool, write) for tool in tools]


def fill_template(control: ControlTokens, template: str, **texts: str) -> Markup:
    """Returns a text template, its places `{name}` filled with `texts`, as markup whose only control tokens are those
    of the template itself.
    """
    places = re.compile("|".join(re.escape(f"{{{name}}}") for name in texts))
    text = places.sub(lambda match: texts[match[0][1:-1]], template)
    own_count = sum(len(control.pattern.findall(part)) for part in places.split(template))
    if len(control.pattern.findall(text)) == own_count and not _has_breaks(text):
        return Markup(text)
    return Markup(places.sub(lambda match: control.escape(texts[match[0][1:-1]]), template))


def _texts(value: Any, excluded_fields: frozenset[str] | None = None) -> Iterator[str]:
    """Yields all texts in a value, in order, with the names of its fields. With `excluded_fields` it leaves out all
    names, and these fields.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if excluded_fields is None:
                yield str(name)
            if excluded_fields is None or name not in excluded_fields:
                yield from _texts(item, excluded_fields)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, excluded_fields)


def _map_texts(value: Any, function: Callable[[str], str]) -> Any:
    """Returns a value with `function` applied to each text in it."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        pairs = ((function(name) if isinstance(name, str) else name, item) for name, item in value.items())
        return {name: _map_texts(item, function) for name, item in pairs}
    return [_map_texts(item, function) for item in value] if isinstance(value, list | tuple) else value


def visible_text(markup: str) -> str:
    """Returns markup as the text that a reader sees."""
    return _BREAKS.sub(lambda match: match[1] or _UNESCAPES.get(match[2], match[2]), markup)


def _has_breaks(text: str) -> bool:
    return BREAK in text or _QUOTE in text


def _break_match(match: str) -> str:
    """Returns a matched mark as it is, and a matched first character with a BREAK behind it."""
    return match if len(match) > 1 else _ESCAPES.get(match, match + BREAK)


def encode_markup(tokenizer: Any, markup: str) -> list[int]:
    """Returns the tokens of markup, without those that begin or end a text. Raises what the tokenizer raises."""
    if not _has_breaks(markup):
        return list(tokenizer.encode(markup, add_special_tokens=False))
    control = control_tokens(tokenizer)
    parts = list(_split_markup(control, markup))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [token for part in parts for token in _encode_part(tokenizer, control, part)]
    with suppress(TypeError):
        if (cached_tokenizer := _RENAMED.get(tokenizer)) is not None and cached_tokenizer.control is control:
            return cached_tokenizer.encode(parts)
    renamed_tokenizer = _RenamedTokenizer.of(backend, control)
    with suppress(TypeError):
        _RENAMED[tokenizer] = renamed_tokenizer
    return renamed_tokenizer.encode(parts)


def encode_whole_text(tokenizer: Any, markup: str, max_tokens: int | None = None) -> list[int]:
    """Returns the tokens of markup with those that begin and end a text, cut to `max_tokens` in all."""
    if not _has_breaks(markup):
        return list(tokenizer.encode(markup, truncation=max_tokens is not None, max_length=max_tokens))
    text = visible_text(markup)
    inner_tokens, outer_tokens = (tokenizer.encode(text, add_special_tokens=with_ends) for with_ends in (False, True))
    start = next((i for i in range(len(outer_tokens)) if outer_tokens[i : i + len(inner_tokens)] == inner_tokens), 0)
    end = outer_tokens[start + len(inner_tokens) :]
    tokens = encode_markup(tokenizer, markup)
    return [*outer_tokens[:start], *(tokens if max_tokens is None else tokens[: max_tokens - start - len(end)]), *end]


def pad_texts(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> Any:
    """Returns whole texts as a classifier or an encoder reads them, as padded tensors with a mask. A control token that
    is spelled in one is text.
    """
    control = control_tokens(tokenizer)
    if not any(map(control.is_spelled_in, texts)):
        return tokenizer(list(texts), return_tensors="pt", padding=True, truncation=True, max_length=max_tokens)
    rows = [encode_whole_text(tokenizer, control.markup(text), max_tokens) for text in texts]
    return tokenizer.pad({"input_ids": rows}, return_tensors="pt")


def encode_markups(tokenizer: Any, markups: Sequence[str]) -> list[list[int]]:
    """Returns the tokens of several markups, which takes a fraction of the time of one call for each."""
    unescaped_markups = [markup for markup in markups if not _has_breaks(markup)]
    if not callable(tokenizer) or not unescaped_markups:
        return [encode_markup(tokenizer, markup) for markup in markups]
    rows = iter(tokenizer(unescaped_markups, add_special_tokens=False, return_attention_mask=False)["input_ids"])
    return [encode_markup(tokenizer, markup) if _has_breaks(markup) else next(rows) for markup in markups]


def encode_continuation(encode: Callable[[str], list[int]], markup: str, lead: str = "") -> list[int]:
    """Returns the tokens of markup that continues `lead`, because some tokenizers put a blank before a text by itself.
    Where the markup would merge with the lead's last token, or the lead is empty, it continues a neutral text instead.
    """
    for text in (lead, *_NEUTRAL_LEADS) if lead else _NEUTRAL_LEADS:
        try:
            lead_tokens, tokens = encode(text), encode(text + markup)
        except Exception:  # noqa: BLE001 - it cannot write the lead; what it says of the text itself is raised below
            lead_tokens = tokens = []
        if lead_tokens and tokens[: len(lead_tokens)] == lead_tokens:
            return tokens[len(lead_tokens) :]
    return encode(markup)


def encode_continuations(tokenizer: Any, markups: Sequence[str], leads: Sequence[str]) -> list[list[int]]:
    """Returns the tokens of each markup that continues its lead, as `encode_continuation` does."""
    rows = encode_markups(tokenizer, [lead + markup for lead, markup in zip(leads, markups, strict=True)])
    distinct_leads = list(dict.fromkeys(leads))
    lead_tokens = dict(zip(distinct_leads, encode_markups(tokenizer, distinct_leads), strict=True))
    return [
        row[len(lead_tokens[lead]) :]
        if lead and row[: len(lead_tokens[lead])] == lead_tokens[lead]
        else encode_continuation(partial(encode_markup, tokenizer), markup, lead)
        for row, markup, lead in zip(rows, markups, leads, strict=True)
    ]


def _split_markup(control: ControlTokens, markup: str) -> Iterator[str | int]:
    """Yields the texts in markup as a reader sees them, and between them the control tokens."""
    text, end = "", 0
    for match in re.finditer(f"{_BREAKS.pattern}|{control.pattern.pattern}", markup, re.DOTALL):
        text += markup[end : match.start()]
        if match[0] in control.ids:
            yield from (text, control.ids[match[0]])
            text = ""
        else:
            text += visible_text(match[0])
        end = match.end()
    yield text + markup[end:]


@dataclass(frozen=True)
class _RenamedTokenizer:
    """Copies a tokenizer with other names for its control tokens, which no text has, so that texts cannot spell them.

    All else is the tokenizer's own, so that the tokens around control tokens stay the same: some control tokens take
    the blanks beside them, and some tokenizers put a blank before a text.
    """

    backend: Tokenizer
    control: ControlTokens
    names: Mapping[int, str]  # of control tokens
    original_ids: Mapping[int, int]  # of the added tokens, by what they are here
    unknown: int | None  # which stands for characters

    @classmethod
    def of(cls, tokenizer: Tokenizer, control: ControlTokens) -> _RenamedTokenizer:
        from tokenizers import AddedToken, Tokenizer  # not needed by tasks, which import this

        nonce, backend = secrets.token_hex(8), Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            backend.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            backend.pre_tokenizer = tokenizer.pre_tokenizer
        names = {number: f"\ufdd1{nonce}{number:08x}\ufdd1" for number in control.ids.values()}
        ids, vocabulary = {}, set(tokenizer.get_vocab(with_added_tokens=False).values())
        for number, token in sorted(tokenizer.get_added_tokens_decoder().items()):
            flags = {key: getattr(token, key) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            content = names.get(number, token.content)
            backend.add_tokens([AddedToken(content, **flags)])
            if (new_id := backend.token_to_id(content)) is not None:
                ids[new_id] = number
        if any(new_id in vocabulary and new_id != number for new_id, number in ids.items()):
            raise UserError("the tokenizer's vocabulary has holes, where a text spells control tokens: leave these out")
        word = getattr(tokenizer.model, "unk_token", None)  # that stands for unknown characters
        return cls(backend, control, names, ids, None if word is None else tokenizer.model.token_to_id(word))

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        text = "".join(part if isinstance(part, str) else self.names[part] for part in parts)
        encoding = self.backend.encode(text, add_special_tokens=False)
        control_ids = [number for new_id in encoding.ids if (number := self.original_ids.get(new_id)) in self.names]
        if control_ids != [part for part in parts if isinstance(part, int)]:
            raise UserError("the tokenizer does not find its control tokens in a text: give another model")
        return [
            n for token, new_id in zip(encoding.tokens, encoding.ids, strict=True) for n in self._numbers(token, new_id)
        ]

    def _numbers(self, token: str, new_id: int) -> list[int]:
        """Returns the original number of a token, or for a word spelled like a control token those of its parts."""
        if new_id in self.original_ids or new_id not in self.names or new_id == self.unknown or len(token) < 2:
            return [self.original_ids.get(new_id, new_id)]
        pieces = [piece for part in (token[:1], token[1:]) for piece in self.backend.model.tokenize(part)]
        return [number for piece in pieces for number in self._numbers(piece.value, piece.id)]


def _encode_part(tokenizer: Any, control: ControlTokens, part: str | int) -> list[int]:
    """Returns the tokens of a text or a control token, by a tokenizer that is not of the Rust library."""
    if isinstance(part, int):
        return [part]
    if not control.is_spelled_in(part):
        return list(tokenizer.encode(part, add_special_tokens=False)) if part else []
    tokens: list[int] = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(part, split_special_tokens=True))
    if not set(control.ids.values()).isdisjoint(tokens):
        raise UserError(
            f"the tokenizer cannot write {quote(part)} as a text, since it has control tokens of that name: leave "
            "them out of the text, or give a model with a tokenizer.json"
        )
    return tokens


def decode_tokens(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Returns tokens as text, without special ones, but with the marks of thoughts and calls, which a model writes."""
    control = control_tokens(tokenizer)
    if control.hidden_marks.isdisjoint(tokens):
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
    hidden_ids = control.special_ids - control.turn_mark_ids
    return str(tokenizer.decode([token for token in tokens if token not in hidden_ids], skip_special_tokens=False))


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns the pattern that finds the longest of some texts."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")
