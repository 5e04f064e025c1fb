"""OpenAI's Responses API: requests as openai-agents 0.24 has sent them, and answers as openai 3.57 reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tba.serving.chat import AnswerMessage, ChatAnswer, ChatRequest, RequestRefused, message_key
from tba.serving.responses import RESPONSES, parse_responses_request
from tba.types import Json, StopReason

CALL = '<tool_call>{"name": "multiply", "arguments": {"b": 34, "a": 12}}</tool_call>'
ANSWERS = ("408", "", CALL, f"<think>Hm.</think>Sure.\n{CALL}\n{CALL}")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"name": "multiply", "parameters": PARAMETERS, "strict": True, "type": "function", "description": "Multiply."}
RECORDED: dict[str, Any] = {
    "model": "policy",
    "include": [],
    "instructions": "You calculate with tools.",
    "input": [
        {"role": "user", "content": "What is 12 * 34?"},
        {"id": "rs_1", "summary": [], "type": "reasoning", "content": [{"text": "Hm.", "type": "reasoning_text"}]},
        {
            "id": "msg_1",
            "content": [{"annotations": [], "text": "Sure.", "type": "output_text", "logprobs": []}],
            "role": "assistant",
            "status": "completed",
            "type": "message",
        },
        {
            "arguments": '{"b": 34, "a": 12}',
            "call_id": "call_1",
            "name": "multiply",
            "type": "function_call",
            "id": "fc_1",
            "status": "completed",
        },
        {"call_id": "call_1", "output": "408", "type": "function_call_output"},
        {"role": "user", "content": [{"type": "input_text", "text": "Add 7."}]},
    ],
    "tools": [TOOL],
    "max_output_tokens": 64,
}


def answered(text: str, stop_reason: StopReason = StopReason.EOS) -> ChatAnswer:
    return ChatAnswer("policy", AnswerMessage.of(text, True), stop_reason, 20, 15, 7)


def test_items_become_messages() -> None:
    request = parse_responses_request(RECORDED)
    function = {"name": "multiply", "arguments": {"a": 12, "b": 34}}
    assert request.messages == (
        {"role": "system", "content": "You calculate with tools."},
        {"role": "user", "content": "What is 12 * 34?"},
        {
            "role": "assistant",
            "content": "Sure.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "408"},
        {"role": "user", "content": "Add 7."},
    )
    assert request.tools == (
        {"type": "function", "function": {"name": "multiply", "parameters": PARAMETERS, "description": "Multiply."}},
    )
    assert request.max_tokens == 64
    assert not request.overrides


def test_an_input_may_be_a_text() -> None:
    assert parse_responses_request({"input": "Hello."}).messages == ({"role": "user", "content": "Hello."},)


def test_what_others_decide_is_counted() -> None:
    tools = [TOOL, {"type": "web_search"}]
    request = parse_responses_request({**RECORDED, "tools": tools, "reasoning": {"effort": "low"}, "temperature": 0.5})
    assert request.overrides == {"temperature": 0.5, "reasoning": {"effort": "low"}, "tools": ["web_search"]}
    assert len(request.tools) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "send the whole input"),
        ({"conversation": "conv_1"}, "send the whole input"),
        ({"input": None}, "neither a text nor a list"),
        ({"input": [3]}, "neither a text nor a list"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "images"),
        ({"text": {"format": {"type": "json_schema"}}}, "response_format"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"max_output_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_what_cannot_be_answered_as_asked_is_refused(fields: dict[str, Json], reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason) as refused:
        parse_responses_request({**RECORDED, **fields})
    assert refused.value.status == 400


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_is_recognised_when_its_items_come_back(text: str) -> None:
    answer, request = answered(text), ChatRequest(())
    body = RESPONSES.body(answer, request)
    assert (body["object"], body["status"]) == ("response", "completed")
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 15
    items = [{"role": "user", "content": "Hello."}, *body["output"], {"role": "user", "content": "Go on."}]
    _, message, _ = parse_responses_request({"input": items}).messages
    assert message_key(message) in answer.answer.message_keys()


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    body = RESPONSES.body(answered("408", StopReason.LENGTH), ChatRequest(()))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("stop_reason", [StopReason.EOS, StopReason.LENGTH])
def test_the_events_of_a_stream_add_up_to_the_answer(text: str, stop_reason: StopReason) -> None:
    answer, request = answered(text, stop_reason), parse_responses_request(RECORDED)
    events = []
    for written in RESPONSES.events(answer, request):
        name, data = written.removesuffix("\n\n").split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output: list[Any] = []  # as openai's client gathers it
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
        elif kind == "response.content_part.added":
            output[event["output_index"]]["content"].append(event["part"])
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            output[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "response.function_call_arguments.delta":
            output[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "response.output_item.done":
            output[event["output_index"]]["status"] = event["item"]["status"]
            assert output[event["output_index"]] == event["item"]
    last_event = events[-1]
    assert last_event["type"] == f"response.{last_event['response']['status']}"
    assert last_event["response"]["output"] == output
    assert events[0]["response"]["output"] == []


def test_an_error_ends_a_stream() -> None:
    written = RESPONSES.error_event(RequestRefused(503, "the run has ended", "run_ended"))
    assert written.startswith("event: error\ndata: ")
    assert json.loads(written.partition("data: ")[2])["message"] == "the run has ended"
