"""Input from outside: JSON whose shape is checked before it is used, models without code of their own, and what a
user's task gives.

Invariant: whatever a file or a reply holds, reading it here ends in a value of the shape that was asked for or in a
`ValueError` of one clause; nothing of it is executed or unpickled.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from tba.errors import UserError
from tba.markup import ControlTokens, Markup, control_tokens, encode_markups, escape_messages
from tba.templates import render_chat
from tba.types import Json, Problem, Split, Version, quote

log = logging.getLogger(__name__)

T = TypeVar("T")
_ERRORS = 2  # the descriptor of standard error, which a forked process has whatever else it has closed
MOST_COUNTED = 10_000  # layers, heads or experts of a model
_COUNTED = re.compile(r"(?:layer|block|head|expert)s?$")  # names in a config.json
DEEPEST = 64  # nesting levels of lists and objects: ours have six
_LONGEST_NAME = 200  # bytes: names derived from it are a few longer, and file systems allow 255
_LARGEST = 2**64  # of a whole number
_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
SAFE: dict[str, Any] = {"trust_remote_code": False}  # for `from_pretrained` of configurations and tokenizers
SAFE_MODEL: dict[str, Any] = {**SAFE, "use_safetensors": True}  # for models: no pickle, whatever files there are
UNREADABLE = (  # what transformers raises for a folder whose files are not what they should be
    *(OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, RecursionError),
    *(ArithmeticError, ImportError, AssertionError, SafetensorError, StrictDataclassError),
)


def parsed(text: str | bytes, kind: Any = None, /, **fields_there: Any) -> Any:
    """Returns the JSON value in `text`, which has to be of a kind: an annotation as of a field (`str`, `list[int]`,
    `float | None`, a dataclass for an object of its fields), or the fields that an object has to have, by name, each
    with its kind (by default those given by keyword).

    A field that may be null may be missing, and there may be other fields. Raises `ValueError` for anything else.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested beyond reason
        raise ValueError(f"not JSON ({error})") from None
    if _deeper(value, DEEPEST):
        raise ValueError(f"nested more than {DEEPEST} deep")
    check(value, fields_there if kind is None else kind, "it")
    return value


def is_name(text: str) -> bool:
    """Returns whether it can name a file or folder: no path, not hidden, and no option where it is an argument."""
    return re.fullmatch(r"\w[\w.+=-]*", text) is not None and len(text.encode(errors="replace")) <= _LONGEST_NAME


def check(value: Json, kind: Any, what: str) -> None:
    """Raises `ValueError` unless the JSON value is of the kind; the message calls it `what`."""
    origin, of = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is Any:
        return
    if isinstance(kind, dict):
        check(value, dict[str, Any], what)
        for name, wanted in kind.items():
            check(value.get(name), wanted, name if what == "it" else f"{name} of {what}")
    elif origin in (Union, types.UnionType):
        fitting = [one for one in of if _is_of(value, one)]
        if not fitting:
            raise ValueError(_sentence(value, kind, what))
        check(value, fitting[0], what)  # explains what is wrong inside
    elif is_dataclass(kind) and kind is not Version:
        check(value, dict[str, Any], what)
        hints = _hints(typing.cast("type", kind))
        for one in fields(kind):
            if one.name in value or (one.default is MISSING and one.default_factory is MISSING):
                check(value.get(one.name), hints[one.name], f"{one.name} of {what}" if what != "it" else one.name)
        if unknown := value.keys() - hints.keys():
            raise ValueError(f"{what} has a field {min(unknown)[:40]!r} that is unknown")
    elif not _is_of(value, kind):
        raise ValueError(_sentence(value, kind, what))
    elif isinstance(value, Mapping) and len(of) == 2:
        for key, inner in value.items():
            check(inner, of[1], f"{key[:40]!r} of {what}")
    elif isinstance(value, list) and of:
        kinds = [of[0]] * len(value) if origin is not tuple or of[1:] == (...,) else list(of)
        if len(kinds) != len(value):
            raise ValueError(f"{what} is a list of {len(value)}, it must be one of {len(kinds)}")
        for place, (inner, wanted) in enumerate(zip(value, kinds, strict=True)):
            check(inner, wanted, f"number {place} of {what}")


def _is_of(value: Json, kind: Any) -> bool:
    """Returns whether the value itself is of the kind, whatever it contains."""
    origin = typing.get_origin(kind) or kind
    if origin is Any:
        return True
    if origin is Literal:
        return value in typing.get_args(kind) and not isinstance(value, list | dict)
    if origin is Version:
        try:
            return isinstance(value, str) and Version.parse(value) is not None
        except ValueError:
            return False
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _bounded(value)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool) and _bounded(value)
    if isinstance(kind, dict) or is_dataclass(origin) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return isinstance(value, dict)
    if isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str:
        return isinstance(value, list)
    return isinstance(value, origin)


