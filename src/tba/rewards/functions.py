"""Rewards from plain functions `(prompt: str, completion: str, **fields) -> float`: one, or a weighted sum of several.

Invariant: a function gets the prompt's fields that its signature names (all of them if it takes `**fields`), and must
return a finite number; anything else is an error that names the function and the prompt.
"""

from __future__ import annotations

import functools
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from tba.errors import TbaError, UserError
from tba.rewards.threads import in_threads
from tba.types import Completion, Json, Judgement, Prompt, quoted

RewardFunction = Callable[..., float]


@dataclass(frozen=True)
class WeightedFunctions:
    """reward = sum of weight * function. The judgement's parts are the unweighted values, by function name.

    Raises `UserError` for no functions, two of one name, a weight that is not finite, or a `concurrency` below 1.
    """

    functions: tuple[tuple[RewardFunction, float], ...]  # (function, weight) pairs
    concurrency: int = 1  # calls at once, in threads: for functions that wait (a network, a subprocess)
    deadline_seconds: float = 600.0  # for one batch of answers, when in threads

    def __post_init__(self) -> None:
        for f, _ in self.functions:
            if not callable(f):
                raise UserError(f"a reward of functions has {f!r:.80} for one: give ((function, weight), ...)")
        names = [name_of(f) for f, _ in self.functions]
        if not names:
            raise UserError("a reward of functions needs at least one: give ((function, weight), ...)")
        if twice := {n for n in names if names.count(n) > 1}:
            raise UserError(f"two reward functions are both named {min(twice)!r}: give each its own `def` and name")
        for name, (_, weight) in zip(names, self.functions, strict=True):
            if not math.isfinite(weight):
                raise UserError(f"reward function {name!r} has weight {weight}: give a finite number")
        check_waiting(self.concurrency, self.deadline_seconds)

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Raises `UserError` when a function raises, misses a field, or gives no finite number."""
        asked = [(f, prompt, completion) for prompt, completion in answered for f, _ in self.functions]
        accepts = {f: _Parameters.of(f) for f, _ in self.functions}
        calls = [functools.partial(_call, f, accepts[f], prompt, completion) for f, prompt, completion in asked]
        values = in_threads(
            calls,
            self.concurrency,
            self.deadline_seconds,
            lambda i: f"reward function {name_of(asked[i][0])!r} on prompt {asked[i][1].key}",
        )
        count = len(self.functions)
        return [self._judgement(values[i : i + count]) for i in range(0, len(values), count)]

    def _judgement(self, values: Sequence[float]) -> Judgement:
        reward = sum(weight * value for (_, weight), value in zip(self.functions, values, strict=True))
        return Judgement(reward, {name_of(f): v for (f, _), v in zip(self.functions, values, strict=True)})


@dataclass(frozen=True)
class FunctionReward:
    """One plain function as a reward, with weight 1."""

    function: RewardFunction  # (prompt, completion, **fields) -> float
    concurrency: int = 1  # calls at once, in threads: for a function that waits (a network, a subprocess)
    deadline_seconds: float = 600.0  # for one batch of answers, when in threads

    def __post_init__(self) -> None:
        check_waiting(self.concurrency, self.deadline_seconds)

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Raises `UserError` when the function raises, misses a field, or gives no finite number."""
        return WeightedFunctions(((self.function, 1.0),), self.concurrency, self.deadline_seconds).judge(answered)


def name_of(function: RewardFunction) -> str:
    """Returns a function's name in the parts of a judgement and in errors."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def check_waiting(concurrency: int, deadline_seconds: float) -> None:
    """Raises `UserError` for an impossible concurrency or deadline."""
    if concurrency < 1:
        raise UserError(f"a reward has concurrency {concurrency}: give the number of calls at once, at least 1")
    if not deadline_seconds > 0:
        raise UserError(f"a reward has deadline_seconds {deadline_seconds}: give seconds above 0")


@dataclass(frozen=True)
class _Parameters:
    """What a reward function takes besides prompt and completion."""

    named: frozenset[str]
    required: frozenset[str]
    all_fields: bool

    @classmethod
    def of(cls, function: RewardFunction) -> _Parameters:
        parameters = list(inspect.signature(function).parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise UserError(
                f"reward function {name_of(function)!r} takes {len(positional)} positional arguments: "
                "write it as (prompt, completion, **fields) -> float"
            )
        taken = {p.name for p in positional[:2]}
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in taken]
        return cls(
            frozenset(p.name for p in named),
            frozenset(p.name for p in named if p.default is p.empty),
            any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def select(self, fields: Mapping[str, Json], function: RewardFunction, prompt: Prompt) -> dict[str, Json]:
        if missing := self.required - fields.keys():
            raise UserError(
                f"reward function {name_of(function)!r} asks for the field {min(missing)!r}, which prompt {prompt.key} "
                f"of task {prompt.task} does not have: it has {', '.join(sorted(fields)) or 'no fields'}"
            )
        if self.all_fields:
            return {k: v for k, v in fields.items() if k not in ("prompt", "completion") or k in self.named}
        return {k: v for k, v in fields.items() if k in self.named}


class _Naming:
    """Turns whatever a user's function raises into a `UserError` that names it; the original is its cause."""

    def __init__(self, function: RewardFunction, prompt: Prompt, completion: Completion) -> None:
        self.function, self.prompt, self.completion = function, prompt, completion

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, TbaError):
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"reward function {name_of(self.function)!r} failed on the answer {quoted(self.completion.text)} to "
                f"prompt {quoted(self.prompt.text)} of task {self.prompt.task}: {type(error).__name__}: {error} "
                f"({frame.filename}, line {frame.lineno}: {frame.line})"
            ) from error


def _call(function: RewardFunction, accepts: _Parameters, prompt: Prompt, completion: Completion) -> float:
    fields = accepts.select(prompt.fields, function, prompt)
    with _Naming(function, prompt, completion):
        value: object = function(prompt.text, completion.text, **fields)
    if not isinstance(value, int | float | np.number | np.bool_) or not math.isfinite(value):
        raise UserError(
            f"reward function {name_of(function)!r} gave {value!r} for prompt {prompt.key} of task {prompt.task}: "
            "return a finite number"
        )
    return float(value)
