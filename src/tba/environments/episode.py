"""One episode: an environment's object from `reset` to its reward, whichever way its author wrote it.

Invariant: the environment sees texts and its problem's fields, never tokens. What it raises becomes `EpisodeFailed`,
which costs this episode and nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tba.environments.tools import Call, bind_arguments, calls_in, find_tools, format_result, schemas_of
from tba.errors import TbaError, UserError
from tba.protocols import Environment
from tba.types import Json, Judgement, deep_copy, quote


class EpisodeFailed(TbaError):
    """Raised for an environment that raised, or returned what cannot be used."""


@dataclass(frozen=True)
class Observation:
    """An environment's reply to a turn: a message of the user, or of the tools that the turn has called."""

    text: str
    results: tuple[tuple[str, str], ...] = ()  # by tool, in the order of the calls
    call_ids: tuple[str, ...] = ()  # the names that the policy gave its calls, in that order; empty: none


class Episode:
    """An environment that was made and reset; call `say` by turns, then `judgement`."""

    def __init__(self, make: Callable[[], Environment], fields: Mapping[str, Json], seed: int, turns: int) -> None:
        """Makes and resets the environment of an episode of at most `turns` turns. Raises `EpisodeFailed`."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns_left, self._turn_limit = turns, turns
        self._step_rewards = 0.0
        self._wrong_calls = 0  # calls that could not be made
        self._answer: str | None = None
        self.is_over = False
        self._environment = self._invoke("its making", make)
        reset, name = self._find_method("reset"), type(self._environment).__name__
        if reset is None:
            raise UserError(f"{name} has no reset(): an environment needs reset, and step or tools")
        self._step, self._tools = self._find_method("step"), find_tools(self._environment)
        if self._step is None and not self._tools:
            raise UserError(f"{name} has no step() and no tools: give it a method step(self, text), or public methods")
        opening = self._invoke(
            "reset()", reset, **_accepted_arguments(reset, {**deep_copy(dict(fields)), "seed": seed})
        )
        self.opening = self._require_text("reset()", opening)  # what the policy is told first

    @property
    def tools(self) -> tuple[Json, ...]:
        """Returns the environment's tools as JSON schemas."""
        return schemas_of(self._environment)

    def say(self, text: str) -> Observation | None:
        """Returns what the environment answers to one turn; None when it is over."""
        self._turns_left -= 1
        observation = self._take_step(self._step, text) if self._step is not None else self._call_tools(text)
        self.is_over = self.is_over or observation is None or self._turns_left <= 0
        return None if self.is_over else observation

    def replay(self, turns: Sequence[str]) -> None:
        """Play turns that were played before and did not end the episode. Raises `EpisodeFailed` when they do now."""
        for text in turns:
            if self.say(text) is None:
                raise EpisodeFailed(
                    f"{type(self._environment).__name__} is over after turns that it went on after before: whatever it "
                    "draws has to be drawn from the argument `seed` of reset()"
                )

    def _take_step(self, step: Callable[..., Any], text: str) -> Observation | None:
        answer: Any = self._invoke("step()", step, text)
        if hasattr(answer, "done"):
            reward = getattr(answer, "reward", None)
            self._step_rewards += 0.0 if reward is None else self._require_number("step()", reward)
            answer, self.is_over = getattr(answer, "observation", None), bool(answer.done)
        observation = self._require_text("step()", answer)
        return None if observation is None else Observation(observation)

    def _call_tools(self, text: str) -> Observation | None:
        """Returns what the tools give that a turn calls; None for a turn that calls none, which is the answer."""
        calls = calls_in(text)
        if not calls:
            self._answer = text
            return None
        results = tuple((call.name, self._call_tool(call)) for call in calls)
        call_ids = tuple(call.id for call in calls) if any(call.id for call in calls) else ()
        return Observation("\n".join(result for _, result in results), results, call_ids)

    def _call_tool(self, call: Call) -> str:
        """Returns what a tool gives, or the error of a wrong call or of the tool as a text for the policy."""
        try:
            arguments = bind_arguments(self._tools, call)
        except ValueError as error:
            self._wrong_calls += 1
            return f"error: {error}"
        try:
            return format_result(self._await_result(self._tools[call.name](**arguments)))
        except MemoryError as error:
            raise _episode_failure(f"{call.name}()", error) from error
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool raises what it likes
            return f"error: {type(error).__name__}: {error}"

    @property
    def turns(self) -> int:
        """Returns how many turns the environment was told."""
        return self._turn_limit - self._turns_left

    def cut(self, text: str) -> None:
        """Pass a last turn that was cut off to the environment, if it has a method `cut`."""
        if (cut := self._find_method("cut")) is not None:
            self._invoke("cut()", cut, text)

    def judgement(self) -> Judgement:
        """Returns the reward of the episode as it stands, its turns, and how many of its calls could not be made."""
        reward = self._step_rewards
        if (get_reward := self._find_method("get_reward")) is not None:
            arguments = _accepted_arguments(get_reward, {"answer": self._answer})
            reward = self._require_number("get_reward()", self._invoke("get_reward()", get_reward, **arguments))
        wrong_calls = {"wrong_calls": float(self._wrong_calls)} if self._tools else {}
        return Judgement(reward, {"turns": float(self.turns), **wrong_calls})

    def close(self) -> None:
        """Close the environment. An error in its `close()` changes nothing any more."""
        try:
            if (close := self._find_method("close")) is not None:
                self._invoke("close()", close)
        except EpisodeFailed:
            pass
        finally:
            if self._loop is not None:
                self._loop.close()

    def _find_method(self, name: str) -> Callable[..., Any] | None:
        method = getattr(self._environment, name, None)
        return method if callable(method) else None

    def _invoke(self, source: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        try:
            return self._await_result(function(*arguments, **keywords))
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise _episode_failure(source, error) from error

    def _await_result(self, answer: Any) -> Any:
        if not inspect.isawaitable(answer):
            return answer
        self._loop = self._loop or asyncio.new_event_loop()  # one for all: what it opens belongs to its loop
        return self._loop.run_until_complete(_await_value(answer))

    def _require_text(self, source: str, answer: object) -> str | None:
        if answer is None or isinstance(answer, str):
            return answer
        name = type(self._environment).__name__
        raise EpisodeFailed(f"{source} of {name} gave {answer!r:.80}: return a text or None")

    def _require_number(self, source: str, answer: object) -> float:
        if isinstance(answer, int | float) and math.isfinite(answer):
            return float(answer)
        name = type(self._environment).__name__
        raise EpisodeFailed(f"{source} of {name} gave the reward {answer!r:.80}: return a number")


def begin(make: Callable[[], Environment], fields: Mapping[str, Json], seed: int, turns: int, prompt: str) -> Episode:
    """Returns a new episode for a prompt. Raises `UserError` where `reset` says something else than when the prompt was
    made.
    """
    episode = Episode(make, fields, seed, turns)
    if episode.opening is not None and episode.opening.strip() not in prompt:
        raise UserError(
            f"reset() said {quote(episode.opening)} for seed {seed}, and something else when the prompt was made: "
            "whatever it draws has to be drawn from its argument `seed`"
        )
    return episode


def _episode_failure(source: str, error: BaseException) -> EpisodeFailed:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return EpisodeFailed(
        f"{source} raised {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}: {frame.line})"
    )


async def _await_value(answer: Any) -> Any:
    return await answer


def _accepted_arguments(function: Callable[..., Any], arguments: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the arguments that a function declares; all of them where it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(arguments)
    return {p.name: arguments[p.name] for p in parameters if p.name in arguments}
