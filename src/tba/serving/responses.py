"""OpenAI's Responses API as calls of chat completions: its items become messages, an answer becomes items.

It follows the schemas that openai 3.57 publishes (`openai.types.responses`), as openai-agents 0.24 uses them; Codex,
which needs a longer context than the models it was tried with have, was not run. An answer's thought, text and calls
are items of one response; items of the assistant that stand together are one answer when they come back.

Invariant: as for chat completions, what cannot be done is refused or counted. No response is kept: a request has to
have its whole input.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from tba.serving.chat import ApiForm, ChatAnswer, ChatRequest, RequestRefused, parse_chat_request, write_event
from tba.types import Json

_UNSUPPORTED = ("previous_response_id", "conversation", "prompt", "background")
_OVERRIDES = ("reasoning", "truncation", "max_tool_calls")
_TEXTS = ("input_text", "output_text", "text", "refusal")
_KEPT_FIELDS = ("temperature", "top_p", "top_logprobs", "model", "stream")


def parse_responses_request(body: Json) -> ChatRequest:
    """Returns the request in a body. Raises `RequestRefused` for one that cannot be answered as it asks."""
    if not isinstance(body, dict):
        raise RequestRefused(400, f"the body is {type(body).__name__}, give a JSON object with an input")
    for name in _UNSUPPORTED:
        if body.get(name):
            raise RequestRefused(400, f"{name} is given, but no response is kept here: send the whole input", name)
    text = body.get("text")
    tools, hidden_tools = _chat_tools(body.get("tools"))
    request = parse_chat_request(
        {
            **{name: body[name] for name in _KEPT_FIELDS if name in body},
            "messages": _chat_messages(body.get("instructions"), body.get("input")),
            "tools": tools,
            "tool_choice": body.get("tool_choice"),
            "max_tokens": body.get("max_output_tokens"),
            "response_format": text.get("format") if isinstance(text, dict) else None,
        }
    )
    overrides = {name: body[name] for name in _OVERRIDES if body.get(name) not in (None, "disabled")}
    overrides |= {"tools": hidden_tools} if hidden_tools else {}
    return replace(request, overrides={**request.overrides, **overrides})


def _chat_tools(value: Json) -> tuple[Json, list[Json]]:
    """Returns the functions as tools of a chat, and the kinds of others, which only OpenAI's own servers run."""
    if not isinstance(value, list):
        return value, []
    tools, hidden_tools = [], []
    for tool in value:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            hidden_tools.append(tool.get("type") if isinstance(tool, dict) else None)
            continue
        tools.append({"type": "function", "function": {n: v for n, v in tool.items() if n not in ("type", "strict")}})
    return tools, hidden_tools


def _chat_messages(instructions: Json, items: Json) -> list[Json]:
    messages: list[dict[str, Json]] = []
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RequestRefused(400, "input is neither a text nor a list of items: give one of them")
    for item in items:
        message = _chat_message(item)
        if message["role"] != "assistant" or not messages or messages[-1]["role"] != "assistant":
            messages.append(message)
            continue
        answer = messages[-1]
        answer["content"] = "\n".join(filter(None, (answer["content"], message["content"])))
        answer["tool_calls"] = [*answer.get("tool_calls", []), *message.get("tool_calls", [])]
    return messages


def _chat_message(item: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the message, or the part of an answer, that an item is."""
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": _text(item.get("content"))}
    if kind == "reasoning":
        return {"role": "assistant", "content": ""}  # thoughts have no part in what a message is known by
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))}
    raise RequestRefused(400, f"input has an item of the type {kind!r:.40}, which is not served: leave it out")


def _text(content: Json) -> Json:
    """Returns a content as one text, or as chat completions would refuse it."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text", part.get("refusal")) for part in content if _is_text(part)]
    return "".join(texts) if len(texts) == len(content) else content


def _is_text(part: Json) -> bool:
    return (
        isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part.get("text", part.get("refusal")), str)
    )


# Answers


def responses_body(answer: ChatAnswer, request: ChatRequest) -> Json:
    """Returns an answer as the body of a response that is not streamed."""
    is_cut = answer.finish_reason == "length"
    return {
        **_frame(answer, request),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(answer, "incomplete" if is_cut else "completed"),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def _frame(answer: ChatAnswer, request: ChatRequest) -> dict[str, Json]:
    return {
        "id": answer.id.replace("chatcmpl-", "resp_"),
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto" if request.tools else "none",
        "tools": [{"type": "function", **tool["function"]} for tool in request.tools],
        "store": False,
    }


def _items(answer: ChatAnswer, status: str) -> list[dict[str, Any]]:
    """Returns the items of an answer: its thought, its text, its calls."""
    message, id_ = answer.answer, answer.id.replace("chatcmpl-", "")
    items: list[dict[str, Any]] = []
    if message.thought:
        content: list[Json] = [{"type": "reasoning_text", "text": message.thought}]
        items.append({"type": "reasoning", "id": f"rs_{id_}", "summary": [], "content": content, "status": status})
    if message.content or not message.calls:
        content = [{"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}]
        items.append({"type": "message", "id": f"msg_{id_}", "role": "assistant", "content": content, "status": status})
    for call in message.calls:
        fields = {"call_id": call["id"], **call["function"], "status": "completed"}
        items.append({"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", **fields})
    return items


def responses_events(answer: ChatAnswer, request: ChatRequest) -> Iterator[str]:
    """Yields the server-sent events of a streamed response: each item with its text at once."""
    numbers = count()

    def event(kind: str, **fields: Json) -> str:
        return write_event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    body = responses_body(answer, request)
    empty_response = {**body, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield event("response.created", response=empty_response)
    yield event("response.in_progress", response=empty_response)
    for index, item in enumerate(body["output"]):
        place = {"item_id": item["id"], "output_index": index}
        is_call = item["type"] == "function_call"
        empty_item = {**item, "status": "in_progress", **({"arguments": ""} if is_call else {"content": []})}
        yield event("response.output_item.added", output_index=index, item=empty_item)
        if is_call:
            arguments = item["arguments"]
            yield event("response.function_call_arguments.delta", **place, delta=arguments)
            yield event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        else:
            (part,) = item["content"]
            place |= {"content_index": 0}
            kind = f"response.{part['type']}"
            log_fields: dict[str, Json] = {"logprobs": []} if "logprobs" in part else {}
            yield event("response.content_part.added", **place, part={**part, "text": ""})
            yield event(f"{kind}.delta", **place, delta=part["text"], **log_fields)
            yield event(f"{kind}.done", **place, text=part["text"], **log_fields)
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{body['status']}", response=body)


def responses_error_event(error: RequestRefused) -> str:
    """Returns an error as the last event of a stream."""
    fields = {"code": error.code, "message": error.message, "param": None, "sequence_number": 0}
    return write_event({"type": "error", **fields}, "error")


RESPONSES = ApiForm(parse_responses_request, responses_body, responses_events, responses_error_event)
