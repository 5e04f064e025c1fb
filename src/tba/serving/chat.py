"""Chat completions as OpenAI's clients send and read them: requests checked, messages compared, answers written.

Invariant: a request becomes a `ChatRequest` or a `RequestRefused`, never another error; nothing of it is evaluated. The
fields in `_UNSUPPORTED` are refused, those in `_OVERRIDES` are counted, and all others are ignored.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tba.environments.tools import Call, calls_in
from tba.errors import TbaError
from tba.tables import Refusal, conversation, parse_chat_text, tool_schemas
from tba.types import THOUGHTS, Json, Message, StopReason, is_text

POLICY = "policy"  # the name of the model that is trained
BASE = "base"  # of the same model as it was before training, which is never trained
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_UNSUPPORTED = {  # fields that would change what an answer is, each with the values that change nothing
    "n": (None, 1),
    "best_of": (None, 1),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "functions": (None, []),
    "function_call": (None, "none"),
    "prediction": (None,),
    "web_search_options": (None,),
}
_OVERRIDES = ("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty", "top_k", "min_p")
_MAX_STOPS = 16
_REPEATED_CODE = re.compile(  # that smolagents has found in an answer, and writes behind it as a call
    r"\nCalling tools:\n\[\{'id': 'call_\d+', 'type': 'function', "
    r"'function': \{'name': 'python_interpreter', 'arguments': (?:'[^\n]*'|\"[^\n]*\")\}\}\]\Z"
)
_FINISH_REASONS = {StopReason.LENGTH: "length"}  # others: stop


class RequestRefused(TbaError):
    """Raised for a request that is not served: an HTTP status, one sentence and a code, as OpenAI's API names them."""

    def __init__(self, status: int, message: str, code: str | None = None, details: Json = None) -> None:
        """details: what a client's library reads of an error, in its API's own form."""
        super().__init__(message)
        self.status, self.message, self.code, self.details = status, message, code, details

    @property
    def body(self) -> Json:
        """Returns the error as the body of a response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        details = {} if self.details is None else {"details": self.details}
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code, **details}}


@dataclass(frozen=True)
class ChatRequest:
    """Holds what a request asks for: messages in the form that chat templates take, and limits of its answer."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()  # schemas; none where `tool_choice` forbids calls
    model: str = POLICY
    max_tokens: int | None = None  # of the answer
    stop_strings: tuple[str, ...] = ()
    is_streamed: bool = False
    includes_usage: bool = False  # of a stream
    has_logprobs: bool = False
    overrides: Mapping[str, Json] = field(default_factory=dict)  # fields that the run decides instead


MessageKey: TypeAlias = "tuple[Any, ...]"


def parse_chat_request(body: Json) -> ChatRequest:
    """Returns the request in a body. Raises `RequestRefused` for one that cannot be answered as it asks."""
    if not isinstance(body, dict):
        raise RequestRefused(400, f"the body is {type(body).__name__}, give a JSON object with messages")
    for name, values in _UNSUPPORTED.items():
        if body.get(name) not in values:
            raise RequestRefused(
                400, f"{name} is {json.dumps(body[name]):.80}, which this server does not do: leave it out", name
            )
    messages = _parse_messages(body.get("messages"))
    tools = tool_schemas(body.get("tools"))
    if isinstance(tools, Refusal):
        raise RequestRefused(400, f"tools: {tools}")
    if not is_text(json.dumps(tools, ensure_ascii=False)):  # tools may be a text of JSON, which can spell it
        raise RequestRefused(400, "tools has half of a surrogate pair, give valid texts", "tools")
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise RequestRefused(400, f"max_tokens is {max_tokens!r:.40}, give a whole number of at least 1")
    options = body.get("stream_options")
    tool_choice = body.get("tool_choice")
    overrides = {name: body[name] for name in _OVERRIDES if body.get(name) is not None}
    if tool_choice not in (None, "auto", "none"):
        overrides["tool_choice"] = tool_choice
    model = body.get("model", POLICY)
    return ChatRequest(
        messages=messages,
        tools=() if tool_choice == "none" else tools,
        model=model if isinstance(model, str) else POLICY,
        max_tokens=max_tokens,
        stop_strings=_parse_stop_strings(body.get("stop")),
        is_streamed=bool(body.get("stream")),
        includes_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        has_logprobs=bool(body.get("logprobs")),
        overrides=overrides,
    )


