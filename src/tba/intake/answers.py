"""Reads a line of a file: a prompt, an answer to it, and the reward that it claims.

Invariant: any object gives an `Answer` or a `Refusal`, never an error. Nothing is believed here: a claimed reward is
kept as claimed.

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
RESPONSE = ("response", "completion")  # names of the field with the answer, the first that is there counts
ENDED = ("stop_reason", "finish_reason")  # "length" in either: the answer was cut off
FIELDS = "fields"  # an object of the problem's own, where a line says more than that (`tba replay --export`)
_OWN = {"prompt", "messages", "tools", "reward", "source", *RESPONSE, *ENDED}


@dataclass(frozen=True)
class Answer:
    """Holds a prompt and an answer to it, as text."""

    prompt: str | tuple[Message, ...]  # text as the model is to see it, or the messages before the answer
    response: str
    truncated: bool = False  # cut off, so that no end of text follows it
    claimed: float | None = None  # the reward that the line claims; not-a-number where it claims something else
    source: str | None = None  # who answered, if the line says so
    fields: Mapping[str, Json] = field(default_factory=dict)  # the rest, for the reward of a prompt the task lacks
    tools: tuple[Json, ...] = ()  # schemas of what may be called, where the prompt is a chat
    calling: Message | None = None  # the whole answer, where it calls tools and is no text


def answer_of(values: Values) -> Answer | Refusal:
    """Returns the answer that an object holds, or why it holds none. Fields that are null count as missing."""
    given = {name: value for name, value in values.items() if value is not None}
    asked = parse_chat_text(given.get("prompt", given.get("messages")))
    if asked is None:
        return Refusal("no field 'prompt' or 'messages'", f"it has {', '.join(sorted(given)) or 'none'}")
    response = next((given[name] for name in RESPONSE if name in given), None)
    tools = tool_schemas(given.get("tools"))
    if isinstance(tools, Refusal):
        return tools
    prompt = _conversation(asked) if isinstance(asked, list) else asked
    if isinstance(prompt, Refusal):
        return prompt
    calling = None
    if isinstance(prompt, tuple):
        if prompt[-1]["role"] == "assistant":
            if response is not None:
                return Refusal("a chat that ends with an answer, and another answer in the same line")
            calling = prompt[-1] if "tool_calls" in prompt[-1] else None
            prompt, response = prompt[:-1], prompt[-1]["content"]
        if not prompt or prompt[-1]["role"] not in ("user", "tool"):
            return Refusal("a chat without a user's message to answer")
    found = _answer(given, prompt, response if calling is None else response or " ", tools)
    return found if isinstance(found, Refusal) else replace(found, calling=calling)


def _answer(given: Values, prompt: Json, response: Json, tools: tuple[Json, ...]) -> Answer | Refusal:
    if response is None:
        return Refusal("no answer", f"neither of the fields {', '.join(RESPONSE)}, nor a last message of the assistant")
    for name, text in (("a prompt", prompt), ("an answer", response)):
        if isinstance(text, tuple):
            continue
        if not isinstance(text, str):
            return Refusal(f"{name} that is no text", type(text).__name__)
        if not text:
            return Refusal(f"{name} that is empty")
        if not is_text(text):
            return Refusal(f"{name} that is not valid text", "it has half of a surrogate pair")
    source, problem = given.get("source"), parse_json_text(given.get(FIELDS))
    rest = problem if isinstance(problem, dict) else given
    return Answer(
        prompt,
        response,
        truncated="length" in (given.get(name) for name in ENDED),
        claimed=_number(given["reward"]) if "reward" in given else None,
        source=source if isinstance(source, str) and is_text(source) else None,
        fields={name: value for name, value in rest.items() if rest is problem or name not in _OWN},
        tools=tools,
    )


def _conversation(messages: list[Json]) -> tuple[Message, ...] | Refusal:
    said = conversation(messages)
    if isinstance(said, Refusal):
        return said
    for message in said:
        if message["role"] not in ROLES:
            return Refusal(f"a message of another role than {', '.join(ROLES)}", repr(message)[:200])
    return said or Refusal("a chat without a user's message to answer")


def _number(claimed: Json) -> float:
    try:
        return float(claimed) if isinstance(claimed, int | float | str) else math.nan  # a text: a cell of CSV
    except (OverflowError, ValueError):
        return math.nan
