"""Anthropic's Messages API as calls of chat completions: its blocks become messages, an answer becomes blocks.

It follows the schemas that anthropic 2.14 publishes (`anthropic.types`), with which it was tried; Claude Code, which
needs a longer context than the models it was tried with have, was not run. Signatures of thoughts are empty.

Invariant: as for chat completions, what cannot be done is refused or counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tba.serving.chat import ApiForm, ChatAnswer, ChatRequest, RequestRefused, parse_chat_request, write_event
from tba.types import Json, StopReason

_UNSUPPORTED = ("mcp_servers", "container", "output_format")
_OVERRIDES = ("thinking", "context_management", "output_config")
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}  # its client then sends all
_THOUGHTS = ("thinking", "redacted_thinking")
_KEPT_FIELDS = ("temperature", "top_p", "top_k", "model", "stream", "max_tokens")
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_TOOL_CHOICES = {"none": "none", "auto": "auto"}


def parse_messages_request(body: Json) -> ChatRequest:
    """Returns the request in a body. Raises `RequestRefused` for one that cannot be answered as it asks."""
    if not isinstance(body, dict):
        raise RequestRefused(400, f"the body is {type(body).__name__}, give a JSON object with messages")
    if body.get("thread"):
        raise RequestRefused(400, "thread is given, but no message is kept here: send all", "thread", _NO_THREADS)
    for name in _UNSUPPORTED:
        if body.get(name):
            raise RequestRefused(400, f"{name} is given, which this server does not do: leave it out", name)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise RequestRefused(400, "messages is no list of messages: give at least one, with a role and a content")
    tools, hidden_tools = _chat_tools(body.get("tools"))
    system = _text(body.get("system"))
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    chat_messages = [part for message in messages for part in _chat_messages(message)]
    request = parse_chat_request(
        {
            **{name: body[name] for name in _KEPT_FIELDS if name in body},
            "messages": [*([{"role": "system", "content": system}] if system else []), *chat_messages],
            "tools": tools,
            "tool_choice": _TOOL_CHOICES.get(kind, choice) if isinstance(kind, str) else choice,
            "stop": body.get("stop_sequences"),
        }
    )
    overrides = {name: body[name] for name in _OVERRIDES if body.get(name)}
    overrides |= {"tools": hidden_tools} if hidden_tools else {}
    return replace(request, overrides={**request.overrides, **overrides})


def _chat_tools(value: Json) -> tuple[Json, list[Json]]:
    """Returns the client's tools as tools of a chat, and the kinds of others, which only Anthropic's servers run."""
    if not isinstance(value, list):
        return value, []
    tools, hidden_tools = [], []
    for tool in value:
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
            hidden_tools.append(tool.get("type") if isinstance(tool, dict) else None)
            continue
        fields = {name: tool[name] for name in ("name", "description") if name in tool}
        tools.append({"type": "function", "function": {**fields, "parameters": tool.get("input_schema")}})
    return tools, hidden_tools


def _chat_messages(message: Mapping[str, Json]) -> list[dict[str, Json]]:
    """Returns the messages of a chat that a message is: one, or with results of tools one for each and for the texts
    between them.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        return [{"role": role, "content": content}]
    if role == "assistant":
        return [_chat_answer(content)]
    messages: list[dict[str, Json]] = []
    for block in content:
        if block.get("type") == "tool_result":
            result = _text(block.get("content", ""))
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n" + _block_text(block)
        else:
            messages.append({"role": role, "content": _block_text(block)})
    return messages


def _chat_answer(blocks: list[dict[str, Json]]) -> dict[str, Json]:
    texts, calls = [], []
    for block in blocks:
        if block.get("type") == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif block.get("type") not in _THOUGHTS:  # which have no part in what a message is known by
            texts.append(_block_text(block))
    return {"role": "assistant", "content": "\n".join(texts), **({"tool_calls": calls} if calls else {})}


def _block_text(block: Json) -> str:
    text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
    if not isinstance(text, str):
        kind = block.get("type") if isinstance(block, dict) else block
        raise RequestRefused(400, f"a message has a block of the type {kind!r:.40}: give texts and calls of tools")
    return text


def _text(content: Json) -> Json:
    """Returns a content, of blocks or not, as one text."""
    return "\n".join(map(_block_text, content)) if isinstance(content, list) else content


# Answers


def messages_body(answer: ChatAnswer, request: ChatRequest) -> Json:
    """Returns an answer as the body of a response that is not streamed."""
    stop_strings = request.stop_strings if answer.stop_reason is StopReason.STOP_STRING else ()
    reason = _STOP_REASONS.get(answer.finish_reason, "stop_sequence" if stop_strings else "end_turn")
    return {
        "id": answer.id.replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": _blocks(answer),
        "stop_reason": reason,
        "stop_sequence": stop_strings[0] if reason == "stop_sequence" and len(stop_strings) == 1 else None,
        "usage": {
            "input_tokens": answer.prompt_tokens - answer.cached_tokens,
            "cache_read_input_tokens": answer.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": answer.completion_tokens,
        },
    }


def _blocks(answer: ChatAnswer) -> list[dict[str, Json]]:
    """Returns the blocks of an answer: its thought, its text, its calls."""
    message, blocks = answer.answer, []
    if message.thought:
        blocks.append({"type": "thinking", "thinking": message.thought, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.calls:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


def messages_events(answer: ChatAnswer, request: ChatRequest) -> Iterator[str]:
    """Yields the server-sent events of a streamed response: each block at once."""
    body = messages_body(answer, request)

    def event(kind: str, **fields: Json) -> str:
        return write_event({"type": kind, **fields}, kind)

    opening = {**body, "content": [], "stop_reason": None, "stop_sequence": None}
    yield event("message_start", message={**opening, "usage": {**body["usage"], "output_tokens": 0}})
    empty: dict[str, Json]
    for index, block in enumerate(body["content"]):
        if block["type"] == "tool_use":
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            name = block["type"] if block["type"] == "text" else "thinking"
            empty, delta = {name: ""}, {"type": f"{name}_delta", name: block[name]}
        yield event("content_block_start", index=index, content_block={**block, **empty})
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    stop = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield event("message_delta", delta=stop, usage=body["usage"])
    yield event("message_stop")


def messages_error_event(error: RequestRefused) -> str:
    """Returns an error as the last event of a stream."""
    return write_event({"type": "error", "error": {"type": "api_error", "message": error.message}}, "error")


MESSAGES = ApiForm(parse_messages_request, messages_body, messages_events, messages_error_event)
