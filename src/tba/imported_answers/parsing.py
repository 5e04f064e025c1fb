"""Reads a line of a file: a prompt, an answer to it, and the reward that it claims.

Invariant: any object gives an `ImportedAnswer` or a `Refusal`, never an error. Nothing is believed here: a claimed
reward stays a claim.

    {"prompt": "6 * 7 =", "response": "42", "reward": 1}
    {"messages": [{"role": "user", "content": "6 * 7 ="}, {"role": "assistant", "content": "42"}]}
    {"key": "a8616486dcbd90a2", "messages": [{"role": "assistant", ...}, {"role": "tool", ...}, ...], "uid": "run 7"}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
    # of an episode of several turns: its messages from the first answer to the last, which `response` has too
    turns: tuple[Message, ...] = ()
    key: str = ""  # of a prompt of the task, which may stand for `prompt`
    uid: str = ""  # the sender's name of the episode

    def splits(self) -> Iterator[ImportedAnswer]:
        """Yields the ways to read a chat, the longest prompt first: each assistant's message that is trained on may be
        the first answer.
        """
        for begin in reversed(range(1, len(self.turns))) if isinstance(self.prompt, tuple) else ():
            if is_answer(self.turns[begin]) and self.turns[begin - 1]["role"] != "assistant":
                prompt, turns = (*self.prompt, *self.turns[:begin]), self.turns[begin:]
                yield replace(self, prompt=prompt, turns=turns if len(turns) > 1 else ())
        yield self


def is_answer(message: Message) -> bool:
    """Returns whether a message is the assistant's and trained on: its `weight`, if it has one, is not 0."""
    return bool(message["role"] == "assistant" and message.get("weight") != 0)


def parse_answer(values: Values) -> ImportedAnswer | Refusal:
    """Returns the answer that an object holds, or why it holds none. Fields that are null count as missing."""
    values = {name: value for name, value in values.items() if value is not None}
    if isinstance(values.get(SEGMENTS_FIELD), list) and "tokens" in values:
        return Refusal("an episode of several segments, which only the journal it comes from holds whole")
    response = next((values[name] for name in RESPONSE_FIELDS if name in values), None)
    tools, key, uid = tool_schemas(values.get("tools")), _text(values, "key"), _text(values, "uid")
    if isinstance(tools, Refusal):
        return tools
    parts = _parse_parts(values, bool(key), response is not None)
    if isinstance(parts, Refusal):
        return parts
    (prompt, turns), call_message = parts, None
    if turns:
        if not is_answer(turns[-1]):
            return Refusal("a chat that does not end with an answer to train on")
        call_message = turns[-1] if "tool_calls" in turns[-1] else None
        response = turns[-1]["content"] or (" " if call_message else "")
    answer = _build_answer(values, prompt, response, tools)
    if isinstance(answer, Refusal):
        return answer
    turns = turns if len(turns) > 1 else ()
    uid = uid if "messages" in values else ""
    return replace(answer, prompt=prompt or "", call_message=call_message, turns=turns, key=key, uid=uid)


def _parse_parts(
    values: Values, has_key: bool, has_response: bool
) -> tuple[str | tuple[Message, ...] | None, tuple[Message, ...]] | Refusal:
    """Returns the prompt of an object, None where its key stands for it, and the messages from the first answer on."""
    prompt: Json = _parse_chat(values.get("prompt", values.get("messages")))
    turns: Json = ()
    if isinstance(prompt, tuple) and prompt[-1]["role"] == "assistant":
        if has_response:
            return Refusal("a chat that ends with an answer, and another answer in the same line")
        has_turns_only = has_key and prompt[0]["role"] == "assistant"
        begin = 0 if has_turns_only else _first_answer(prompt)
        prompt, turns = None if has_turns_only else prompt[:begin], prompt[begin:]
    elif "prompt" in values and "messages" in values and not has_response:
        turns = _parse_chat(values["messages"])
        if not isinstance(turns, Refusal) and not (isinstance(turns, tuple) and turns[0]["role"] == "assistant"):
            return Refusal("messages beside their prompt that do not begin with the assistant's")
    if isinstance(prompt, Refusal) or isinstance(turns, Refusal):
        return prompt if isinstance(prompt, Refusal) else turns
    if prompt is None and not has_key:
        names = ", ".join(sorted(values)) or "none"
        return Refusal("no field 'prompt' or 'messages'", f"it has {names}")
    if isinstance(prompt, tuple) and (not prompt or prompt[-1]["role"] not in ("user", "tool")):
        return Refusal("a chat without a user's message to answer")
    return prompt, turns


def _first_answer(chat: tuple[Message, ...]) -> int:
    """Returns the place of the first message that answers something and is trained on; of the last one if none is."""
    answers = (i for i in range(1, len(chat)) if chat[i - 1]["role"] in ("user", "tool") and is_answer(chat[i]))
    return next(answers, len(chat) - 1)


def _parse_chat(value: Json) -> Json:
    """Returns the messages of a chat, the refusal of one, or any other value as it is."""
    value = parse_chat_text(value)
    return _parse_conversation(value) if isinstance(value, list) else value


def _text(values: Values, name: str) -> str:
    """Returns the text of a field; empty where it has none."""
    value = values.get(name)
    return value if isinstance(value, str) and is_text(value) else ""


def _build_answer(values: Values, prompt: Json, response: Json, tools: tuple[Json, ...]) -> ImportedAnswer | Refusal:
    if response is None:
        names = ", ".join(RESPONSE_FIELDS)
        return Refusal("no answer", f"neither of the fields {names}, nor a last message of the assistant")
    for name, text in (("a prompt", prompt), ("an answer", response)):
        if isinstance(text, tuple | None):
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
