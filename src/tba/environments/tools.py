"""Public methods of an environment as tools: how they are described, and how a turn calls them.

Invariant: a turn is data. A call names a tool and gives arguments as JSON or as texts, whose types are checked against
the method's hints; nothing is evaluated. Whatever is wrong with a call is said to the policy and ends nothing. What a
model thinks is no call, also where its thoughts have no end.
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
from tba.json_input import check_json, parse_json
from tba.markup import DEEPSEEK_CALL
from tba.types import THOUGHTS, Json, is_text, quoted

_NO_TOOLS = {"reset", "step", "get_reward", "close"}
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)  # Qwen, SmolLM2, Hermes, GLM
# no begin is read beyond the next one, so that a turn that repeats itself is read in linear time
_PAIR = re.compile(  # GLM
    r"<arg_key>((?>(?:(?!</?arg_key>).)*))</arg_key>\s*+<arg_value>((?>(?:(?!<arg_key>|</arg_value>).)*))</arg_value>",
    re.DOTALL,
)
_FUNCTION = re.compile(r"<function=([^<>\n]++)>(.*?)(?:</function>|\Z)", re.DOTALL)  # Qwen3-Coder, Llama 3.1
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]++)>\n?((?>(?:(?!\n?</parameter>|<parameter=).)*))\n?</parameter>", re.DOTALL
)
_BEGIN, _SEP, _END = DEEPSEEK_CALL
_DEEPSEEK = re.compile(f"{re.escape(_BEGIN)}(.*?)(?:{re.escape(_END)}|\\Z)", re.DOTALL)
_MISTRAL = re.compile(r"([^\[\]{}]+?)(?:\[CALL_ID\](\w*))?\[ARGS\](.*)", re.DOTALL)  # of its later versions
_OBJECT = re.compile(r'\{\s*"(?:name|arguments|parameters|type"\s*:\s*"function)"')  # Llama 3: the whole turn
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_ID = re.compile(r"[\w.:-]{1,64}")
_SPELT = {"True": True, "False": False, "None": None}  # how Qwen3-Coder's template writes them


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
    """A call that a turn makes: a tool by name, with its arguments; or what is wrong with it."""

    name: str
    arguments: Json = None
    wrong: str = ""
    id: str = ""  # the call's own name, where the policy gave it one
    texts: bool = False  # arguments are texts, which the types of the tool's parameters say how to read


def calls_in(text: str) -> list[Call]:
    """Returns the calls of a turn, in order; a turn without any is an answer.

    Read are the forms in which chat templates write calls: an object, or a list of them, in `<tool_call>` (Qwen,
    SmolLM2, Hermes), behind `[TOOL_CALLS]` (Mistral) or `<|tool_call|>` (Granite), or as the whole turn (Llama 3);
    GLM's keys and values and Qwen3-Coder's parameters in `<tool_call>`; a name and an object between DeepSeek's marks,
    or around Mistral's `[ARGS]`. What a model thinks before it speaks is no call.
    """
    said = text
    for begin, end in THOUGHTS:
        said = said.rpartition(end)[2].partition(begin)[0]
    said = said.strip()
    if "<tool_call>" in said:
        return [call for block in _BLOCK.findall(said) for call in _block(block.strip())]
    if _BEGIN in said:
        return [_deepseek(block) for block in _DEEPSEEK.findall(said)]
    if "[TOOL_CALLS]" in said:
        return [call for part in said.split("[TOOL_CALLS]")[1:] for call in _mistral(part.strip())]
    if "<|tool_call|>" in said:
        return _read(said.partition("<|tool_call|>")[2].removesuffix("<|/tool_call|>"))
    if said.startswith("<function="):
        return _functions(said)
    if said.startswith("<|python_tag|>"):
        return _read(said.removeprefix("<|python_tag|>"))
    return _whole(said) if said.startswith("{") else []


def _read(text: str) -> list[Call]:
    """Returns the calls that JSON holds."""
    try:
        found = parse_json(text.strip(), Any)
    except ValueError as error:
        return [_unread(str(error))]
    return [_call(one) for one in (found if isinstance(found, list) else [found])]


def _unread(why: str) -> Call:
    return Call("", wrong=f"the call cannot be read: it is {why}")


def _call(value: Json) -> Call:
    if isinstance(value, Mapping) and isinstance(function := value.get("function"), Mapping):  # as OpenAI's API has it
        value = {**value, **function}
    if not isinstance(value, Mapping) or not isinstance(name := value.get("name"), str):
        return Call("", wrong='a call is an object with a "name" and its "arguments"')
    given = value.get("id", value.get("call_id"))
    named = given if isinstance(given, str) and _ID.fullmatch(given) else ""
    return Call(name, _decoded(value.get("arguments", value.get("parameters", {}))), id=named)


def _decoded(arguments: Json) -> Json:
    """Returns arguments; an object that was written as a text of JSON is read once more."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments, Any)
    except ValueError:
        return arguments