def _bounded(value: float) -> bool:
    return abs(value) < _LARGEST if isinstance(value, int) else math.isfinite(value)


def _sentence(value: Json, kind: Any, what: str) -> str:
    given = "missing or null" if value is None else repr(value)
    return f"{what} is {given if len(given) <= 60 else given[:57] + '...'}, it must be {_name(kind)}"


def _name(kind: Any) -> str:
    origin = typing.get_origin(kind) or kind
    if origin in (Union, types.UnionType):
        return " or ".join(map(_name, typing.get_args(kind)))
    if origin is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if origin is Version:
        return "a version such as '0.12'"
    if isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str:
        return "a list"
    return _NAMES.get(origin, "an object")


def _deeper(value: Json, most: int) -> bool:
    """Returns whether lists and objects are nested more than `most` levels deep."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return False
    return True


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def read_json(path: Path, remedy: str, kind: Any = None, /, **fields_there: Any) -> Any:
    """Returns `parsed` of a file. Raises `UserError`, which says what to do about it, when that fails."""
    try:
        return parsed(path.read_bytes(), kind, **fields_there)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    except ValueError as error:
        raise UserError(f"{path} has unexpected contents ({error}): {remedy}") from error


def problems_of(task: Any, split: Split) -> Sequence[Problem]:
    """Returns a task's problems. Raises `UserError` when there are none, or when they are something else."""
    try:
        found: object = task.problems(split)
        if isinstance(found, str | Mapping) or not isinstance(found, Iterable):
            raise UserError(f"problems({split!r}) of task {task.name} gave {found!r:.80}: return a list of tba.Problem")
        problems = found if isinstance(found, list | tuple) else list(found)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise failed(f"problems({split!r}) of task {task.name}", error) from error
    for number, problem in enumerate(problems):
        if flaw := _flaw(problem):
            raise UserError(f"problem {number} of problems({split!r}) of task {task.name} {flaw}")
    if not problems:
        raise UserError(f"task {task.name} has no problems for {split!r}: return some from problems({split!r})")
    return problems


