"""Requests in which one value has been replaced by another: each is answered or refused, in all forms of calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from chat_families import tokenizer
from serving.test_served_engine import TOOL
from tba.serving.chat import ChatRequest, RequestRefused, parse_chat_request
from tba.serving.episode import ConversationEncoder, ConversationTree
from tba.serving.messages import parse_messages_request
from tba.serving.responses import parse_responses_request
from tba.types import Json, Prompt

DEEP = "[" * 500 + "]" * 500
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1e308, 10**30, "", "x", DEEP, '[{"a": "\\ud800"}]', '{"a": "\\ud800"}', '{"a": NaN}'),
    *([], [None], ["x"], [[]], [{}], {}, {"type": "text"}, {"x": {"y": [1]}}, {"type": ["text"], "text": 3}),
)
FUNCTION = TOOL["function"]
CHAT = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is 1 + 1?"}]},
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "max_tokens": 5,
    "stop": ["\n"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 1.0,
    "seed": 3,
    "logprobs": True,
    "n": 1,
    "response_format": {"type": "text"},
}
RESPONSES = {
    "model": "policy",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "What is 1 + 1?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ],
    "tools": [{"type": "function", **FUNCTION, "strict": True}],
    "tool_choice": {"type": "function", "name": "add"},
    "max_output_tokens": 5,
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "stream": True,
}
MESSAGES = {
    "model": "policy",
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "What is 1 + 1?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "1", "signature": ""},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
    "tools": [{"name": "add", "description": "adds", "input_schema": FUNCTION["parameters"]}],
    "tool_choice": {"type": "auto"},
    "max_tokens": 5,
    "stop_sequences": ["\n"],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}


def variants(value: Json) -> Iterator[Json]:
    """The value with one of its parts, or the whole, replaced by each odd value or left out."""
    yield from ODD_VALUES
    if isinstance(value, dict):
        for name, part in value.items():
            yield {other: kept for other, kept in value.items() if other != name}
            yield from ({**value, name: variant} for variant in variants(part))
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield [*value[:i], *value[i + 1 :]]
            yield from ([*value[:i], variant, *value[i + 1 :]] for variant in variants(part))


@pytest.mark.parametrize(
    ("parse", "body"),
    [(parse_chat_request, CHAT), (parse_responses_request, RESPONSES), (parse_messages_request, MESSAGES)],
)
def test_a_request_with_any_part_replaced_is_read_or_refused(parse: Any, body: Any) -> None:
    prompt = Prompt("task", np.array([1], np.int32))
    tree = ConversationTree(prompt, ConversationEncoder(tokenizer("qwen3", "chat")), max_tokens=1 << 30)
    assert isinstance(parse(body), ChatRequest)
    refusals: list[RequestRefused] = []
    count = 0
    for variant in variants(body):
        count += 1
        try:
            tree.begin_call(parse(variant))
        except RequestRefused as refusal:
            refusals.append(refusal)
    assert 50 < len(refusals) < count - 50
    assert all(400 <= refusal.status < 500 and len(json.dumps(refusal.body)) < 2000 for refusal in refusals)
