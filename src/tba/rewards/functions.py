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
`reward_model.ground_truth`), `data_source` is the task's name, `extra_info` empty, `question` the prompt. `**kwargs`
takes all other fields. As TRL does, a batch gets message lists in place of texts where the prompt is a chat.
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
Answered = tuple[Prompt, Completion]

_ONE = ("completion", "response", "solution_str", "output", "generation")  # the first of these is the answer
_MANY = ("completions", "responses", "solution_strs", "outputs")
_PROMPT = ("prompt", "prompts")
_GOLD = ("ground_truth", "target", "label", "gold", "expected", "solution")
_OF_VERL = {"data_sources": "data_source", "ground_truths": "ground_truth", "extra_infos": "extra_info"}  # in a batch
_SHOWN = "write it as (prompt, completion, **fields) -> float, with the names of the problem's fields that it needs"


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
        if twice := {n for n in names if names.count(n) > 1}:
            raise UserError(f"two reward functions are both named {min(twice)!r}: give each its own `def` and name")
        for name, (_, weight) in zip(names, self.functions, strict=True):
            if not math.isfinite(weight):
                raise UserError(f"reward function {name!r} has weight {weight}: give a finite number")
        if self.concurrency is not None:
            check_concurrency(self.concurrency)
        for f, _ in self.functions:
            _Signature.of(f)

    def calls(self) -> Sequence[GradingCalls]:
        """Returns how each function is called, and how many of its calls may be under way at once."""
        return [_calls(_Signature.of(f), self.concurrency) for f, _ in self.functions]

    def judgement(self, values: Sequence[float | None]) -> Judgement:
        """Returns the weighted sum of what each function gave one answer."""
        pairs = zip(self.functions, values, strict=True)
        weighted = [(f, weight, v) for (f, weight), v in pairs if v is not None]
        parts = {name_of(f): value for f, _, value in weighted}
        if len(weighted) < len(values):
            parts[ABSTAINED] = float(len(values) - len(weighted))
        return Judgement(sum((weight * value for _, weight, value in weighted), 0.0), parts)

    def judge(self, answered: Sequence[Answered]) -> list[Judgement]:
        """Judges answers, one call after another. Raises `UserError` when a function raises, misses a field, or gives
        no finite number.
        """
        by_function = [_called(part, answered) for part in self.calls()]
        for (f, _), values in zip(self.functions, by_function, strict=True):
            if abstained := values.count(None):
                log.info("reward function %r abstained from %d of %d answers", name_of(f), abstained, len(answered))
        if len(answered) > 1 and not any(value is not None for values in by_function for value in values):
            names = ", ".join(repr(name_of(f)) for f, _ in self.functions)
            raise UserError(
                f"reward function {names} gave None for all of {len(answered)} answers: return a number for some"
            )
        return [self.judgement(values) for values in zip(*by_function, strict=True)]


@dataclass(frozen=True)
@as_declared
class FunctionReward:
    """One plain function as a reward, with weight 1."""

    function: RewardFunction  # (prompt, completion, **fields) -> float, or a batch's form: see `rewards/functions.py`
    concurrency: int | None = None  # calls of a function of one answer that run at once, of all searchers of a run
    # together: in threads, or of an async function in one loop; None: 1, of an async function 64

    def __post_init__(self) -> None:
        self.weighted()

    def judge(self, answered: Sequence[Answered]) -> list[Judgement]:
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
        """Returns it as a sum of one."""
        return WeightedFunctions(((self.function, 1.0),), self.concurrency)


def check_fields(reward: Reward, problems: Sequence[Problem], task: str) -> None:
    """Raises `UserError` when a reward of functions, also one that another wraps, asks for a field that a problem of
    its task does not have.
    """
    for f in _functions_in(reward):
        signature = _Signature.of(f)
        for number, problem in enumerate(problems):
            if missing := signature.missing(problem.fields):
                raise UserError(_asks(signature, missing, f"problem {number} of task {task}", problem.fields))


def _functions_in(reward: object) -> list[RewardFunction]:
    """Returns the functions of a reward, and of those that are its fields (`Scaled(FunctionReward(f))`)."""
    if isinstance(reward, FunctionReward):
        return [reward.function]
    if isinstance(reward, WeightedFunctions):
        return [f for f, _ in reward.functions]
    inner = [getattr(reward, one.name) for one in fields(reward)] if is_dataclass(reward) else []
    return [f for one in inner if isinstance(one, Reward) for f in _functions_in(one)]


