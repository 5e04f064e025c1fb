"""What a line says: prompts and answers as people and other programs write them."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.imported_answers.parsing import ImportedAnswer, parse_answer
from tba.tables import Refusal

USER, ANSWER = {"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42"}
SYSTEM = {"role": "system", "content": "Be brief."}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["user", "assistant", "system", "tool", 3]), "content": JSON}
    )
)
FIELDS = dict.fromkeys(("reward", "completion", "source", "stop_reason", "answer", "fields"), JSON)
LINES = st.fixed_dictionaries(
    {}, optional={"prompt": JSON | MESSAGES, "messages": JSON | MESSAGES, "response": JSON | st.text(), **FIELDS}
)


def test_an_exported_episode_of_several_segments_is_no_text_to_learn() -> None:
    line = {"prompt": "6*7?", "response": "42", "tokens": [1, 2, 3], "begins": [2]}
    refused = parse_answer(line)
    assert isinstance(refused, Refusal)
    assert "several segments" in refused.reason
    for values in (line | {"begins": None}, {"prompt": "6*7?", "response": "42", "begins": "here"}):
        assert isinstance(parse_answer(values), ImportedAnswer)


@settings(max_examples=120, deadline=None)
@given(LINES)
def test_any_object_is_an_answer_of_text_or_refused_with_a_reason(values: dict[str, Any]) -> None:
    answer = parse_answer(values)
    if isinstance(answer, Refusal):
        assert answer.reason
        return
    assert isinstance(answer.response, str)
    assert answer.response
    answer.response.encode()
    if isinstance(answer.prompt, tuple):
        assert answer.prompt[-1]["role"] in ("user", "tool")
    if not isinstance(values.get("fields"), dict):
        assert not {"prompt", "response", "messages", "reward"} & answer.fields.keys()


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "6*7?", "response": "42"},
        {"prompt": "6*7?", "completion": "42", "messages": None},
        {"prompt": [USER], "response": "42"},
        {"messages": [USER, ANSWER]},
        {"messages": json.dumps([USER, ANSWER]), "tools": None},  # a cell of CSV holds no list
        {"prompt": json.dumps([USER]), "response": "42"},
        {"messages": [USER], "response": "42"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "6*"}, {"type": "text", "text": "7?"}]},
                ANSWER,
            ]
        },
    ],
)
def test_the_ways_of_writing_an_answer_say_the_same(values: dict[str, Any]) -> None:
    answer = parse_answer(values)
    assert isinstance(answer, ImportedAnswer)
    question = answer.prompt if isinstance(answer.prompt, str) else answer.prompt[0]["content"]
    assert (question, answer.response, answer.is_truncated, answer.claimed_reward, dict(answer.fields)) == (
        "6*7?",
        "42",
        False,
        None,
        {},
    )


NEXT, LAST = {"role": "user", "content": "and 6*8?"}, {"role": "assistant", "content": "48"}
CHAT = [SYSTEM, USER, ANSWER, NEXT, LAST]


def test_a_chat_of_several_turns_begins_with_its_prompt_and_may_be_read_as_one_with_a_history() -> None:
    answer = parse_answer({"messages": CHAT})
    assert isinstance(answer, ImportedAnswer)
    assert (answer.prompt, answer.response, answer.turns) == ((SYSTEM, USER), "48", (ANSWER, NEXT, LAST))
    assert [(a.prompt, a.response, a.turns) for a in answer.splits()] == [
        ((SYSTEM, USER, ANSWER, NEXT), "48", ()),
        ((SYSTEM, USER), "48", (ANSWER, NEXT, LAST)),
    ]


def test_a_message_of_weight_0_is_not_trained_on_and_before_the_first_answer_part_of_the_prompt() -> None:
    unweighted = {**ANSWER, "weight": 0}
    answer = parse_answer({"messages": [SYSTEM, USER, unweighted, NEXT, LAST]})
    assert isinstance(answer, ImportedAnswer)
    assert (answer.prompt, answer.turns) == ((SYSTEM, USER, unweighted, NEXT), ())
    greeting = parse_answer({"messages": [SYSTEM, ANSWER, USER, LAST]})  # which answers nobody
    assert isinstance(greeting, ImportedAnswer)
    assert greeting.prompt == (SYSTEM, ANSWER, USER)
    last = parse_answer({"messages": [USER, ANSWER, NEXT, {**LAST, "weight": 0}]})
    assert last == Refusal("a chat that does not end with an answer to train on")


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ({"key": "k"}, ""),
        ({"prompt": "6*7?"}, "6*7?"),
        ({"prompt": [USER]}, (USER,)),
        ({"key": "k", "prompt": "p"}, "p"),
    ],
)
def test_the_messages_of_an_episode_may_stand_beside_their_prompt_or_its_key(line: dict[str, Any], prompt: Any) -> None:
    answer = parse_answer({**line, "messages": [ANSWER, NEXT, LAST], "uid": "mine"})
    assert isinstance(answer, ImportedAnswer)
    assert (answer.prompt, answer.turns, answer.key) == (prompt, (ANSWER, NEXT, LAST), line.get("key", ""))
    assert answer.uid == "mine"
    single = parse_answer({**line, "response": "42"})
    assert isinstance(single, ImportedAnswer)
    assert (single.prompt, single.response, single.key, single.uid) == (prompt, "42", line.get("key", ""), "")
    beside = parse_answer({"prompt": "p", "messages": [USER, ANSWER]})
    assert beside == Refusal("messages beside their prompt that do not begin with the assistant's")


def test_what_is_claimed_and_where_it_ended_is_kept_apart_from_the_fields_of_the_problem() -> None:
    line = {"prompt": "p", "response": "r", "reward": 1, "source": "me", "finish_reason": "length", "answer": "9"}
    answer = parse_answer(line)
    assert answer == ImportedAnswer(
        "p", "r", is_truncated=True, claimed_reward=1.0, source="me", fields={"answer": "9"}
    )
    cell = parse_answer({**line, "reward": "0.5"})
    assert isinstance(cell, ImportedAnswer)
    assert cell.claimed_reward == 0.5
    odd = parse_answer({**line, "reward": "much"})
    assert isinstance(odd, ImportedAnswer)
    assert odd.claimed_reward is not None
    assert math.isnan(odd.claimed_reward)


def test_fields_of_the_problem_may_stand_apart_from_what_else_a_line_says() -> None:
    answer = parse_answer(
        {"prompt": "p", "response": "r", "uid": "7", "uses": 3, "fields": {"answer": "9", "prompt": "q"}}
    )
    assert isinstance(answer, ImportedAnswer)
    assert answer.fields == {"answer": "9", "prompt": "q"}
    assert parse_answer({"prompt": "p", "response": "r", "fields": '{"answer": "9", "prompt": "q"}'}) == answer


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"text": "..."}, "no field 'prompt'"),
        ({"prompt": "p"}, "no answer"),
        ({"prompt": "p", "response": ""}, "an answer that is empty"),
        ({"prompt": "p", "response": 42}, "an answer that is no text"),
        ({"prompt": 3, "response": "r"}, "a prompt that is no text"),
        ({"prompt": "p", "response": "\ud800"}, "not valid text"),
        ({"messages": []}, "without a user's message"),
        ({"messages": [ANSWER]}, "without a user's message"),
        ({"messages": [USER]}, "no answer"),
        ({"messages": [USER, ANSWER], "response": "42"}, "another answer in the same line"),
        ({"messages": [USER, {"role": "narrator", "content": "x"}]}, "a message of another role than"),
        ({"prompt": [USER], "response": "42", "tools": "search"}, "tools that are no list of schemas"),
        ({"messages": ["hello"]}, "a message that is not of"),
    ],
)
def test_what_is_no_answer_says_why(values: dict[str, Any], reason: str) -> None:
    answer = parse_answer(values)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason


@pytest.mark.parametrize("content", ["42", "", None])
def test_an_answer_that_calls_tools_is_kept_as_it_is(content: str | None) -> None:
    """What it says is for the model's chat template to write."""
    calls = [{"type": "function", "function": {"name": "deposit", "arguments": {"amount": 3}}}]
    answer = parse_answer({"messages": [USER, {"role": "assistant", "content": content, "tool_calls": calls}]})
    assert isinstance(answer, ImportedAnswer)
    assert answer.prompt == (USER,)
    assert answer.call_message == {"role": "assistant", "content": content or "", "tool_calls": calls}
