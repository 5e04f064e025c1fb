"""Prompts as a tokenizer and its chat template write them, with tools, a system message, arguments and the day.

Invariant: what a message says is text, whatever control token it spells. A template that raises, or has no end, ends in
a `UserError`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from itertools import groupby
from typing import Any

from tba.errors import UserError
from tba.markup import ControlTokens, Markup, control_tokens, encode_markups, escape_messages
from tba.templates import render_chat
from tba.types import Json

log = logging.getLogger(__name__)


def chat_markup(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Json] = (),
    answered: bool = False,
    complete: bool = True,
) -> Markup:
    """Returns messages as a tokenizer's own template writes them, with the tools (schemas) that may be called.

    A system message describes the tools where the template has no place for them. What the messages say is no control
    token, whatever it spells. Raises `UserError` for what the template raises. answered: the messages end with the
    assistant's answer; else the text ends where the answer is to begin. complete: calls, and what tools returned, are
    written as texts where the template would leave them out, except those of such an answer.
    """
    control = control_tokens(tokenizer)
    if complete:
        history = len(messages) - answered
        messages = [*_with_calls_and_results_as_text(tokenizer, control, messages[:history]), *messages[history:]]
    messages, tools = escape_messages(control, messages, tools)
    text = _render(tokenizer, messages, tools, answered)
    if tools and text == _render(tokenizer, messages, (), answered):
        return Markup(_render(tokenizer, _with_tool_descriptions(messages, tools), (), answered))
    return Markup(text)


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Json], answered: bool) -> str:
    """Returns what the template writes. A system message that it refuses or leaves out is moved to the beginning of the
    first message of the user, which is logged once.
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
    text_without_system = _rendered(tokenizer, _without_system(system.strip(), messages[1:]), tools, answered)
    if text is not None and system.strip() not in text_without_system:  # it writes texts in another form
        return text
    _warn_of_moved_system_message()
    return text_without_system