def failed(what: str, error: BaseException) -> UserError:
    """Returns what to say of a user's own function that raised: the error, and the line of code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return UserError(
        f"{what} failed: {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}: {frame.line}); "
        "mend that line"
    )


def print_error(error: BaseException) -> None:
    """Print what ends this process to standard error, as far as that takes it: bad input as its sentence, all else with
    its traceback, and control characters spelt out, since texts of others may be in it.
    """
    bad_input = isinstance(error, UserError)
    text = f"tba: {error}" if bad_input else "".join(traceback.format_exception(error)).rstrip("\n")
    lines = (line if line.isprintable() else quote(line, sys.maxsize)[1:-1] for line in text.split("\n"))
    with suppress(OSError):  # a full disk, an output that is closed
        os.write(_ERRORS, "".join(f"{line}\n" for line in lines).encode(errors="replace"))


def _flaw(problem: object) -> str:
    """Returns what is wrong with a problem and what to do about it; empty: nothing."""
    if not isinstance(problem, Problem):
        return f"is {problem!r:.80}: make each a tba.Problem(prompt, fields)"
    prompt: object = problem.prompt
    fields_given: object = problem.fields
    taught: object = problem.demonstration
    chat = isinstance(prompt, list | tuple) and prompt and all(map(_is_message, prompt))
    if not isinstance(prompt, str) and not chat:
        return f"has the prompt {prompt!r:.80}: give a text, or chat messages, each with a role and a content"
    if not isinstance(fields_given, Mapping):
        return f"has the fields {fields_given!r:.80}: give a dictionary of what the reward needs, by name"
    if (name := next((name for name, value in fields_given.items() if not _is_json(value)), None)) is not None:
        return f"has the field {name!r} with {fields_given[name]!r:.80}: make it of texts, numbers, lists, dictionaries"
    turns = isinstance(taught, tuple) and all(isinstance(turn, str) for turn in taught)
    if not isinstance(taught, str | None) and not turns:
        return f"has the demonstration {taught!r:.80}: give a text, None, or a tuple of the turns of an episode"
    return ""


def _is_json(value: object) -> bool:
    try:
        json.dumps(python_values(value))
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def python_values(value: Any) -> Any:
    """Returns a value with numbers and arrays of numpy as Python's: a float of fewer bits is the shortest decimal that
    rounds to it (0.1, not 0.10000000149), as it is written in a file.
    """
    if isinstance(value, np.generic):
        return float(str(value)) if isinstance(value, np.floating) else value.item()
    if isinstance(value, np.ndarray):
        return python_values(list(value) if value.ndim else value[()])
    if isinstance(value, Mapping):
        return {name: python_values(inner) for name, inner in value.items()}
    return type(value)(map(python_values, value)) if type(value) in (list, tuple) else value


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def templated(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Json] = (),
    answered: bool = False,
    complete: bool = True,
) -> Markup:
    """Returns messages as a tokenizer's own template writes them, with the tools (schemas) that may be called; where
    the template has no place for tools, a system message describes them. What the messages say is no control token,
    whatever it spells. Raises `UserError` for what the template raises.

    answered: they end with the assistant's answer; else the text ends where the answer is to begin. complete: calls and
    what tools gave that the template would leave out are written as texts, but for those of such an answer.
    """
    control = control_tokens(tokenizer)
    if complete:
        history = len(messages) - answered
        messages = [*_complete(tokenizer, control, messages[:history]), *messages[history:]]
    messages, tools = escape_messages(control, messages, tools)
    text = _templated(tokenizer, messages, tools, answered)
    if tools and text == _templated(tokenizer, messages, (), answered):
        return Markup(_templated(tokenizer, _described(messages, tools), (), answered))
    return Markup(text)


def _templated(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Json], answered: bool) -> str:
    """Returns what the template writes. Where it takes no system message (it refuses one, or leaves its text out), that
    is put before the first message of the user, which is logged once.
    """
    system = messages[0].get("content") if messages and messages[0].get("role") == "system" else None
    if not isinstance(system, str):
        return _rendered(tokenizer, messages, tools, answered)
    try:
        text = _rendered(tokenizer, messages, tools, answered)
    except UserError:
        text = None
    if text is not None and system.strip() in text:
        return text
    folded = _rendered(tokenizer, _without_system(system.strip(), messages[1:]), tools, answered)
    if text is not None and system.strip() not in folded:  # it writes texts in another form
        return text
    _say_folded()
    return folded


def _complete(
    tokenizer: Any, control: ControlTokens, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Returns messages with calls, and with what tools gave, as texts where the template would leave them out or raise:
    a call in the form that `_described` asks for, a result as a message of the user's.
    """

    def text(messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return _rendered(tokenizer, messages, (), answered=False)
        except UserError:
            return ""

    if not control.writes_calls and any(message.get("tool_calls") for message in messages):
        silent = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
        if text(messages) in ("", text(silent)):
            messages = [_with_calls(*pair) for pair in zip(silent, messages, strict=True)]
    if control.writes_results or all(message.get("role") != "tool" for message in messages):
        return messages
    if text(messages) in ("", text([message for message in messages if message.get("role") != "tool"])):
        return _with_results(messages)
    return messages


def _with_calls(silent: Mapping[str, Any], message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message with its calls behind its content."""
    calls = [
        call.get("function") or call if isinstance(call, Mapping) else call for call in message.get("tool_calls") or ()
    ]
    texts = [f"<tool_call>\n{json.dumps(_unpacked(call), ensure_ascii=False)}\n</tool_call>" for call in calls]
    return {**silent, "content": "\n".join(filter(None, (silent.get("content"), *texts)))} if calls else silent


def _unpacked(call: Any) -> Any:
    """Returns a call whose arguments are an object, also where they are JSON in a text, as OpenAI's are."""
    if not isinstance(call, Mapping):
        return call
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {"name": call.get("name"), "arguments": arguments}


def _with_results(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns messages in which what tools gave, one after the other, is said by the user."""
    written: list[Mapping[str, Any]] = []
    for role, group in groupby(messages, lambda message: message.get("role")):
        if role != "tool":
            written.extend(group)
            continue
        written.append({"role": "user", "content": "\n".join(str(message.get("content", "")) for message in group)})
    return written


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Json], answered: bool) -> str:
    options: dict[str, Any] = {"tools": list(tools)} if tools else {}
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=not answered, **options)
    except UserError:
        raise
    except Exception as error:  # a template raises what it likes
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the tokenizer's chat template cannot write a prompt ({reason}): give another model"
        ) from error


def _without_system(system: str, rest: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the messages after the system's with what it said at the beginning of the first, and a blank line after
    it (as Gemma 3's template writes it).
    """
    if not rest or rest[0].get("role") != "user" or not isinstance(rest[0].get("content"), str):
        return [{"role": "user", "content": system}, *rest]
    return [{**rest[0], "content": f"{system}\n\n{rest[0]['content']}".lstrip()}, *rest[1:]]


@cache
def _say_folded() -> None:
    log.warning(
        "the model's chat template takes no system message: what it says is written at the beginning of the first "
        "message of the user"
    )


def with_arguments(tokenizer: Any, arguments: Sequence[str]) -> Any:
    """Returns the tokenizer with arguments (each `name=value`, the value in JSON or a text) that its chat template has
    wherever it is applied, and also where the tokenizer is saved.

    Raises `UserError` for what is no argument, and for one that the template does not read.
    """
    if not arguments:
        return tokenizer
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        raise UserError("--model.template-arguments is for a tokenizer with one chat template: leave it out")
    for argument in arguments:
        name, given, value = argument.partition("=")
        if not given or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"--model.template-arguments has {argument!r}: give name=value, as enable_thinking=false")
        if not re.search(rf"\b{name}\b", template):
            raise UserError(
                f"--model.template-arguments has {argument!r}, but the model's chat template does not read {name}: "
                "leave it out, or give a model whose template does"
            )
        begin = f"{{% if {name} is not defined %}}{{% set {name} = {_as_jinja(value)} %}}{{% endif +%}}"
        template = begin + template.replace(begin, "")
    tokenizer.chat_template = template
    return tokenizer


def writes_day(tokenizer: Any) -> bool:
    """Returns whether a tokenizer's chat template writes what day it is."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None) or "")


def with_day(tokenizer: Any, day: str) -> Any:
    """Returns the tokenizer, whose chat template is told that day from then on (as 2026-03-31); empty: the present."""
    if day and writes_day(tokenizer):
        moment = datetime.fromisoformat(day)
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, strftime_now=moment.strftime)
    return tokenizer


def _as_jinja(value: str) -> str:
    """Returns a value of JSON, or else a text, as Jinja writes it."""
    try:
        read = json.loads(value)
    except ValueError:
        read = value
    return "none" if read is None else json.dumps(read)


def prompt_tokens(tokenizer: Any, texts: Sequence[str], chat: bool = False) -> list[list[int]]:
    """Returns the tokens of prompts: a text of its own begins as the tokenizer begins texts (often with a token for
    that, once where the text spells it out too), while a chat, which is markup, is begun by its template. Neither ends
    as a text does: it is continued. Many texts at once are several times faster than one by one.
    """
    rows: list[list[int]]
    if chat:
        return encode_markups(tokenizer, texts)
    if callable(tokenizer) and texts:
        rows = tokenizer(list(texts), return_attention_mask=False)["input_ids"]
    else:
        rows = [list(tokenizer.encode(text, add_special_tokens=True)) for text in texts]
    begin, end = getattr(tokenizer, "bos_token_id", None), tokenizer.eos_token_id
    word = str(getattr(tokenizer, "eos_token", ""))
    if end is not None:
        pairs = zip(texts, rows, strict=True)
        rows = [row[:-1] if row[-1:] == [end] and not text.endswith(word) else row for text, row in pairs]
    return [row[1:] if begin is not None and row[:2] == [begin, begin] else row for row in rows]


def _described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Json]) -> list[Mapping[str, Any]]:
    """Returns the messages with the tools in the system's, in the form that models without a form of their own know."""
    described = "\n".join(
        (
            "You can call functions. Their signatures:",
            "<tools>",
            *(json.dumps(tool, ensure_ascii=False) for tool in tools),
            "</tools>",
            "To call one, write only its name and its arguments, as JSON:",
            "<tool_call>",
            '{"name": "the name", "arguments": {"argument": "value"}}',
            "</tool_call>",
        )
    )
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": described}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{described}"}, *messages[1:]]