def name_of(function: RewardFunction) -> str:
    """Returns a function's name in the parts of a judgement and in errors."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def check_concurrency(concurrency: int) -> None:
    """Raises `UserError` for an impossible number of calls at once."""
    if concurrency < 1:
        raise UserError(f"a reward has concurrency {concurrency}: give the number of calls at once, at least 1")


@dataclass(frozen=True)
class _Signature:
    """How a function is called."""

    function: RewardFunction
    answer: str  # the parameter that is the answer, or the answers
    batched: bool  # every parameter is a list
    by_position: tuple[str, ...]  # parameters that cannot be named in a call
    named: tuple[str, ...]
    required: frozenset[str]
    all_fields: bool  # **kwargs

    @classmethod
    def of(cls, function: RewardFunction) -> _Signature:
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            raise UserError(f"reward function {name_of(function)!r} does not say what it takes: {_SHOWN}") from None
        single = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names = [p.name for p in single]
        many = next((name for name in _MANY if name in names), None)
        answer = many or next((name for name in (*_ONE, "messages") if name in names), None)
        if answer is None:
            takes = ", ".join(str(p).partition(":")[0].partition("=")[0].strip() for p in parameters) or "nothing"
            raise UserError(
                f"reward function {name_of(function)!r} takes ({takes}), of which none is named `completion`, the "
                f"answer that it grades: {_SHOWN}"
            )
        return cls(
            function,
            answer,
            batched=many is not None,
            by_position=tuple(p.name for p in single if p.kind is p.POSITIONAL_ONLY),
            named=tuple(p.name for p in single if p.kind is not p.POSITIONAL_ONLY),
            required=frozenset(p.name for p in single if p.default is p.empty),
            all_fields=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    @property
    def waits(self) -> bool:
        """Returns whether it is async."""
        function = self.function.func if isinstance(self.function, functools.partial) else self.function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    def missing(self, fields: Mapping[str, Any]) -> str | None:
        """Returns a parameter that must be given and that fields do not have."""
        return min((name for name in self.required if not self._known(name, fields)), default=None)

    def _known(self, name: str, fields: Mapping[str, Any]) -> bool:
        if name in (self.answer, *_PROMPT, "messages", "completion_ids", "data_source", "extra_info", "question"):
            return True
        name = _OF_VERL.get(name, name) if self.batched else name
        return name in fields or name in ("data_source", "extra_info") or (name in _GOLD and _gold(fields) is not None)

    def given(self, name: str, row: Answered) -> Any:
        """Returns what a parameter is for one answer. Raises `KeyError` where there is no such thing."""
        prompt, completion = row
        name = _OF_VERL.get(name, name) if self.batched else name
        if name == self.answer and name != "messages":
            chat = self.batched and prompt.messages is not None
            return [{"role": "assistant", "content": completion.text}] if chat else completion.text
        if name in _PROMPT:
            return [dict(m) for m in prompt.messages] if self.batched and prompt.messages is not None else prompt.text
        if name == "messages":
            before = prompt.messages or ({"role": "user", "content": prompt.text},)
            return [*(dict(m) for m in before), {"role": "assistant", "content": completion.text}]
        if name in prompt.fields:
            return prompt.fields[name]
        if name in _GOLD and (gold := _gold(prompt.fields)) is not None:
            return gold
        return {
            "completion_ids": completion.tokens.tolist(),
            "data_source": prompt.task,
            "extra_info": {},
            "question": prompt.text,
        }[name]

    def arguments(self, rows: Sequence[Answered]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the positional and named arguments for a batch, or for the one answer of a function of one."""
        for prompt, _ in rows:
            if missing := self.missing(prompt.fields):
                raise UserError(_asks(self, missing, f"prompt {prompt.key} of task {prompt.task}", prompt.fields))
        names = list(self.named)
        if self.all_fields:
            others = dict.fromkeys(name for prompt, _ in rows for name in prompt.fields)
            names += [n for n in others if n not in (*self.named, *self.by_position, *_PROMPT, *_ONE, *_MANY)]
            names += ["prompts"] if self.batched and "prompts" not in names else []

        def value(name: str) -> Any:
            values = [self._or_none(name, row) for row in rows] if self.batched else self.given(name, rows[0])
            return deep_copy(values)  # a function may change what it gets

        by_name: dict[str, Any] = {}
        for name in names:
            with suppress(KeyError):
                by_name[name] = value(name)
        if self.batched:
            by_name = {n: v for n, v in by_name.items() if n in self.required or any(x is not None for x in v)}
        return [value(name) for name in self.by_position if name in self.required], by_name

    def _or_none(self, name: str, row: Answered) -> Any:
        with suppress(KeyError):
            return self.given(name, row)
        return None


def _gold(fields: Mapping[str, Any]) -> Any:
    """Returns the right answer of a problem, wherever it is."""
    nested = fields.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    return fields.get("ground_truth", fields.get("answer"))


