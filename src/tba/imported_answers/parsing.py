"""Reads a line of a file: a prompt, an answer to it, and the reward that it claims.

Invariant: any object gives an `ImportedAnswer` or a `Refusal`, never an error. Nothing is believed here: a claimed
reward stays a claim.

    {"prompt": "6 * 7 =", "response": "42", "reward": 1}
    {"messages": [{"role": "user", "content": "6 * 7 ="}, {"role": "assistant", "content": "42"}]}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tba.tables import Refusal, Values, conversation, parse_chat_text, parse_json_text, tool_schemas
from tba.types import Json, Message, is_text

ROLES = ("system", "developer", "user", "assistant", "tool")
RESPONSE_FIELDS = ("response", "completion")  # names of the field with the answer; the first one present counts
STOP_FIELDS = ("stop_reason", "finish_reason")  # "length" in either: the answer was cut off
PROBLEM_FIELD = "fields"  # an object with the problem's fields, in lines that have others too (`tba replay --export`)
SEGMENTS_FIELD = "begins"  # where the later segments of an episode begin (`tba replay --export`)
_LINE_FIELDS = {"prompt", "messages", "tools", "reward", "source", *RESPONSE_FIELDS, *STOP_FIELDS}


@dataclass(frozen=True)
class ImportedAnswer:
    """Holds a prompt and an answer to it, as text."""

    prompt: str | tuple[Message, ...]  # text as the model is to see it, or the messages before the answer
    response: str
    is_truncated: bool = False  # it was cut off, so that no end of text follows
    claimed_reward: float | None = None  # by the line; not-a-number where it claims something else
    source: str | None = None  # who answered, if the line says so
    fields: Mapping[str, Json] = field(
        default_factory=dict
    )  # of the problem, for the reward of a prompt the task lacks
    tools: tuple[Json, ...] = ()  # schemas of what may be called, where the prompt is a chat
    call_message: Message | None = None  # the whole answer, where it calls tools and is no text


def parse_answer(values: Values) -> ImportedAnswer | Refusal:
    """Returns the answer that an object holds, or why it holds none. Fields that are null count as missing."""
    values = {name: value for name, value in values.items() if value is not None}
    if isinstance(values.get(SEGMENTS_FIELD), list) and "tokens" in values:
        return Refusal("an episode of several segments, which only the journal it comes from holds whole")
    prompt_value = parse_chat_text(values.get("prompt", values.get("messages")))
    if prompt_value is None:
        return Refusal("no field 'prompt' or 'messages'", f"it has {', '.join(sorted(values)) or 'none'}")
    response = next((values[name] for name in RESPONSE_FIELDS if name in values), None)
    tools = tool_schemas(values.get("tools"))
    if isinstance(tools, Refusal):
        return tools
    prompt = _parse_conversation(prompt_value) if isinstance(prompt_value, list) else prompt_value
    if isinstance(prompt, Refusal):
        return prompt
    call_message = None
    if isinstance(prompt, tuple):
        if prompt[-1]["role"] == "assistant":
            if response is not None:
                return Refusal("a chat that ends with an answer, and another answer in the same line")
            call_message = prompt[-1] if "tool_calls" in prompt[-1] else None
            prompt, response = prompt[:-1], prompt[-1]["content"]
        if not prompt or prompt[-1]["role"] not in ("user", "tool"):
            return Refusal("a chat without a user's message to answer")
    answer = _build_answer(values, prompt, response if call_message is None else response or " ", tools)
    return answer if isinstance(answer, Refusal) else replace(answer, call_message=call_message)


def _build_answer(values: Values, prompt: Json, response: Json, tools: tuple[Json, ...]) -> ImportedAnswer | Refusal:
    if response is None:
        names = ", ".join(RESPONSE_FIELDS)
        return Refusal("no answer", f"neither of the fields {names}, nor a last message of the assistant")
    for name, text in (("a prompt", prompt), ("an answer", response)):
        if isinstance(text, tuple):
            continue
        if not isinstance(text, str):
            return Refusal(f"{name} that is no text", type(text).__name__)
        if not text:
            return Refusal(f"{name} that is empty")
        if not is_text(text):
            return Refusal(f"{name} that is not valid text", "it has half of a surrogate pair")
    source, problem_fields = values.get("source"), parse_json_text(values.get(PROBLEM_FIELD))
    fields = problem_fields if isinstance(problem_fields, dict) else values
    return ImportedAnswer(
        prompt,
        response,
        is_truncated="length" in (values.get(name) for name in STOP_FIELDS),
        claimed_reward=_parse_number(values["reward"]) if "reward" in values else None,
        source=source if isinstance(source, str) and is_text(source) else None,
        fields={name: value for name, value in fields.items() if fields is problem_fields or name not in _LINE_FIELDS},
        tools=tools,
    )


def _parse_conversation(messages: list[Json]) -> tuple[Message, ...] | Refusal:
    conversation_messages = conversation(messages)
    if isinstance(conversation_messages, Refusal):
        return conversation_messages
    for message in conversation_messages:
        if message["role"] not in ROLES:
            return Refusal(f"a message of another role than {', '.join(ROLES)}", repr(message)[:200])
    return conversation_messages or Refusal("a chat without a user's message to answer")


def _parse_number(claimed: Json) -> float:
    try:
        return float(claimed) if isinstance(claimed, int | float | str) else math.nan  # a text: a cell of CSV
    except (OverflowError, ValueError):
        return math.nan
