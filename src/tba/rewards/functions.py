"""Rewards from plain functions: one, or a weighted sum of several, each called as the names of its parameters say.

Invariant: what a function is given depends on the names of its parameters only, never on their order, and is settled
before the first answer; it must return a finite number, or None to abstain; anything else is an error that names the
function and the prompt. Each call gets its own copies, so that no other call sees what a function does to them.

| a function of | is called for | and returns |
|---|---|---|
| `completion` | one answer's text | a number, or verl's `{"score": number}` |
| `messages` | one conversation, the answer as its last message | the same |
| `completions` | a batch, every parameter a list | a list of numbers |

`response`, `solution_str`, `output` and `generation` are `completion` under another name, and so in the plural. Beside
these a parameter may be `prompt` (`prompts`), or any field of the problem. Where the problem has no field of that name,
`ground_truth`, `target`, `label`, `gold`, `expected` and `solution` are its `answer` (or verl's
`reward_model.ground_truth`), `data_source` is the task's name, `extra_info` empty, `question` the prompt, `artifact`
what an agent of `tba serve` handed in. `**kwargs` takes all other fields. As TRL does, a batch gets message lists in
place of texts where the prompt is a chat.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from types import TracebackType
from typing import Any, TypeVar

from tba.errors import TbaError, UserError
from tba.fields import as_declared
from tba.grading import event_loop
from tba.protocols import GradingCalls, Reward
from tba.types import Completion, Judgement, Problem, Prompt, deep_copy, quote

T = TypeVar("T")
log = logging.getLogger("tba.reward")
ABSTAINED = "abstained"  # the part of a judgement that says how many functions gave an answer None
ASYNC_CONCURRENCY = 64  # calls of an async function at once, where nothing else is said

RewardFunction = Callable[..., Any]
AnsweredPrompt = tuple[Prompt, Completion]

_ANSWER_NAMES = ("completion", "response", "solution_str", "output", "generation")  # the first of these is the answer
_BATCH_NAMES = ("completions", "responses", "solution_strs", "outputs")
_PROMPT_NAMES = ("prompt", "prompts")
_DERIVED_NAMES = ("messages", "completion_ids", "data_source", "extra_info", "question", "artifact")
_GOLD_NAMES = ("ground_truth", "target", "label", "gold", "expected", "solution")
_SINGULARS = {"data_sources": "data_source", "ground_truths": "ground_truth", "extra_infos": "extra_info"}  # in a batch
_USAGE = "write it as (prompt, completion, **fields) -> float, with the names of the problem's fields that it needs"


@dataclass(frozen=True)
class WeightedFunctions:
    """reward = sum of weight * function. The judgement's parts are the unweighted values, by function name.

    A function that gives None abstains: it has no part and adds nothing (where all do, the reward is 0), and the part
    `abstained` says how many did; that all abstain from all of several answers is an error. Raises `UserError` for no
    functions, two of one name, a weight that is not finite, a `concurrency` below 1, or a function whose parameters do
    not say which is the answer.
    """

    functions: tuple[tuple[RewardFunction, float], ...]  # (function, weight) pairs
    concurrency: int | None = None  # calls of a function of one answer that run at once, of all searchers of a run
    # together: in threads, or of an async function in one loop; None: 1, of an async function 64

    def __post_init__(self) -> None:
        for pair in self.functions:
            if not (isinstance(pair, tuple) and len(pair) == 2 and callable(pair[0])):
                raise UserError(f"a reward of functions has {pair!r:.80} for one: give ((function, weight), ...)")
        names = [name_of(f) for f, _ in self.functions]
        if not names:
            raise UserError("a reward of functions needs at least one: give ((function, weight), ...)")
        if repeats := {n for n in names if names.count(n) > 1}:
            raise UserError(f"two reward functions are both named {min(repeats)!r}: give each its own `def` and name")
        for name, (_, weight) in zip(names, self.functions, strict=True):
            if not math.isfinite(weight):
                raise UserError(f"reward function {name!r} has weight {weight}: give a finite number")
        if self.concurrency is not None and self.concurrency < 1:
            raise UserError(f"a reward has concurrency {self.concurrency}: give 1 or more calls at once")
        for f, _ in self.functions:
            _Signature.of(f)

    def calls(self) -> Sequence[GradingCalls]:
        """Returns how each function is called, and how many of its calls may be under way at once."""
        return [_grading_calls(_Signature.of(f), self.concurrency) for f, _ in self.functions]

    def judgement(self, values: Sequence[float | None]) -> Judgement:
        """Returns the weighted sum of what each function gave one answer."""
        pairs = zip(self.functions, values, strict=True)
        weighted_values = [(f, weight, v) for (f, weight), v in pairs if v is not None]
        parts = {name_of(f): value for f, _, value in weighted_values}
        if len(weighted_values) < len(values):
            parts[ABSTAINED] = float(len(values) - len(weighted_values))
        return Judgement(sum((weight * value for _, weight, value in weighted_values), 0.0), parts)

    def judge(self, answered: Sequence[AnsweredPrompt]) -> list[Judgement]:
        """Judges answers, one call after another. Raises `UserError` when a function raises, misses a field, or gives
        no finite number.
        """
        values_by_function = [_call_all(calls, answered) for calls in self.calls()]
        for (f, _), values in zip(self.functions, values_by_function, strict=True):
            if abstentions := values.count(None):
                log.info("reward function %r abstained from %d of %d answers", name_of(f), abstentions, len(answered))
        if len(answered) > 1 and not any(value is not None for values in values_by_function for value in values):
            names = ", ".join(repr(name_of(f)) for f, _ in self.functions)
            raise UserError(f"reward function {names} gave None for all {len(answered)} answers: return numbers")
        return [self.judgement(values) for values in zip(*values_by_function, strict=True)]


@dataclass(frozen=True)
@as_declared
class FunctionReward:
    """One plain function as a reward, with weight 1."""

    function: RewardFunction  # (prompt, completion, **fields) -> float, or a batch's form: see `rewards/functions.py`
    concurrency: int | None = None  # calls of a function of one answer that run at once, of all searchers of a run
    # together: in threads, or of an async function in one loop; None: 1, of an async function 64

    def __post_init__(self) -> None:
        self.weighted()

    def judge(self, answered: Sequence[AnsweredPrompt]) -> list[Judgement]:
        """Judges answers, one call after another. Raises `UserError` when the function raises, misses a field, or
        gives no finite number.
        """
        return self.weighted().judge(answered)

    def calls(self) -> Sequence[GradingCalls]:
        """Returns how the function is called, and how many of its calls may be under way at once."""
        return self.weighted().calls()

    def judgement(self, values: Sequence[float | None]) -> Judgement:
        """Returns the judgement of what the function gave one answer."""
        return self.weighted().judgement(values)

    def weighted(self) -> WeightedFunctions:
        """Returns the same reward as a weighted sum of one function."""
        return WeightedFunctions(((self.function, 1.0),), self.concurrency)


def check_fields(reward: Reward, problems: Sequence[Problem], task: str) -> None:
    """Raises `UserError` when a reward of functions, also one that another wraps, asks for a field that a problem of
    its task does not have.
    """
    for f in _functions_in(reward):
        signature = _Signature.of(f)
        for number, problem in enumerate(problems):
            if name := signature.find_missing(problem.fields):
                raise UserError(_missing_field(signature, name, f"problem {number} of task {task}", problem.fields))


def _functions_in(reward: object) -> list[RewardFunction]:
    """Returns the functions of a reward, and of the rewards in its fields (`Scaled(FunctionReward(f))`)."""
    if isinstance(reward, FunctionReward):
        return [reward.function]
    if isinstance(reward, WeightedFunctions):
        return [f for f, _ in reward.functions]
    field_values = [getattr(reward, field_value.name) for field_value in fields(reward)] if is_dataclass(reward) else []
    return [f for field_value in field_values if isinstance(field_value, Reward) for f in _functions_in(field_value)]


def name_of(function: RewardFunction) -> str:
    """Returns a function's name in the parts of a judgement and in errors."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass(frozen=True)