def _asks(signature: _Signature, missing: str, what: str, fields: Mapping[str, Any]) -> str:
    return (
        f"reward function {name_of(signature.function)!r} asks for the field {missing!r}, which {what} "
        f"does not have: it has {', '.join(sorted(fields)) or 'no fields'}"
    )


def _calls(signature: _Signature, concurrency: int | None) -> GradingCalls:
    """Returns how a function is called."""
    name = f"reward function {name_of(signature.function)!r}"
    if signature.batched:
        return GradingCalls(name, functools.partial(_of_batch, signature), copies=False)
    if signature.waits:
        many = ASYNC_CONCURRENCY if concurrency is None else concurrency
        return GradingCalls(
            name, functools.partial(_awaited_one, signature), "answer", many, asynchronous=True, copies=False
        )
    return GradingCalls(name, functools.partial(_of_one, signature), "answer", concurrency or 1, copies=False)


def _called(part: GradingCalls, answered: Sequence[Answered]) -> list[float | None]:
    """Returns the values that a function gives, one call after another."""
    rows = [[row] for row in answered] if part.unit == "answer" else [answered] * bool(answered)
    values = [part.grade(row) for row in rows]
    return [value for row in values for value in (_in_a_loop(row) if part.asynchronous else row)]


def _of_one(signature: _Signature, rows: Sequence[Answered]) -> list[float | None]:
    """Returns what a function of one answer gives it."""
    return [_number(_awaited(_invoked(signature, rows), signature.function, rows), signature.function, rows[0])]


def _of_batch(signature: _Signature, rows: Sequence[Answered]) -> list[float | None]:
    """Returns what a function of a batch gives each answer."""
    values = _awaited(_invoked(signature, rows), signature.function, rows)
    values = values.tolist() if hasattr(values, "tolist") else values
    name = name_of(signature.function)
    if not isinstance(values, list | tuple) or len(values) != len(rows):
        what = f"{len(values)} rewards" if isinstance(values, list | tuple) else f"{quote(repr(values)[:200])}"
        raise UserError(
            f"reward function {name!r} gave {what} for {len(rows)} answers: since it takes "
            f"{signature.answer!r}, return a list with a number for each"
        )
    return [_number(value, signature.function, row) for value, row in zip(values, rows, strict=True)]


async def _awaited_one(signature: _Signature, rows: Sequence[Answered]) -> list[float | None]:
    """Returns what an async function of one answer gives it."""
    coroutine = _invoked(signature, rows)
    with _Naming(signature.function, rows):
        value = await coroutine
    return [_number(value, signature.function, rows[0])]


def _invoked(signature: _Signature, rows: Sequence[Answered]) -> Any:
    positional, named = signature.arguments(rows)
    with _Naming(signature.function, rows):
        return signature.function(*positional, **named)


def _awaited(value: Any, function: RewardFunction, rows: Sequence[Answered]) -> Any:
    """Returns what a call gives, waiting for it where it has to be awaited."""
    if not inspect.isawaitable(value):
        return value
    with _Naming(function, rows):
        return _in_a_loop(_of(value))


async def _of(value: Awaitable[Any]) -> Any:
    return await value


def _in_a_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, in the loop in which all asynchronous user code runs."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


class _Naming:
    """Turns whatever a user's function raises, or that it exits, into a `UserError` that names it."""

    def __init__(self, function: RewardFunction, rows: Sequence[Answered]) -> None:
        self.function, self.rows = function, rows

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, TbaError):
            frame = traceback.extract_tb(error.__traceback__)[-1]
            (prompt, completion), more = self.rows[0], len(self.rows) - 1
            others = f" (or on one of {more} others)" if more else ""
            raise UserError(
                f"reward function {name_of(self.function)!r} failed on the answer {quote(completion.text)} to "
                f"prompt {quote(prompt.text)} of task {prompt.task}{others}: {type(error).__name__}: {error} "
                f"({frame.filename}, line {frame.lineno}: {frame.line})"
            ) from error


def _number(value: Any, function: RewardFunction, row: Answered) -> float | None:
    """Returns a reward as a float, None for one that abstains. Raises `UserError` unless it is a finite number."""
    if isinstance(value, Mapping) and "score" in value:
        value = value["score"]  # verl's
    if value is None:
        return None
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # of numpy, of torch
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
        shown = repr(value)[:200]
    except (OverflowError, ValueError):  # an int, which may have any number of digits
        number, shown = math.nan, "an integer of more than 300 digits"
    if not math.isfinite(number):
        prompt = row[0]
        raise UserError(
            f"reward function {name_of(function)!r} gave {shown} for prompt {prompt.key} of task {prompt.task}: "
            "return a finite number, or None to abstain"
        )
    return number