def _parse_messages(value: Json) -> tuple[Message, ...]:
    value = parse_chat_text(value)
    if not isinstance(value, list) or not value:
        raise RequestRefused(400, "messages is no list of messages: give at least one, with a role and a content")
    messages = conversation([_with_role(message) for message in value])
    if isinstance(messages, Refusal):
        raise RequestRefused(400, f"{messages.reason}: give texts; images and sound are not served")
    if not all(map(_has_texts, messages)):
        raise RequestRefused(400, "a message has a name, an id or a call of a tool that is not of valid texts")
    return messages


def _has_texts(message: Message) -> bool:
    """Returns whether the ids and names of a message are texts, and no text of its calls has half a surrogate pair."""
    calls = message.get("tool_calls", [])
    functions = [call.get("function", {}) if isinstance(call, dict) else {} for call in calls]
    ids = [message.get(name, "") for name in ("name", "tool_call_id")]
    ids += [call.get("id", "") for call in calls if isinstance(call, dict)]
    ids += [function.get("name", "") if isinstance(function, dict) else "" for function in functions]
    return all(isinstance(id_, str) for id_ in ids) and is_text(json.dumps([ids, calls], ensure_ascii=False))


def _with_role(message: Json) -> Json:
    """Returns a message with the role that chat templates know. Raises `RequestRefused` for another role."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestRefused(400, f"a message has the role {role!r:.40}: give one of {', '.join(_ROLES)}")
    if role == "assistant" and message.get("content") is None:
        message = {**message, "content": ""}
    return {**message, "role": _ROLES[role]}


def _parse_stop_strings(value: Json) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or len(texts) > _MAX_STOPS or not all(isinstance(t, str) and t for t in texts):
        raise RequestRefused(400, f"stop is {value!r:.80}, give one text or a list of at most {_MAX_STOPS}")
    if not all(map(is_text, texts)):
        raise RequestRefused(400, "stop has half of a surrogate pair, give valid text")
    return tuple(texts)


def message_key(message: Message) -> MessageKey:
    """Returns what identifies a message: its role, its text without blanks around it, its calls with the arguments
    parsed, and whose call a result answers or which user speaks. Two messages that a client writes differently and
    means alike have one key. Thoughts have no part in it, and neither has code that smolagents repeats.

    The key is empty for an answer without a text and calls, which many clients do not send back.
    """
    role, text = message["role"], message["content"].strip()
    if role == "assistant":
        text = _split_thought(_REPEATED_CODE.sub("", text))[1].strip()
        calls = tuple(_call_key(call) for call in message.get("tool_calls") or ())
        return (role, text, calls) if text or calls else ()
    return role, text, message.get("tool_call_id" if role == "tool" else "name") or ""


def _call_key(call: Json) -> MessageKey:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return (repr(call),)
    return call.get("id") or "", function.get("name") or "", json.dumps(function.get("arguments"), sort_keys=True)


@dataclass(frozen=True)
class AnswerMessage:
    """Holds an answer as an assistant's message."""

    content: str
    thought: str = ""
    calls: tuple[Json, ...] = ()  # as OpenAI writes them, arguments as texts of JSON

    @classmethod
    def of(cls, text: str, with_tools: bool) -> AnswerMessage:
        """Returns the message that a sampled text stands for. with_tools: calls are read from it."""
        thought, content = _split_thought(text)
        calls = [call for call in calls_in(content) if _can_be_sent(call)] if with_tools else []
        if not calls:
            return cls(content, thought)
        return cls(_text_before_calls(content), thought, tuple(map(_write_call, calls)))

    @property
    def message(self) -> Json:
        """Returns the message of a response."""
        message: dict[str, Json] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        message |= {"reasoning_content": self.thought} if self.thought else {}
        return message | ({"tool_calls": list(self.calls)} if self.calls else {})

    def message_keys(self, stop_string: str = "") -> list[MessageKey]:
        """Returns the keys that the message may have when its client sends it back: as it was sent, with the stop
        string that ended it (smolagents completes its code so), and with its calls as a text (smolagents' way).
        """
        messages = [self.message]
        if stop_string and not self.calls:
            messages.append({"role": "assistant", "content": self.content + stop_string})
        if self.calls:
            messages.append({"role": "assistant", "content": self._text_of_calls()})
        return [message_key(message) for message in _parse_messages(messages)]

    def _text_of_calls(self) -> str:
        """Returns the message as smolagents sends it back: the text, and behind it the calls as Python writes them, in
        the order of their ids.
        """
        calls = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in sorted(self.calls, key=lambda call: call["id"])
        ]
        return "\n".join(filter(None, (self.content, f"Calling tools:\n{calls}")))