def _whole(said: str) -> list[Call]:
    """Returns the calls of a turn that is JSON and nothing else; an object without a tool's name is an answer."""
    try:
        found = [parse_json(said, Any)]
    except ValueError:
        try:
            found = [parse_json(part, Any) for part in re.split("[;\n]", said) if part.strip()]
        except ValueError:
            return _read(said) if _OBJECT.match(said) else []
    return [_call(one) for one in found] if all(map(_calls, found)) else []


def _calls(value: Json) -> bool:
    """Returns whether an object is meant as a call."""
    if not isinstance(value, Mapping):
        return False
    named = "name" in value and (next(iter(value)) == "name" or bool({"arguments", "parameters"} & value.keys()))
    return named or (value.get("type") == "function" and bool({"name", "function"} & value.keys()))


def _block(block: str) -> list[Call]:
    """Returns the calls between `<tool_call>` and its end."""
    if block.startswith("<function="):
        return _functions(block)
    name, key, _ = block.partition("<arg_key>")
    if (key or name not in ("true", "false", "null")) and _NAME.fullmatch(name.strip()):
        return [_texts(name.strip(), block[len(name) :], _PAIR)]
    return _read(block)


def _functions(said: str) -> list[Call]:
    return [
        Call(name, _decoded(body.strip())) if body.lstrip().startswith("{") else _texts(name, body, _PARAMETER)
        for name, body in _FUNCTION.findall(said)
    ]


def _texts(name: str, body: str, pair: re.Pattern[str]) -> Call:
    """Returns a call whose arguments are written one by one, as texts."""
    if left := pair.sub("", body).strip():
        return _unread(f"not of arguments alone ({quoted(left, 40)})")
    return Call(name, {key.strip(): value for key, value in pair.findall(body)}, texts=True)


def _deepseek(block: str) -> Call:
    kind, _, said = block.partition(_SEP)
    name, fence, rest = said.partition("```json")  # of V3 and R1
    arguments = rest.rpartition("```")[0]
    return Call(*(name.strip(), _decoded(arguments.strip())) if fence else (kind.strip(), _decoded(said.strip())))


def _mistral(part: str) -> list[Call]:
    found = _MISTRAL.fullmatch(part)
    if found is None:
        return _read(part)
    name, given, arguments = found.groups()
    return [Call(name.strip(), _decoded(arguments.strip()), id=given or "")]


def bound(tools: Mapping[str, Callable[..., Any]], call: Call) -> dict[str, Json]:
    """Returns the arguments of a call as its tool takes them. Raises `ValueError` for a call that cannot be made."""
    if call.wrong:
        raise ValueError(call.wrong)
    if call.name not in tools:
        raise ValueError(f"there is no tool {quoted(call.name, 60)}: the tools are {', '.join(tools)}")
    if not isinstance(call.arguments, dict):
        raise ValueError(f"the arguments of {call.name} are not an object")
    declared, hints = inspect.signature(tools[call.name]).parameters, typing.get_type_hints(tools[call.name])
    arguments = {
        name: _typed(value, hints.get(name, Any)) if call.texts else value for name, value in call.arguments.items()
    }
    for name, value in arguments.items():
        if name not in declared:
            raise ValueError(
                f"{call.name} has no argument {quoted(name, 60)}: it takes {', '.join(declared) or 'none'}"
            )
        check_json(value, hints.get(name, Any), name)
        if not is_text(json.dumps(value, ensure_ascii=False)):
            raise ValueError(f"{name} has characters that are none")
    missing = [p.name for p in declared.values() if p.default is p.empty and p.name not in arguments]
    if missing:
        raise ValueError(f"{call.name} lacks the argument {missing[0]}")
    return arguments


def _typed(text: str, hint: Any) -> Json:
    """Returns an argument that is written as a text: the text where its parameter takes one, else what it spells."""
    try:
        value = _SPELT[text.strip()] if text.strip() in _SPELT else parse_json(text, Any)
    except ValueError:
        return text
    if hint is Any:
        return value
    return next((one for one in ((None, text) if value is None else (text, value)) if _fits(one, hint)), value)


def _fits(value: Json, hint: Any) -> bool:
    try:
        check_json(value, hint, "it")
    except ValueError:
        return False
    return True


def written(result: object) -> str:
    """Returns what a tool has returned as the policy reads it."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
