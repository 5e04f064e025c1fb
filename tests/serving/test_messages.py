"""Anthropic's Messages API: requests as anthropic 2.14 has sent them, and answers as it reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tba.serving.chat import AnswerMessage, ChatAnswer, ChatRequest, RequestRefused, message_key
from tba.serving.messages import MESSAGES, parse_messages_request
from tba.types import Json, StopReason

CALL = '<tool_call>{"name": "multiply", "arguments": {"b": 34, "a": 12}}</tool_call>'
ANSWERS = ("408", CALL, f"<think>Hm.</think>Sure.\n{CALL}\n{CALL}")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"name": "multiply", "description": "Multiply.", "input_schema": SCHEMA}
USER = {"role": "user", "content": "What is 12 * 34?"}
RECORDED: dict[str, Any] = {
    "max_tokens": 64,
    "model": "policy",
    "system": "You calculate with tools.",
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"thinking": "Hm.", "type": "thinking", "signature": ""},
                {"text": "Sure.", "type": "text"},
                {"id": "call_1", "input": {"b": 34, "a": 12}, "name": "multiply", "type": "tool_use"},
                {"id": "call_2", "input": {}, "name": "multiply", "type": "tool_use"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "408"},
                {
                    "type": "tool_result",
                    "tool_use_id": "call_2",
                    "content": [{"type": "text", "text": "no a"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
    "tools": [TOOL],
}


def answered(text: str, stop_reason: StopReason = StopReason.EOS) -> ChatAnswer:
    return ChatAnswer("policy", AnswerMessage.of(text, True), stop_reason, 20, 15, 7)


def test_blocks_become_messages() -> None:
    request = parse_messages_request(RECORDED)
    system, user, answer, *others = request.messages
    assert (system, user) == ({"role": "system", "content": "You calculate with tools."}, USER)
    assert answer["content"] == "Sure."
    assert [(call["id"], call["function"]["arguments"]) for call in answer["tool_calls"]] == [
        ("call_1", {"a": 12, "b": 34}),
        ("call_2", {}),
    ]
    assert others == [
        {"role": "tool", "tool_call_id": "call_1", "content": "408"},
        {"role": "tool", "tool_call_id": "call_2", "content": "no a"},
        {"role": "user", "content": "Go on."},
    ]
    function = {"name": "multiply", "description": "Multiply.", "parameters": SCHEMA}
    assert request.tools == ({"type": "function", "function": function},)
    assert request.max_tokens == 64
    assert not request.overrides


def test_a_system_prompt_may_be_blocks_and_tools_may_be_hidden() -> None:
    blocks = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    request = parse_messages_request({**RECORDED, "system": blocks, "tool_choice": {"type": "none"}})
    assert request.messages[0] == {"role": "system", "content": "Be\nbrief."}
    assert request.tools == ()


def test_what_others_decide_is_counted() -> None:
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    fields = {"tools": tools, "tool_choice": {"type": "any"}, "top_k": 5, "thinking": {"type": "disabled"}}
    request = parse_messages_request({**RECORDED, **fields})
    assert request.overrides.keys() == {"tools", "tool_choice", "top_k", "thinking"}
    assert len(request.tools) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": "hello"}, "no list of messages"),
        ({"messages": []}, "no list of messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "'text'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
        ({"system": [{"type": "image"}]}, "'image'"),
        ({"tools": {"name": "x"}}, "tools"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_what_cannot_be_answered_as_asked_is_refused(fields: dict[str, Json], reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason) as refused:
        parse_messages_request({**RECORDED, **fields})
    assert refused.value.status == 400


def test_a_client_that_would_have_its_messages_kept_is_told_to_send_them_all() -> None:
    """By this error anthropic's tool runner knows to go on without a thread."""
    with pytest.raises(RequestRefused) as refused:
        parse_messages_request({**RECORDED, "thread": {"type": "create"}})
    assert refused.value.body["error"]["details"]["error_code"] == "thread_unsupported_request"


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_is_recognised_when_its_blocks_come_back(text: str) -> None:
    answer = answered(text)
    body = MESSAGES.body(answer, ChatRequest(()))
    usage = body["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (5, 15, 7)
    sent = {"role": "assistant", "content": body["content"]}
    _, message = parse_messages_request({"messages": [USER, sent]}).messages
    assert message_key(message) in answer.answer.message_keys()


@pytest.mark.parametrize(
    ("text", "stop_reason", "stops", "expected"),
    [
        ("408", StopReason.EOS, (), ("end_turn", None)),
        ("408", StopReason.LENGTH, (), ("max_tokens", None)),
        ("408", StopReason.STOP_STRING, ("END",), ("stop_sequence", "END")),
        (CALL, StopReason.EOS, (), ("tool_use", None)),
    ],
)
def test_an_answer_says_how_it_ended(
    text: str, stop_reason: StopReason, stops: tuple[str, ...], expected: tuple[str, str | None]
) -> None:
    body = MESSAGES.body(answered(text, stop_reason), ChatRequest((), stop_strings=stops))
    assert (body["stop_reason"], body["stop_sequence"]) == expected


@pytest.mark.parametrize("text", [*ANSWERS, ""])
def test_the_events_of_a_stream_add_up_to_the_answer(text: str) -> None:
    answer, request = answered(text), ChatRequest(())
    message: Any = None  # as anthropic's client gathers it
    for written in MESSAGES.events(answer, request):
        name, data = written.removesuffix("\n\n").split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            kind = delta.pop("type")
            if kind == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                (field,) = delta
                assert kind == f"{field}_delta"
                block[field] += delta[field]
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    assert event["type"] == "message_stop"
    assert message == MESSAGES.body(answer, request)


def test_an_error_ends_a_stream() -> None:
    written = MESSAGES.error_event(RequestRefused(503, "the run has ended", "run_ended"))
    assert written.startswith("event: error\ndata: ")
    assert json.loads(written.partition("data: ")[2])["error"]["message"] == "the run has ended"