def _split_thought(text: str) -> tuple[str, str]:
    """Returns the thought that a text begins with, and the text behind it."""
    for begin, end in THOUGHTS:
        before, mark, behind = text.rpartition(end)
        if mark:
            return before.partition(begin)[2].strip() if begin in before else before.strip(), behind.strip()
        if text.lstrip().startswith(begin):
            return text.lstrip().removeprefix(begin).strip(), ""
    return "", text


def _can_be_sent(call: Call) -> bool:
    return not call.error and is_text(json.dumps([call.id, call.name, call.arguments], ensure_ascii=False))


def _text_before_calls(content: str) -> str:
    """Returns the text before the first call; empty where the whole answer is a call."""
    marks = ("<tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>", "<function=", "<\uff5ctool")
    places = [place for mark in marks if (place := content.find(mark)) >= 0]
    return content[: min(places)].strip() if places else ""


def _write_call(call: Call) -> Json:
    arguments = call.arguments if isinstance(call.arguments, dict) else {}
    return {
        "id": call.id or f"call_{secrets.token_hex(8)}",
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


@dataclass(frozen=True)
class ChatAnswer:
    """Holds an answer with its tokens' counts, ready to be written in either form."""

    model: str
    answer: AnswerMessage
    stop_reason: StopReason
    prompt_tokens: int
    cached_tokens: int  # of the prompt, that were not read again
    completion_tokens: int
    logprobs: Json = None
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.answer.calls else _FINISH_REASONS.get(self.stop_reason, "stop")

    @property
    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def body(self) -> Json:
        """Returns the body of a response that is not streamed."""
        choice = {
            "index": 0,
            "message": self.answer.message,
            "finish_reason": self.finish_reason,
            "logprobs": self.logprobs,
        }
        return self._frame("chat.completion", [choice]) | {"usage": self.usage}

    def events(self, includes_usage: bool) -> Iterator[str]:
        """Yields the server-sent events of a streamed response: the whole answer, its end, and its usage."""
        delta = dict(self.answer.message)
        if self.answer.calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(self.answer.calls)]
        yield self._event([{"index": 0, "delta": delta, "finish_reason": None, "logprobs": self.logprobs}])
        yield self._event([{"index": 0, "delta": {}, "finish_reason": self.finish_reason, "logprobs": None}])
        if includes_usage:
            yield write_event(self._frame("chat.completion.chunk", []) | {"usage": self.usage})
        yield "data: [DONE]\n\n"

    def _event(self, choices: Sequence[Json]) -> str:
        return write_event(self._frame("chat.completion.chunk", choices))

    def _frame(self, kind: str, choices: Sequence[Json]) -> dict[str, Json]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": list(choices)}


def write_event(value: Json, name: str = "") -> str:
    """Returns a value as a server-sent event, with a name where its API gives events names."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


@dataclass(frozen=True)
class ApiForm:
    """Holds how requests of one API are read, and how it has answers written, which all are calls of chats."""

    parse: Callable[[Json], ChatRequest]
    body: Callable[[ChatAnswer, ChatRequest], Json]
    events: Callable[[ChatAnswer, ChatRequest], Iterator[str]]
    error_event: Callable[[RequestRefused], str]  # where a stream has begun


CHAT = ApiForm(
    parse_chat_request,
    lambda answer, _: answer.body,
    lambda answer, request: answer.events(request.includes_usage),
    lambda error: write_event(error.body),
)
