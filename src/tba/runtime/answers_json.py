"""Prompts and completions as JSON, for a process that grades them: nothing is pickled.

Invariant: `read_answers(json.loads(json.dumps(write_answers(answered))))` is equal to `answered`, floats to the last
bit, and so is each value: tuples stay tuples, and keys of dictionaries what they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import numpy.typing as npt

from tba.errors import UserError
from tba.types import Completion, Json, Judgement, Prompt, Sampling, StopReason, Version

Answered = tuple[Prompt, Completion]
_SCALARS = (str, int, float, bool, type(None))


def write_answers(answers: Sequence[Answered]) -> Json:
    """Returns answers as JSON, with each prompt once. Raises `UserError` for a field that JSON cannot hold."""
    places: dict[int, int] = {}
    prompts: list[Json] = []
    for prompt, _ in answers:
        if id(prompt) not in places:
            places[id(prompt)] = len(prompts)
            prompts.append(_write_prompt(prompt))
    return {"prompts": prompts, "rows": [[places[id(p)], _write_completion(c)] for p, c in answers]}


def read_answers(value: Json) -> list[Answered]:
    """Returns the answers that `write_answers` wrote."""
    prompts = [_read_prompt(prompt) for prompt in value["prompts"]]
    return [(prompts[place], _read_completion(completion)) for place, completion in value["rows"]]


def write_values(values: Iterable[Any]) -> Json:
    """Returns a reward's values as JSON: judgements, numbers, None. Raises `UserError` for a value of another kind."""
    return [
        {"reward": _number(value.reward), "parts": {name: _number(part) for name, part in value.parts.items()}}
        if isinstance(value, Judgement)
        else [_to_json(_number(value), "a value")]
        for value in values
    ]


def read_values(values: Json) -> list[Any]:
    """Returns the values that `write_values` wrote; numbers of numpy and of torch as Python's."""
    return [Judgement(v["reward"], v["parts"]) if isinstance(v, dict) else _from_json(v[0]) for v in values]


def _number(value: Any) -> Any:
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _write_prompt(prompt: Prompt) -> Json:
    owner, messages = f"a prompt of task {prompt.task}", prompt.messages
    return {
        "task": prompt.task,
        "tokens": prompt.tokens.tolist(),
        "text": prompt.text,
        "fields": [[name, _to_json(value, f"the field {name!r} of {owner}")] for name, value in prompt.fields.items()],
        "seed": prompt.seed,
        "said": list(prompt.earlier_turns),
        "thoughts": [list(marks) for marks in prompt.thoughts],
        "messages": None if messages is None else [_to_json(m, f"a message of {owner}") for m in messages],
    }


def _read_prompt(value: Json) -> Prompt:
    messages = value["messages"]
    return Prompt(
        value["task"],
        np.array(value["tokens"], np.int32),
        value["text"],
        {name: _from_json(inner) for name, inner in value["fields"]},
        value["seed"],
        tuple(value["said"]),
        None if messages is None else tuple(_from_json(message) for message in messages),
        tuple((begin, end) for begin, end in value["thoughts"]),
    )


def _write_completion(completion: Completion) -> Json:
    judgement, sampling = completion.judgement, completion.sampling
    return {
        "tokens": completion.tokens.tolist(),
        "text": completion.text,
        "stop_reason": completion.stop_reason.value,
        "versions": [[version.incarnation, version.step] for version in completion.versions],
        "sampling": None if sampling is None else list(astuple(sampling)),
        "log_behavior": _list_or_none(completion.log_behavior),
        "mask": _list_or_none(completion.mask),
        "judgement": None if judgement is None else write_values([judgement])[0],
        "begins": _list_or_none(completion.begins),
    }


def _read_completion(value: Json) -> Completion:
    oldest, newest = (Version(*version) for version in value["versions"])
    log_behavior, mask, judgement = value["log_behavior"], value["mask"], value["judgement"]
    begins = value["begins"]
    return Completion(
        np.array(value["tokens"], np.int32),
        value["text"],
        StopReason(value["stop_reason"]),
        (oldest, newest),
        None if value["sampling"] is None else Sampling(*value["sampling"]),
        None if log_behavior is None else np.array(log_behavior, np.float32),
        None if mask is None else np.array(mask, np.bool_),
        None if judgement is None else read_values([judgement])[0],
        None if begins is None else np.array(begins, np.int32),
    )


def _list_or_none(array: npt.NDArray[Any] | None) -> list[Any] | None:
    return None if array is None else array.tolist()


def _to_json(value: Any, name: str) -> Json:
    """Returns a value with tuples and dictionaries marked as such: JSON would make lists of them, and texts of keys."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, list):
        return [_to_json(inner, name) for inner in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(inner, name) for inner in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_to_json(key, name), _to_json(inner, name)] for key, inner in value.items()]}
    raise UserError(
        f"{name} is of the type {type(value).__name__}, which cannot be given to another process, where its reward has "
        "to run: make it of texts, numbers, lists and dictionaries"
    )


def _from_json(value: Json) -> Any:
    if isinstance(value, list):
        return [_from_json(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_from_json(inner) for inner in value["tuple"])
    return {_from_json(key): _from_json(inner) for key, inner in value["dict"]}
