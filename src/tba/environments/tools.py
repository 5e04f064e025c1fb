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
from tba.types import THOUGHTS, Json, is_text, quote

_NOT_TOOLS = {"reset", "step", "get_reward", "close", "isolation"}
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
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}  # how Qwen3-Coder's template writes them


def find_tools(environment: object) -> dict[str, Callable[..., Any]]:
    """Returns an environment's tools by name, in the order in which they are defined; none where it has a `step`."""
    if callable(getattr(environment, "step", None)):
        return {}
    kind, tools = type(environment), {}
    for name in (name for base in reversed(kind.__mro__[:-1]) for name in vars(base)):
        attribute = inspect.getattr_static(kind, name, None)
        if not name.startswith("_") and name not in _NOT_TOOLS and isinstance(attribute, _METHODS):
            tools[name] = getattr(environment, name)
    return tools


_METHODS = (FunctionType, staticmethod, classmethod)


def schemas_of(environment: object) -> tuple[Json, ...]:
    """Returns the tools as JSON schemas, as chat templates take them. Raises `UserError` where a tool lacks a type hint
    or a line of its docstring.
    """
    return tuple(_schema(environment, name, tool) for name, tool in find_tools(environment).items())


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
    error: str = ""
    id: str = ""  # the call's own name, where the policy gave it one
    has_texts: bool = False  # arguments are texts, which the types of the tool's parameters say how to read


def calls_in(text: str) -> list[Call]:
    """Returns the calls of a turn, in order; a turn without any is an answer.

    Read are the forms in which chat templates write calls: an object, or a list of them, in `<tool_call>` (Qwen,
    SmolLM2, Hermes), behind `[TOOL_CALLS]` (Mistral) or `<|tool_call|>` (Granite), or as the whole turn (Llama 3);
    GLM's keys and values and Qwen3-Coder's parameters in `<tool_call>`; a name and an object between DeepSeek's marks,
    or around Mistral's `[ARGS]`. What a model thinks before it speaks is no call.
    """
    turn = text
    for begin, end in THOUGHTS:
        turn = turn.rpartition(end)[2].partition(begin)[0]
    turn = turn.strip()
    if "<tool_call>" in turn:
        return [call for block in _BLOCK.findall(turn) for call in _calls_in_block(block.strip())]
    if _BEGIN in turn:
        return [_deepseek_call(block) for block in _DEEPSEEK.findall(turn)]
    if "[TOOL_CALLS]" in turn:
        return [call for part in turn.split("[TOOL_CALLS]")[1:] for call in _mistral_calls(part.strip())]
    if "<|tool_call|>" in turn:
        return _calls_in_json(turn.partition("<|tool_call|>")[2].removesuffix("<|/tool_call|>"))
    if turn.startswith("<function="):
        return _calls_in_functions(turn)
    if turn.startswith("<|python_tag|>"):
        return _calls_in_json(turn.removeprefix("<|python_tag|>"))
    return _calls_in_json_turn(turn) if turn.startswith("{") else []


def _calls_in_json(text: str) -> list[Call]:
    """Returns the calls that a text of JSON holds."""
    try:
        value = parse_json(text.strip(), Any)
    except ValueError as error:
        return [_unreadable_call(str(error))]
    return [_call_from_json(entry) for entry in (value if isinstance(value, list) else [value])]


def _unreadable_call(reason: str) -> Call:
    return Call("", error=f"the call cannot be read: it is {reason}")


def _call_from_json(value: Json) -> Call:
    if isinstance(value, Mapping) and isinstance(function := value.get("function"), Mapping):  # as OpenAI's API has it
        value = {**value, **function}
    if not isinstance(value, Mapping) or not isinstance(name := value.get("name"), str):
        return Call("", error='a call is an object with a "name" and its "arguments"')
    call_id = value.get("id", value.get("call_id"))
    valid_id = call_id if isinstance(call_id, str) and _ID.fullmatch(call_id) else ""
    return Call(name, _decode(value.get("arguments", value.get("parameters", {}))), id=valid_id)


def _decode(arguments: Json) -> Json:
    """Returns arguments; an object that was written as a text of JSON is read once more."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments, Any)
    except ValueError:
        return arguments


def _calls_in_json_turn(turn: str) -> list[Call]:
    """Returns the calls of a turn that is JSON and nothing else; an object without a tool's name is an answer."""
    try:
        values = [parse_json(turn, Any)]
    except ValueError:
        try:
            values = [parse_json(part, Any) for part in re.split("[;\n]", turn) if part.strip()]
        except ValueError:
            return _calls_in_json(turn) if _OBJECT.match(turn) else []
    return [_call_from_json(value) for value in values] if all(map(_is_call, values)) else []


