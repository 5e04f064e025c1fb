"""Chat completions: what a request asks for, what is refused, how answers are written, and that a message has one key
in all the forms in which clients send it back (those of openai 3.57, openai-agents 0.24, pydantic-ai 2.68, langchain
1.8 and smolagents 1.26).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from chat_families import FAMILIES, call, tokenizer
from tba.chat_prompts import chat_markup
from tba.serving.chat import AnswerMessage, ChatAnswer, RequestRefused, message_key, parse_chat_request
from tba.types import Json, Message, StopReason

USER = {"role": "user", "content": "What is 12 * 34?"}
NUMBER = {"type": "integer"}
TOOL = {
    "type": "function",
    "function": {"name": "multiply", "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}}},
}
CALL = '<tool_call>{"name": "multiply", "arguments": {"b": 34, "a": 12}}</tool_call>'


def parsed(message: Json) -> Message:
    (message,) = parse_chat_request({"messages": [message]}).messages
    return message


def test_a_request_says_what_it_asks_for() -> None:
    request = parse_chat_request(
        {
            "model": "policy",
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]},
            ],
            "tools": [TOOL],
            "max_completion_tokens": 5,
            "stop": "END",
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "temperature": 0,
            "top_p": None,
            "seed": 3,
            "tool_choice": "required",
            "parallel_tool_calls": True,
            "store": False,
        }
    )
    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 1?"},
    )
    assert request.tools == (TOOL,)
    assert (request.max_tokens, request.stop_strings) == (5, ("END",))
    assert (request.is_streamed, request.includes_usage, request.has_logprobs) == (True, True, True)
    assert request.overrides == {"temperature": 0, "seed": 3, "tool_choice": "required"}


def test_tools_are_hidden_where_none_may_be_called() -> None:
    assert parse_chat_request({"messages": [USER], "tools": [TOOL], "tool_choice": "none"}).tools == ()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "n is 2"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"stop": ["a"] * 17}, "stop is"),
        ({"stop": [""]}, "stop is"),
        ({"stop": "\ud800"}, "surrogate"),
        ({"messages": []}, "no list of messages"),
        ({"messages": "hello"}, "no list of messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "images"),
        ({"messages": [{"role": "user"}]}, "of a role with a text"),
        ({"tools": [3]}, "tools"),
    ],
)
def test_what_cannot_be_answered_as_asked_is_refused_in_one_sentence(fields: dict[str, Json], reason: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        parse_chat_request({"messages": [USER], **fields})
    assert refused.value.status == 400
    assert reason in refused.value.message
    assert refused.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [None, 3, [], "text"])
def test_a_body_that_is_no_object_is_refused(body: Json) -> None:
    with pytest.raises(RequestRefused, match="give a JSON object"):
        parse_chat_request(body)


# Answers


@pytest.mark.parametrize("family", ["qwen3", "llama3", "mistral-args", "glm4.5"])
def test_calls_are_read_as_the_families_write_them(family: str) -> None:
    arguments = {"a": 12, "b": 34}
    messages = [USER, call("abcdef123", "multiply", arguments)]
    chat_tokenizer = tokenizer(family, "chat")
    whole = chat_markup(chat_tokenizer, messages, [TOOL], answered=True)
    text = whole.removeprefix(chat_markup(chat_tokenizer, messages[:1], [TOOL])).removesuffix("\n")
    answer = AnswerMessage.of(text.removesuffix(FAMILIES[family].called or FAMILIES[family].end), True)
    (written,) = answer.calls
    assert written["function"]["name"] == "multiply"
    expected = {name: str(value) for name, value in arguments.items()} if family == "glm4.5" else arguments
    assert json.loads(written["function"]["arguments"]) == expected  # GLM writes arguments one by one, as texts
    assert answer.content == ""
    assert answer.message["content"] is None


def test_calls_have_ids_of_their_own_and_none_without_tools() -> None:
    answer = AnswerMessage.of(f"Two.\n{CALL}\n{CALL}", True)
    assert len({written["id"] for written in answer.calls}) == 2
    assert answer.content == "Two."
    assert AnswerMessage.of(CALL, False).calls == ()
    broken_call = '<tool_call>{"name": 3</tool_call>'
    assert AnswerMessage.of(broken_call, True) == AnswerMessage(broken_call)


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("<think>\nHm.\n</think>\n\n408", "Hm.", "408"),
        ("[THINK]Hm.[/THINK]408", "Hm.", "408"),
        ("Hm.\n</think>408", "Hm.", "408"),  # its beginning is the template's
        ("<think>cut off", "cut off", ""),
        ("408 ", "", "408 "),
    ],
)
def test_thoughts_stand_beside_the_text(text: str, thought: str, content: str) -> None:
    answer = AnswerMessage.of(text, True)
    assert (answer.thought, answer.content) == (thought, content)
    assert answer.message.get("reasoning_content", "") == thought


def chat_answer(text: str, stop_reason: StopReason = StopReason.EOS, logprobs: Json = None) -> ChatAnswer:
    return ChatAnswer("policy", AnswerMessage.of(text, True), stop_reason, 20, 15, 7, logprobs)


@pytest.mark.parametrize(
    ("text", "stop_reason", "reason"),
    [
        ("408", StopReason.EOS, "stop"),
        ("408", StopReason.STOP_STRING, "stop"),
        ("408", StopReason.LENGTH, "length"),
        (CALL, StopReason.EOS, "tool_calls"),
    ],
)
def test_an_answer_says_how_it_ended_and_what_it_took(text: str, stop_reason: StopReason, reason: str) -> None:
    body = chat_answer(text, stop_reason).body
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert (choice["index"], choice["finish_reason"], choice["message"]["role"]) == (0, reason, "assistant")
    assert body["usage"]["total_tokens"] == 27
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 15


@pytest.mark.parametrize("text", ["408", f"<think>Hm.</think>Two.\n{CALL}\n{CALL}", ""])
@pytest.mark.parametrize("includes_usage", [True, False])
def test_the_events_of_a_stream_add_up_to_the_answer(text: str, includes_usage: bool) -> None:
    answer = chat_answer(text, logprobs={"content": [], "refusal": None})
    events = list(answer.events(includes_usage))
    assert events.pop() == "data: [DONE]\n\n"
    assert all(event.startswith("data: ") and event.endswith("\n\n") and "\n" not in event[:-2] for event in events)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in chunks} == {answer.id}
    if includes_usage:
        last_chunk = chunks.pop()
        assert (last_chunk["choices"], last_chunk["usage"]) == ([], answer.usage)
    message: dict[str, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        message |= choice["delta"]
    for index, streamed_call in enumerate(message.get("tool_calls", ())):
        assert streamed_call.pop("index") == index
    assert message == answer.answer.message
    assert choice["finish_reason"] == answer.finish_reason


# Keys


def sent_back(answer: AnswerMessage) -> list[Json]:
    """Returns an answer in the forms in which clients send it back."""
    message = answer.message
    calls = message.get("tool_calls", [])
    forms = [
        message,
        {**message, "refusal": None, "annotations": None, "audio": None, "function_call": None},  # model_dump()
        {**message, "name": "calculator"},  # LangGraph, of an agent with a name
        {**message, "reasoning_content": ""},  # pydantic-ai, beside other thoughts
        {name: value for name, value in message.items() if name != "reasoning_content"},
        {**message, "content": [{"type": "text", "text": message["content"]}] if message["content"] else []},
        {**message, "content": f"<think>\n{answer.thought}\n</think>\n\n{answer.content}"},  # inline thoughts
    ]
    if not answer.content:
        forms += [{**message, "content": ""}, {**message, "content": None}]
    if calls:
        compact = [
            {**c, "function": {**c["function"], "arguments": c["function"]["arguments"].replace(", ", ",")}}
            for c in calls
        ]
        forms.append({**message, "tool_calls": compact})  # pydantic-ai writes arguments anew
        forms.append({**message, "tool_calls": [dict(reversed(c.items())) for c in calls]})  # LangChain
    return forms


@pytest.mark.parametrize("text", [CALL, f"<think>Hm.</think> Let me see. \n{CALL}\n{CALL}", " 408\n"])
def test_an_answer_has_one_key_in_all_forms_in_which_clients_send_it_back(text: str) -> None:
    answer = AnswerMessage.of(text, True)
    for form in sent_back(answer):
        assert message_key(parsed(form)) in answer.message_keys(), form


def test_an_answer_of_other_words_arguments_calls_or_ids_has_another_key() -> None:
    answer = AnswerMessage.of(f"Let me see.\n{CALL}", True)
    message = answer.message
    (made,) = message["tool_calls"]
    other_function = {**made["function"], "arguments": '{"b": 35, "a": 12}'}
    for form in (
        {**message, "content": "Let me think."},
        {**message, "tool_calls": [{**made, "id": "call_1"}]},
        {**message, "tool_calls": [{**made, "function": other_function}]},
        {**message, "tool_calls": [made, made]},
        {"role": "assistant", "content": message["content"]},
        {**message, "role": "user"},
    ):
        assert message_key(parsed(form)) not in answer.message_keys(), form


def test_results_and_users_are_told_apart() -> None:
    result = {"role": "tool", "content": "408", "tool_call_id": "call_1"}
    assert message_key(result) == message_key({**result, "content": " 408\n", "name": "multiply"})
    assert message_key(result) != message_key({**result, "tool_call_id": "call_2"})
    assert message_key({**USER, "name": "ann"}) != message_key({**USER, "name": "bob"})


@pytest.mark.parametrize("text", ["", "  ", "<think>Hm.</think>", "<think>cut off"])
def test_an_answer_without_text_and_calls_has_an_empty_key(text: str) -> None:
    assert AnswerMessage.of(text, True).message_keys() == [()]
    assert message_key({"role": "user", "content": ""})


def test_calls_that_smolagents_sends_back_as_a_text_are_recognised() -> None:
    answer = AnswerMessage.of(f"Let me see.\n{CALL}\n{CALL}", True)
    first, second = sorted(written["id"] for written in answer.calls)
    text = (
        "Let me see.\nCalling tools:\n"
        f"[{{'id': '{first}', 'type': 'function', 'function': {{'name': 'multiply', 'arguments': "
        f"{{'b': 34, 'a': 12}}}}}}, {{'id': '{second}', 'type': 'function', 'function': {{'name': 'multiply', "
        "'arguments': {'b': 34, 'a': 12}}}]"
    )
    recorded = {"role": "assistant", "content": [{"type": "text", "text": text}]}
    assert message_key(parsed(recorded)) in answer.message_keys()
    changed = {"role": "assistant", "content": text.replace("34", "35", 1)}
    assert message_key(parsed(changed)) not in answer.message_keys()


def test_code_that_smolagents_completes_and_repeats_is_recognised() -> None:
    answer = AnswerMessage.of("Thought: I multiply.\n<code>\nx = 'a'\nprint(12 * 34)\n", False)
    text = (
        "Thought: I multiply.\n<code>\nx = 'a'\nprint(12 * 34)\n</code>\nCalling tools:\n"
        "[{'id': 'call_2', 'type': 'function', 'function': {'name': 'python_interpreter', 'arguments': "
        "\"x = 'a'\\nprint(12 * 34)\"}}]"
    )
    recorded = {"role": "assistant", "content": [{"type": "text", "text": text}]}
    assert message_key(parsed(recorded)) in answer.message_keys("</code>")
    assert message_key(parsed(recorded)) not in answer.message_keys()  # it did not end with it
