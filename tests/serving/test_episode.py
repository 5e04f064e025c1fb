"""The tree of an episode's calls: what each request goes on from, whatever its client drops, repeats or changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from chat_families import tokenizer
from tba.serving.chat import AnswerMessage, RequestRefused, parse_chat_request
from tba.serving.episode import AgentCall, ConversationEncoder, ConversationTree, SampledAnswer
from tba.types import Completion, IntArray, Json, Prompt, StopReason, Version

TOKENIZER = tokenizer("qwen2.5", "chat")
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
USER = {"role": "user", "content": "What is 1 + 1?"}
FOLLOW_UP = {"role": "user", "content": "Add 7."}


def encoded(text: str) -> IntArray:
    return np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32)


@dataclass
class Agent:
    """An agent whose model says what a test says."""

    tree: ConversationTree = field(init=False)
    messages: list[Json] = field(default_factory=lambda: [USER])

    def __post_init__(self) -> None:
        encoder = ConversationEncoder(TOKENIZER)
        prompt = Prompt("task", encoder.whole([USER], [TOOL]), "What is 1 + 1?")
        self.tree = ConversationTree(prompt, encoder, 10_000)

    def call(
        self, text: str, messages: Sequence[Json] | None = None, stop: str | None = None, received: bool = True
    ) -> tuple[AgentCall, Json]:
        """Returns a call that is answered by a text, and the message of the answer."""
        messages = self.messages if messages is None else messages
        request = parse_chat_request({"messages": list(messages), "tools": [TOOL], "stop": stop})
        made = self.tree.begin_call(request)
        tokens = np.append(encoded(text), encoded(stop or "<|im_end|>"))
        reason = StopReason.STOP_STRING if stop else StopReason.EOS
        version = Version()
        answer = SampledAnswer(tokens, text, reason, np.zeros(len(tokens), np.float32), (version, version), 0)
        message = AnswerMessage.of(text, with_tools=True)
        self.tree.answer_call(made, answer, message)
        made.is_delivered = received
        return made, message.message

    @property
    def completion(self) -> Completion:
        completion = self.tree.completion()
        assert completion is not None
        return completion


def results(message: Json) -> list[Json]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in message["tool_calls"]]


def test_each_call_goes_on_from_the_one_before() -> None:
    agent = Agent()
    first, message = agent.call(CALL)
    agent.messages += [message, *results(message)]
    second, message = agent.call("2")
    agent.messages += [message, FOLLOW_UP]
    third, _ = agent.call("9")
    assert (first.parent, second.parent, third.parent) == (None, first, second)
    assert agent.completion.begins is None
    assert not agent.tree.new_segments
    whole = TOKENIZER.decode([*agent.tree.prompt.tokens, *agent.completion.tokens])
    assert whole == TOKENIZER.decode([*third.tokens(), *encoded("9<|im_end|>")])


@pytest.mark.parametrize("text", ["", "<think>Hm.</think>"])
@pytest.mark.parametrize("is_sent_back", [True, False])
def test_an_empty_answer_may_be_missing(text: str, is_sent_back: bool) -> None:
    """openai-agents and pydantic-ai leave out answers without a text."""
    agent = Agent()
    first, message = agent.call(CALL)
    agent.messages += [message, *results(message)]
    second, message = agent.call(text)
    agent.messages += [*([message] if is_sent_back else []), FOLLOW_UP]
    third, message = agent.call("", agent.messages)
    agent.messages += [*([message] if is_sent_back else []), {"role": "system", "content": "Return a text."}]
    fourth, _ = agent.call("9", agent.messages)
    assert (second.parent, third.parent, fourth.parent) == (first, second, third)
    assert agent.completion.begins is None
    assert not agent.tree.new_segments
    assert "Add 7." in TOKENIZER.decode(third.read)
    assert "Add 7." not in TOKENIZER.decode(fourth.read)


def test_a_call_that_is_made_again_after_an_empty_answer_is_another_one() -> None:
    agent = Agent()
    first, _ = agent.call("", received=False)
    second, message = agent.call("2")
    third, _ = agent.call("9", [*agent.messages, message, FOLLOW_UP])
    assert (first.parent, second.parent, third.parent) == (None, None, second)
    assert len(agent.completion.turns) == 2


def test_an_empty_message_that_the_model_did_not_give_begins_a_segment() -> None:
    agent = Agent()
    _, message = agent.call("2")
    second, _ = agent.call("9", [*agent.messages, message, {"role": "assistant", "content": ""}, FOLLOW_UP])
    assert second.parent is None
    assert agent.tree.new_segments == {"an answer that the model did not give": 1}


def test_a_stop_string_may_be_sent_back() -> None:
    """smolagents completes the code that its stop string ended."""
    agent = Agent()
    first, message = agent.call("<code>\nprint(2)\n", stop="</code>")
    sent = {**message, "content": message["content"] + "</code>"}
    second, _ = agent.call("9", [*agent.messages, sent, {"role": "user", "content": "Observation:\n2"}])
    assert second.parent is first
    third, _ = agent.call("9", [*agent.messages, message, {"role": "user", "content": "Observation:\n2"}])
    assert third.parent is first


def test_every_further_segment_has_its_reason() -> None:
    agent = Agent()
    first, message = agent.call("2")
    history = [*agent.messages, message]
    for text in ("Go on.", "Go back."):
        made, _ = agent.call("3", [*history, {"role": "user", "content": text}])
        assert made.parent is first
    agent.call("4", [{"role": "user", "content": "Sum up."}])
    agent.call("5", [*agent.messages, {"role": "assistant", "content": "3"}, FOLLOW_UP])
    agent.call("6", [*history, FOLLOW_UP, {"role": "assistant", "content": "invented"}, FOLLOW_UP])
    assert agent.tree.new_segments == {
        "a second call behind one answer": 1,
        "another conversation": 1,
        "a history that was changed": 1,
        "an answer that the model did not give": 1,
    }
    assert len(agent.completion.segments) == 1 + agent.tree.new_segments.total()


def test_other_tools_begin_another_segment() -> None:
    agent = Agent()
    _, message = agent.call("2")
    request = parse_chat_request({"messages": [*agent.messages, message, FOLLOW_UP]})
    assert agent.tree.begin_call(request).parent is None


def test_an_episode_has_no_more_room_than_it_says() -> None:
    agent = Agent()
    agent.tree.max_tokens = 8
    made, _ = agent.call("2")
    assert made.reserved == 8
    with pytest.raises(RequestRefused, match="no room"):
        agent.call("3", [USER, FOLLOW_UP])