def _is_call(value: Json) -> bool:
    """Returns whether a value is meant as a call."""
    if not isinstance(value, Mapping):
        return False
    has_name = "name" in value and (next(iter(value)) == "name" or bool({"arguments", "parameters"} & value.keys()))
    return has_name or (value.get("type") == "function" and bool({"name", "function"} & value.keys()))


def _calls_in_block(block: str) -> list[Call]:
    """Returns the calls between `<tool_call>` and its end."""
    if block.startswith("<function="):
        return _calls_in_functions(block)
    name, key, _ = block.partition("<arg_key>")
    if (key or name not in ("true", "false", "null")) and _NAME.fullmatch(name.strip()):
        return [_text_call(name.strip(), block[len(name) :], _PAIR)]
    return _calls_in_json(block)


def _calls_in_functions(turn: str) -> list[Call]:
    return [
        Call(name, _decode(body.strip())) if body.lstrip().startswith("{") else _text_call(name, body, _PARAMETER)
        for name, body in _FUNCTION.findall(turn)
    ]


def _text_call(name: str, body: str, pair_pattern: re.Pattern[str]) -> Call:
    """Returns a call whose arguments are written one by one, as texts."""
    if leftover := pair_pattern.sub("", body).strip():
        return _unreadable_call(f"not of arguments alone ({quote(leftover, 40)})")
    return Call(name, {key.strip(): value for key, value in pair_pattern.findall(body)}, has_texts=True)


def _deepseek_call(block: str) -> Call:
    kind, _, content = block.partition(_SEP)
    name, fence, behind_fence = content.partition("```json")  # of V3 and R1
    arguments = behind_fence.rpartition("```")[0]
    return Call(*(name.strip(), _decode(arguments.strip())) if fence else (kind.strip(), _decode(content.strip())))


def _mistral_calls(part: str) -> list[Call]:
    match = _MISTRAL.fullmatch(part)
    if match is None:
        return _calls_in_json(part)
    name, call_id, arguments = match.groups()
    return [Call(name.strip(), _decode(arguments.strip()), id=call_id or "")]


def bind_arguments(tools: Mapping[str, Callable[..., Any]], call: Call) -> dict[str, Json]:
    """Returns the arguments of a call as its tool takes them. Raises `ValueError` for a call that cannot be made."""
    if call.error:
        raise ValueError(call.error)
    if call.name not in tools:
        raise ValueError(f"there is no tool {quote(call.name, 60)}: the tools are {', '.join(tools)}")
    if not isinstance(call.arguments, dict):
        raise ValueError(f"the arguments of {call.name} are not an object")
    parameters, hints = inspect.signature(tools[call.name]).parameters, typing.get_type_hints(tools[call.name])
    arguments = {
        name: _parse(value, hints.get(name, Any)) if call.has_texts else value for name, value in call.arguments.items()
    }
    for name, value in arguments.items():
        if name not in parameters:
            raise ValueError(
                f"{call.name} has no argument {quote(name, 60)}: it takes {', '.join(parameters) or 'none'}"
            )
        check_json(value, hints.get(name, Any), name)
        if not is_text(json.dumps(value, ensure_ascii=False)):
            raise ValueError(f"{name} has characters that are none")
    missing_names = [p.name for p in parameters.values() if p.default is p.empty and p.name not in arguments]
    if missing_names:
        raise ValueError(f"{call.name} lacks the argument {missing_names[0]}")
    return arguments


def _parse(text: str, hint: Any) -> Json:
    """Returns an argument that is written as a text: the text where its parameter takes one, else what it spells."""
    try:
        value = _PYTHON_CONSTANTS[text.strip()] if text.strip() in _PYTHON_CONSTANTS else parse_json(text, Any)
    except ValueError:
        return text
    if hint is Any:
        return value
    return next((x for x in ((None, text) if value is None else (text, value)) if _has_type(x, hint)), value)


def _has_type(value: Json, hint: Any) -> bool:
    try:
        check_json(value, hint, "it")
    except ValueError:
        return False
    return True


def format_result(result: object) -> str:
    """Returns the result of a tool as the text that the policy reads."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
