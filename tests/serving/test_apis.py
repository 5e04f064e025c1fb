"""The APIs of OpenAI and Anthropic over HTTP: one conversation goes on through all of them, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serving.chat_llama import chat_llama
from serving.test_app import Door, served_by
from serving.test_served_engine import assert_exact
from tba.models.huggingface import HuggingFace
from tba.types import Json


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    return chat_llama(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def door(model: HuggingFace) -> Iterator[Door]:
    with served_by(model) as door:
        yield door


def chat(door: Door, episode: Any, turns: list[Json], stream: bool) -> str:
    reply = door.chat(episode, turns, stream=stream)
    if stream:
        return "".join(choice["delta"].get("content") or "" for e in events(reply.body) for choice in e["choices"])
    return reply.body["choices"][0]["message"]["content"]


def responses(door: Door, episode: Any, turns: list[Json], stream: bool) -> str:
    body = {"input": turns, "max_output_tokens": 6, "stream": stream}
    reply = door.ask("POST", "/v1/responses", body, episode["api_key"])
    response = events(reply.body)[-1]["response"] if stream else reply.body
    return response["output"][-1]["content"][0]["text"]


def messages(door: Door, episode: Any, turns: list[Json], stream: bool) -> str:
    headers = {"x_api_key": episode["api_key"]}
    body = {"messages": turns, "max_tokens": 6, "stream": stream}
    reply = door.ask("POST", "/v1/messages", body, None, **headers)
    if stream:
        return "".join(event["delta"]["text"] for event in events(reply.body) if event["type"] == "content_block_delta")
    return "".join(block["text"] for block in reply.body["content"])


def events(stream: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in stream.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_through_all_apis(model: HuggingFace, door: Door, stream: bool) -> None:
    episode = door.begin()
    turns = list(episode["prompt"])
    for ask in (chat, responses, messages, chat):
        turns.append({"role": "assistant", "content": ask(door, episode, turns, stream)})
        turns.append({"role": "user", "content": "Are you sure?"})
    assert door.ask("POST", f"/episodes/{episode['id']}/end").body["on_disk"] is True
    ((prompt, completion),) = door.served.completions
    assert completion.begins is None
    assert len(completion.turns) == 4
    assert_exact(model, prompt, completion)


def test_tokens_are_counted_without_a_call(door: Door) -> None:
    episode = door.begin()
    path, body = "/v1/messages/count_tokens", {"messages": list(episode["prompt"])}
    count = door.ask("POST", path, body, episode["api_key"]).body["input_tokens"]
    usage = door.chat(episode).body["usage"]
    assert count == usage["prompt_tokens"]
    assert door.ask("POST", path, body, "nobody").status == 401


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_refused_request_says_why(door: Door, path: str) -> None:
    reply = door.ask("POST", path, {"input": 3, "messages": 3}, door.begin()["api_key"])
    assert (reply.status, reply.body["error"]["type"]) == (400, "invalid_request_error")