class _Signature:
    """How a reward function is called, by the names of its parameters."""

    function: RewardFunction
    answer_name: str  # the parameter that is the answer, or the answers
    is_batched: bool  # every parameter is a list
    positional_names: tuple[str, ...]  # parameters that cannot be named in a call
    keyword_names: tuple[str, ...]
    required_names: frozenset[str]
    takes_all_fields: bool  # **kwargs

    @classmethod
    def of(cls, function: RewardFunction) -> _Signature:
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            raise UserError(f"reward function {name_of(function)!r} does not say what it takes: {_USAGE}") from None
        named_parameters = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names = [p.name for p in named_parameters]
        batch_name = next((name for name in _BATCH_NAMES if name in names), None)
        answer = batch_name or next((name for name in (*_ANSWER_NAMES, "messages") if name in names), None)
        if answer is None:
            listing = ", ".join(str(p).partition(":")[0].partition("=")[0].strip() for p in parameters) or "nothing"
            raise UserError(
                f"reward function {name_of(function)!r} takes ({listing}), of which none is named `completion`, the "
                f"answer that it grades: {_USAGE}"
            )
        return cls(
            function,
            answer,
            is_batched=batch_name is not None,
            positional_names=tuple(p.name for p in named_parameters if p.kind is p.POSITIONAL_ONLY),
            keyword_names=tuple(p.name for p in named_parameters if p.kind is not p.POSITIONAL_ONLY),
            required_names=frozenset(p.name for p in named_parameters if p.default is p.empty),
            takes_all_fields=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    @property
    def is_async(self) -> bool:
        """Returns whether the function is async."""
        function = self.function.func if isinstance(self.function, functools.partial) else self.function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    def find_missing(self, fields: Mapping[str, Any]) -> str | None:
        """Returns the name of a required parameter that these fields do not have; None: there is none."""
        return min((name for name in self.required_names if not self._is_available(name, fields)), default=None)

    def _is_available(self, name: str, fields: Mapping[str, Any]) -> bool:
        if name in (self.answer_name, *_PROMPT_NAMES, *_DERIVED_NAMES):
            return True
        name = _SINGULARS.get(name, name) if self.is_batched else name
        has_gold = name in _GOLD_NAMES and _find_gold(fields) is not None
        return has_gold or name in fields or name in ("data_source", "extra_info")

    def argument(self, name: str, row: AnsweredPrompt) -> Any:
        """Returns the value of a parameter for one answer. Raises `KeyError` where it has none."""
        prompt, completion = row
        name, chat = (_SINGULARS.get(name, name), prompt.messages) if self.is_batched else (name, None)
        if name == self.answer_name and name != "messages":
            return [{"role": "assistant", "content": completion.text}] if chat is not None else completion.text
        if name in _PROMPT_NAMES:
            return [dict(m) for m in chat] if chat is not None else prompt.text
        if name == "messages" and completion.episode is not None:
            return [dict(m) for m in completion.episode.messages]
        if name == "messages":
            history = prompt.messages or ({"role": "user", "content": prompt.text},)
            return [*(dict(m) for m in history), {"role": "assistant", "content": completion.text}]
        if name in prompt.fields:
            return prompt.fields[name]
        if name in _GOLD_NAMES and (gold_answer := _find_gold(prompt.fields)) is not None:
            return gold_answer
        return {
            "completion_ids": completion.tokens.tolist(),
            "data_source": prompt.task,
            "extra_info": {},
            "question": prompt.text,
            "artifact": None if completion.episode is None else completion.episode.artifact,
        }[name]

    def arguments(self, rows: Sequence[AnsweredPrompt]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the positional and named arguments for a batch, or for the one answer of a function of one."""
        for prompt, _ in rows:
            if name := self.find_missing(prompt.fields):
                raise UserError(_missing_field(self, name, f"prompt {prompt.key} of task {prompt.task}", prompt.fields))
        names = list(self.keyword_names)
        if self.takes_all_fields:
            fixed_names = (*_PROMPT_NAMES, *_ANSWER_NAMES, *_BATCH_NAMES, *self.keyword_names, *self.positional_names)
            names += dict.fromkeys(n for prompt, _ in rows for n in prompt.fields if n not in fixed_names)
            names += ["prompts"] if self.is_batched and "prompts" not in names else []

        def value_of(name: str) -> Any:
            values = [self._or_none(name, row) for row in rows] if self.is_batched else self.argument(name, rows[0])
            return deep_copy(values)  # a function may change what it gets

        keywords: dict[str, Any] = {}
        for name in names:
            with suppress(KeyError):
                keywords[name] = value_of(name)
        if self.is_batched:
            keywords = {n: v for n, v in keywords.items() if n in self.required_names or any(x is not None for x in v)}
        return [value_of(name) for name in self.positional_names if name in self.required_names], keywords

    def _or_none(self, name: str, row: AnsweredPrompt) -> Any:
        with suppress(KeyError):
            return self.argument(name, row)
        return None


def _find_gold(fields: Mapping[str, Any]) -> Any:
    """Returns the right answer of a problem, wherever it is."""
    reward_model = fields.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    return fields.get("ground_truth", fields.get("answer"))


def _missing_field(signature: _Signature, name: str, row_name: str, fields: Mapping[str, Any]) -> str:
    return (
        f"reward function {name_of(signature.function)!r} asks for the field {name!r}, which {row_name} "
        f"does not have: it has {', '.join(sorted(fields)) or 'no fields'}"
    )


def _grading_calls(signature: _Signature, concurrency: int | None) -> GradingCalls:
    """Returns how a function is called."""
    name = f"reward function {name_of(signature.function)!r}"
    if signature.is_batched:
        return GradingCalls(name, functools.partial(_call_for_batch, signature), copies=False)
    if signature.is_async:
        concurrent_calls = ASYNC_CONCURRENCY if concurrency is None else concurrency
        return GradingCalls(
            name, functools.partial(_call_async, signature), "answer", concurrent_calls, asynchronous=True, copies=False
        )
    return GradingCalls(name, functools.partial(_call_for_answer, signature), "answer", concurrency or 1, copies=False)


def _call_all(calls: GradingCalls, answered: Sequence[AnsweredPrompt]) -> list[float | None]:
    """Returns the values that a function gives, one call after another."""
    rows = [[row] for row in answered] if calls.unit == "answer" else [answered] * bool(answered)
    values = [calls.grade(row) for row in rows]
    return [value for row in values for value in (_run_in_loop(row) if calls.asynchronous else row)]


def _call_for_answer(signature: _Signature, rows: Sequence[AnsweredPrompt]) -> list[float | None]:
    """Returns what a function of one answer gives it."""
    return [_check_value(_await_value(_invoke(signature, rows), signature.function, rows), signature.function, rows[0])]


def _call_for_batch(signature: _Signature, rows: Sequence[AnsweredPrompt]) -> list[float | None]:
    """Returns what a function of a batch gives each answer."""
    values = _await_value(_invoke(signature, rows), signature.function, rows)
    values = values.tolist() if hasattr(values, "tolist") else values
    name = name_of(signature.function)
    if not isinstance(values, list | tuple) or len(values) != len(rows):
        description = f"{len(values)} rewards" if isinstance(values, list | tuple) else f"{quote(repr(values)[:200])}"
        raise UserError(
            f"reward function {name!r} gave {description} for {len(rows)} answers: since it takes "
            f"{signature.answer_name!r}, return a list with a number for each"
        )
    return [_check_value(value, signature.function, row) for value, row in zip(values, rows, strict=True)]


async def _call_async(signature: _Signature, rows: Sequence[AnsweredPrompt]) -> list[float | None]:
    """Returns what an async function of one answer gives it."""
    coroutine = _invoke(signature, rows)
    with _NamedErrors(signature.function, rows):
        value = await coroutine
    return [_check_value(value, signature.function, rows[0])]


def _invoke(signature: _Signature, rows: Sequence[AnsweredPrompt]) -> Any:
    positional_arguments, keyword_arguments = signature.arguments(rows)
    with _NamedErrors(signature.function, rows):
        return signature.function(*positional_arguments, **keyword_arguments)


def _await_value(value: Any, function: RewardFunction, rows: Sequence[AnsweredPrompt]) -> Any:
    """Returns the result of a call, which it awaits where that is needed."""
    if not inspect.isawaitable(value):
        return value
    with _NamedErrors(function, rows):
        return _run_in_loop(_as_coroutine(value))


async def _as_coroutine(value: Awaitable[Any]) -> Any:
    return await value


def _run_in_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, in the loop in which all asynchronous user code runs."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


class _NamedErrors:
    """Turns whatever a user's function raises, or that it exits, into a `UserError` that names it."""

    def __init__(self, function: RewardFunction, rows: Sequence[AnsweredPrompt]) -> None:
        self.function, self.rows = function, rows

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, TbaError):
            frame = traceback.extract_tb(error.__traceback__)[-1]
            (prompt, completion), other_count = self.rows[0], len(self.rows) - 1
            note = f" (or on one of {other_count} others)" if other_count else ""
            raise UserError(
                f"reward function {name_of(self.function)!r} failed on the answer {quote(completion.text)} to "
                f"prompt {quote(prompt.text)} of task {prompt.task}{note}: {type(error).__name__}: {error} "
                f"({frame.filename}, line {frame.lineno}: {frame.line})"
            ) from error


def _check_value(value: Any, function: RewardFunction, row: AnsweredPrompt) -> float | None:
    """Returns a reward as a float, None for one that abstains. Raises `UserError` unless it is a finite number."""
    if isinstance(value, Mapping) and "score" in value:
        value = value["score"]  # verl's
    if value is None:
        return None
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # of numpy, of torch
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
        description = repr(value)[:200]
    except (OverflowError, ValueError):  # an int, which may have any number of digits
        number, description = math.nan, "an integer of more than 300 digits"
    if not math.isfinite(number):
        prompt = row[0]
        raise UserError(
            f"reward function {name_of(function)!r} gave {description} for prompt {prompt.key} of task {prompt.task}: "
            "return a finite number, or None to abstain"
        )
    return number