def most_positions(config: Any) -> int | None:
    """Returns how many positions of a causal model can be used; None where it has no limit.

    With `longrope` (Phi-3 of 128k) all sequences of a pass are rotated otherwise as soon as one is longer than the
    model was first trained for: up to there every sequence is what it is alone.
    """
    text = config.get_text_config()
    most: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return most
    first = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return min((n for n in (most, first) if n), default=None)


def refuse_impossible_counts(folder: Path) -> None:
    """Raises `UserError` for a model's folder whose config.json has more layers, heads or experts than any model:
    building them, or a list with an entry for each, would not end. Of a file that is no JSON whoever loads it says so.
    """
    file = folder / "config.json"
    try:
        places: list[Json] = [parsed(file.read_bytes())]
    except (OSError, ValueError):
        return
    while places:
        place = places.pop()
        for name, value in place.items() if isinstance(place, dict) else ():
            if isinstance(value, dict):
                places.append(value)
            elif _COUNTED.search(name) and isinstance(value, int | float) and not value <= MOST_COUNTED:
                raise UserError(f"{file} has {name} {value!s:.20}, more than {MOST_COUNTED:,}: give another model")


def require_embedded(token: int, embeddings: int) -> None:
    """Raises `UserError` for a token that a model has no embedding for."""
    if token >= embeddings:
        raise UserError(
            f"the tokenizer writes the token {token}, and the model has embeddings of {embeddings}: resize the model's "
            "(resize_token_embeddings) and save it, or give its own tokenizer"
        )
