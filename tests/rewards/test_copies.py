"""Whatever a user's code does to what it gets, the next call gets what it got."""

import copy
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tba.environments.episode import Episode
from tba.rewards.functions import FunctionReward
from tba.types import Completion, Judgement, Prompt, StopReason, Version, copies_for_reward, deep_copy

FIELDS: dict[str, Any] = {
    "answer": "72",
    "tests": [["1", "2"], ["3", "4"]],
    "reward_model": {"style": "rule", "ground_truth": ["72"]},
    "extra_info": {"index": 3, "tags": ["a", "b"]},
    "pair": ([1], [2]),
}
CHAT = ({"role": "user", "content": [{"type": "text", "text": "What is 70 + 2?"}]},)
SEEN: list[str] = []


def note(*values: Any) -> float:
    """Write down what a call got, then change all of it."""
    SEEN.append(json.dumps(values))
    for value in values:
        empty(value)
    return 0.0


def empty(value: Any) -> None:
    if isinstance(value, dict | list):
        for inner in list(value.values() if isinstance(value, dict) else value):
            empty(inner)
        value.clear()
    elif isinstance(value, tuple):
        for inner in value:
            empty(inner)


def by_name(completion: str, tests: Any, extra_info: Any, reward_model: Any, pair: Any) -> float:
    return note(completion, tests, extra_info, reward_model, pair)


def all_fields(completion: str, **fields: Any) -> float:
    return note(completion, fields)


def by_position(completion: str, tests: Any, /) -> float:
    return note(completion, tests)


def conversation(messages: list[dict[str, Any]]) -> float:
    return note(messages)


def tokens(completion: str, completion_ids: list[int]) -> float:
    return note(completion_ids)


async def waiting(completion: str, tests: Any) -> float:
    return note(completion, tests)


def of_verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    return {"score": note(ground_truth, extra_info)}


def of_trl(prompts: Any, completions: Any, tests: Any, completion_ids: Any, **fields: Any) -> list[float]:
    rows = [list(row) for row in zip(prompts, completions, tests, completion_ids, fields["extra_info"], strict=True)]
    count = len(completions)
    for row in rows:
        note(row)
    return [0.0] * count


def answered(count: int) -> list[tuple[Prompt, Completion]]:
    prompt = Prompt("sums", np.array([1], np.int32), "70 + 2", copy.deepcopy(FIELDS), messages=copy.deepcopy(CHAT))
    answer = Completion(np.array([1, 2], np.int32), "72", StopReason.EOS, (Version(), Version()))
    return [(prompt, answer)] * count


@pytest.mark.parametrize(
    "function",
    [by_name, all_fields, by_position, conversation, tokens, waiting, of_verl, of_trl],
    ids=lambda f: f.__name__,
)
def test_a_function_that_empties_what_it_gets_sees_the_same_in_every_call(function: Callable[..., Any]) -> None:
    SEEN.clear()
    rows = answered(3)
    reward = FunctionReward(function)
    reward.judge(rows)
    reward.judge(rows)
    assert len(SEEN) == 6
    assert len(set(SEEN)) == 1
    assert (rows[0][0].fields, rows[0][0].messages) == (FIELDS, CHAT)


@dataclass(frozen=True)
class Emptying:
    """A reward as a class, which changes all that can be changed."""

    seen: list[str] = field(default_factory=list)

    def judge(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        for prompt, completion in pairs:
            tokens = [prompt.tokens.tolist(), completion.tokens.tolist()]
            self.seen.append(json.dumps([dict(prompt.fields), prompt.messages, tokens]))
            empty(prompt.fields)
            empty(prompt.messages)
            prompt.tokens[:] = completion.tokens[:] = 7
        return [Judgement(0.0) for _ in pairs]


def test_a_reward_of_a_class_gets_copies_too() -> None:
    reward, rows = Emptying(), answered(3)
    key, digest = rows[0][0].key, rows[0][1].digest
    for _ in range(2):
        reward.judge(copies_for_reward(rows))
    assert len(reward.seen) == 6
    assert len(set(reward.seen)) == 1
    assert (rows[0][0].key, rows[0][1].digest) == (key, digest)
    assert [(p.key, c.digest) for p, c in copies_for_reward(rows[:1])] == [(key, digest)]


def test_an_environment_that_empties_its_fields_begins_the_next_episode_with_the_same() -> None:
    class Room:
        def reset(self, seed: int, tests: Any, extra_info: Any) -> str:
            note(tests, extra_info)
            return "begin"

        def step(self, text: str) -> None:
            return None

    SEEN.clear()
    fields = copy.deepcopy(FIELDS)
    for _ in range(2):
        Episode(Room, fields, 3, 1)
    assert len(set(SEEN)) == 1
    assert fields == FIELDS


def test_a_copy_is_equal_and_shares_nothing_and_what_cannot_be_copied_is_handed_out_itself() -> None:
    twice = [[1, 2.5, None, True, "text"]] * 2
    value = {"twice": twice, "pair": ([1], {"a": [2]}), "lock": threading.Lock()}
    copy_of_it = deep_copy(value)
    assert copy_of_it == value
    copy_of_it["twice"][0].append("more")
    copy_of_it["pair"][1]["a"].clear()
    assert value["twice"] == twice == [[1, 2.5, None, True, "text"]] * 2
    assert (copy_of_it["twice"][1], value["pair"]) == (twice[0], ([1], {"a": [2]}))
