"""Public methods of an environment as tools: how they are described, and how a turn calls them.

Invariant: a turn is data. A call names a tool and gives arguments as JSON, whose types are checked against the method's
hints; nothing is evaluated. Whatever is wrong with a call is said to the policy and ends nothing.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from tba.errors import UserError
from tba.foreign import check, parsed
from tba.types import Json, is_text, quoted

_NO_TOOLS = {"reset", "step", "get_reward", "close"}
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)  # Qwen, SmolLM2, Hermes
_OBJECT = re.compile(r'\{\s*"name"\s*:')  # Llama 3: the whole turn


def tools_of(environment: object) -> dict[str, Callable[..., Any]]:
    """Returns an environment's tools by name, in the order in which they are defined; none where it has a `step`."""
    if callable(getattr(environment, "step", None)):
        return {}
    kind, found = type(environment), {}
    for name in (name for one in reversed(kind.__mro__[:-1]) for name in vars(one)):
        defined = inspect.getattr_static(kind, name, None)
        if not name.startswith("_") and name not in _NO_TOOLS and isinstance(defined, _METHODS):
            found[name] = getattr(environment, name)
    return found


_METHODS = (FunctionType, staticmethod, classmethod)


def schemas_of(environment: object) -> tuple[Json, ...]:
    """Returns the tools as JSON schemas, as chat templates take them. Raises `UserError` where a tool lacks a type hint
    or a line of its docstring.
    """
    return tuple(_schema(environment, name, tool) for name, tool in tools_of(environment).items())


def _schema(environment: object, name: str, tool: Callable[..., Any]) -> Json:
    try:
        return get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise UserError(
            f"{type(environment).__name__}.{name} cannot be described as a tool ({error}): give it type hints and a "
            f"docstring that says what it does, with a line for each argument under `Args:`, or call it _{name} if it "
            "is none"
        ) from error


@dataclass(frozen=True)
class Call:
    """What a turn asks for: a tool by name, with its arguments; or what is wrong with it."""

    name: str
    arguments: Json = None
    wrong: str = ""


def calls_in(text: str) -> list[Call]:
    """Returns the calls of a turn, in order; a turn without any is an answer.

    Read are `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, also with a list in it, and a turn that is
    `{"name": ..., "parameters": {...}}`. What a model thinks before it speaks is no call.
    """
    said = text.rpartition("</think>")[2].strip().removeprefix("<|python_tag|>")
    if "<tool_call>" in said:
        return [call for block in _BLOCK.findall(said) for call in _read(block)]
    return _read(said) if _OBJECT.match(said) else []


def _read(text: str) -> list[Call]:
    try:
        found = parsed(text.strip(), Any)
    except ValueError as error:
        return [Call("", wrong=f"the call cannot be read: it is {error}")]
    return [_call(one) for one in (found if isinstance(found, list) else [found])]


def _call(value: Json) -> Call:
    if not isinstance(value, Mapping) or not isinstance(name := value.get("name"), str):
        return Call("", wrong='a call is an object with a "name" and its "arguments"')
    return Call(name, value.get("arguments", value.get("parameters", {})))


def bound(tools: Mapping[str, Callable[..., Any]], call: Call) -> dict[str, Json]:
    """Returns the arguments of a call as its tool takes them. Raises `ValueError` for a call that cannot be made."""
    if call.wrong:
        raise ValueError(call.wrong)
    if call.name not in tools:
        raise ValueError(f"there is no tool {quoted(call.name, 60)}: the tools are {', '.join(tools)}")
    if not isinstance(call.arguments, dict):
        raise ValueError(f"the arguments of {call.name} are not an object")
    declared, hints = inspect.signature(tools[call.name]).parameters, typing.get_type_hints(tools[call.name])
    for name, value in call.arguments.items():
        if name not in declared:
            raise ValueError(
                f"{call.name} has no argument {quoted(name, 60)}: it takes {', '.join(declared) or 'none'}"
            )
        check(value, hints.get(name, Any), name)
        if not is_text(json.dumps(value, ensure_ascii=False)):
            raise ValueError(f"{name} has characters that are none")
    missing = [p.name for p in declared.values() if p.default is p.empty and p.name not in call.arguments]
    if missing:
        raise ValueError(f"{call.name} lacks the argument {missing[0]}")
    return dict(call.arguments)


def written(result: object) -> str:
    """Returns what a tool has returned as the policy reads it."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