def _with_calls_and_results_as_text(
    tokenizer: Any, control: ControlTokens, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Returns messages with calls, and with what tools returned, as texts where the template would leave them out or
    raise: a call in the form that `_with_tool_descriptions` asks for, a result as a message of the user's.
    """

    def written(messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return _rendered(tokenizer, messages, (), answered=False)
        except UserError:
            return ""

    if not control.writes_calls and any(message.get("tool_calls") for message in messages):
        without_calls = [{n: value for n, value in message.items() if n != "tool_calls"} for message in messages]
        if written(messages) in ("", written(without_calls)):
            messages = [_with_calls(*pair) for pair in zip(without_calls, messages, strict=True)]
    if control.writes_results or all(message.get("role") != "tool" for message in messages):
        return messages
    if written(messages) in ("", written([message for message in messages if message.get("role") != "tool"])):
        return _with_results(messages)
    return messages


def _with_calls(without_calls: Mapping[str, Any], message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message with its calls as text behind its content."""
    calls = [
        call.get("function") or call if isinstance(call, Mapping) else call for call in message.get("tool_calls") or ()
    ]
    texts = [f"<tool_call>\n{json.dumps(_decode_arguments(call), ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, (without_calls.get("content"), *texts)))
    return {**without_calls, "content": content} if calls else without_calls


def _decode_arguments(call: Any) -> Any:
    """Returns a call whose arguments are an object, decoded where they are JSON in a text, as OpenAI's are."""
    if not isinstance(call, Mapping):
        return call
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {"name": call.get("name"), "arguments": arguments}


def _with_results(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns messages in which the user says what tools returned one after the other."""
    messages_with_results: list[Mapping[str, Any]] = []
    for role, group in groupby(messages, lambda message: message.get("role")):
        if role != "tool":
            messages_with_results.extend(group)
            continue
        content = "\n".join(str(message.get("content", "")) for message in group)
        messages_with_results.append({"role": "user", "content": content})
    return messages_with_results


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Json], answered: bool) -> str:
    options: dict[str, Any] = {"tools": list(tools)} if tools else {}
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=not answered, **options)
    except UserError:
        raise
    except Exception as error:  # a template raises what it likes
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the tokenizer's chat template cannot write prompts ({reason}): give another model") from error


def _without_system(system: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns messages whose first one begins with what the system's message said and a blank line, as Gemma 3's
    template writes it.
    """
    if not messages or messages[0].get("role") != "user" or not isinstance(messages[0].get("content"), str):
        return [{"role": "user", "content": system}, *messages]
    return [{**messages[0], "content": f"{system}\n\n{messages[0]['content']}".lstrip()}, *messages[1:]]


@cache
def _warn_of_moved_system_message() -> None:
    log.warning(
        "the model's chat template takes no system message: what it says is written at the beginning of the first "
        "message of the user"
    )


def with_arguments(tokenizer: Any, arguments: Sequence[str]) -> Any:
    """Returns the tokenizer with a chat template that begins by setting arguments, each `name=value` with the value in
    JSON or a text. They hold wherever the template is applied, and are saved with it.

    Raises `UserError` for what is no argument, and for one that the template does not read.
    """
    if not arguments:
        return tokenizer
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        raise UserError("--model.template-arguments is for a tokenizer with one chat template: leave it out")
    for argument in arguments:
        name, equals_sign, value = argument.partition("=")
        if not equals_sign or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"--model.template-arguments has {argument!r}: give name=value, as enable_thinking=false")
        if not re.search(rf"\b{name}\b", template):
            raise UserError(
                f"--model.template-arguments has {argument!r}, but the model's chat template does not read {name}: "
                "leave it out, or give a model whose template does"
            )
        assignment = f"{{% if {name} is not defined %}}{{% set {name} = {_as_jinja(value)} %}}{{% endif +%}}"
        template = assignment + template.replace(assignment, "")
    tokenizer.chat_template = template
    return tokenizer


def writes_day(tokenizer: Any) -> bool:
    """Returns whether a tokenizer's chat template writes what day it is."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None) or "")


def with_day(tokenizer: Any, day: str) -> Any:
    """Returns the tokenizer, whose chat template takes `day` (as 2026-03-31) for today; empty: leaves it as it is."""
    if day and writes_day(tokenizer):
        moment = datetime.fromisoformat(day)
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, strftime_now=moment.strftime)
    return tokenizer


def _as_jinja(value: str) -> str:
    """Returns a value in JSON, or a text that is no JSON, as Jinja writes it."""
    try:
        argument = json.loads(value)
    except ValueError:
        argument = value
    return "none" if argument is None else json.dumps(argument)


def prompt_tokens(tokenizer: Any, texts: Sequence[str], chat: bool = False) -> list[list[int]]:
    """Returns the tokens of prompts, without a token at the end, since they are continued.

    A text begins as the tokenizer begins texts, often with a token for that, once where the text spells it out too. A
    chat, which is markup, is begun by its template. Many texts at once are several times faster than one by one.
    """
    rows: list[list[int]]
    if chat:
        return encode_markups(tokenizer, texts)
    if callable(tokenizer) and texts:
        rows = tokenizer(list(texts), return_attention_mask=False)["input_ids"]
    else:
        rows = [list(tokenizer.encode(text, add_special_tokens=True)) for text in texts]
    bos, eos = getattr(tokenizer, "bos_token_id", None), tokenizer.eos_token_id
    eos_text = str(getattr(tokenizer, "eos_token", ""))
    if eos is not None:
        pairs = zip(texts, rows, strict=True)
        rows = [row[:-1] if row[-1:] == [eos] and not text.endswith(eos_text) else row for text, row in pairs]
    return [row[1:] if bos is not None and row[:2] == [bos, bos] else row for row in rows]


def _with_tool_descriptions(messages: Sequence[Mapping[str, Any]], tools: Sequence[Json]) -> list[Mapping[str, Any]]:
    """Returns messages whose system message describes the tools in the form that most models know."""
    description = "\n".join(
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
        return [{"role": "system", "content": description}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{description}"}, *messages[1:]]
