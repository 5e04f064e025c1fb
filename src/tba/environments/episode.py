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

from tba.environments.tools import Call, bound, calls_in, schemas_of, tools_of, written
from tba.errors import TbaError, UserError
from tba.protocols import Environment
from tba.types import Json, Judgement, deep_copy, quote


class EpisodeFailed(TbaError):
    """Raised for an environment that raised, or gave what cannot be used."""


@dataclass(frozen=True)
class Observation:
    """An environment's reply to a turn: a message of the user, or of the tools that the turn has called."""

    text: str
    results: tuple[tuple[str, str], ...] = ()  # by tool, in the order of the calls
    calls: tuple[str, ...] = ()  # the names that the policy gave its calls, in that order; empty: none


class Episode:
    """An environment that was made and reset; call `say` by turns, then `judgement`."""

    def __init__(self, make: Callable[[], Environment], fields: Mapping[str, Json], seed: int, turns: int) -> None:
        """`turns`: after so many turns it is over. Raises `EpisodeFailed`."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left, self._most = turns, turns
        self._earned = 0.0
        self._wrong = 0  # calls that could not be made
        self._answer: str | None = None
        self.over = False
        self._environment = self._called("its making", make)
        reset, name = self._method("reset"), type(self._environment).__name__
        if reset is None:
            raise UserError(f"{name} has no reset(): an environment needs reset, and step or tools")
        self._step, self._tools = self._method("step"), tools_of(self._environment)
        if self._step is None and not self._tools:
            raise UserError(f"{name} has no step() and no tools: give it a method step(self, text), or public methods")
        first = self._called("reset()", reset, **_accepted(reset, {**deep_copy(dict(fields)), "seed": seed}))
        self.first = self._text("reset()", first)  # what the policy is told first

    @property
    def tools(self) -> tuple[Json, ...]:
        """Returns its tools as JSON schemas."""
        return schemas_of(self._environment)

    def say(self, text: str) -> Observation | None:
        """Returns what the environment answers to one turn; None when it is over."""
        self._left -= 1
        told = self._stepped(self._step, text) if self._step is not None else self._acted(text)
        self.over = self.over or told is None or self._left <= 0
        return None if self.over else told

    def play_on(self, said: Sequence[str]) -> None:
        """Play turns that were played before, which did not end it. Raises `EpisodeFailed` when they do now."""
        for text in said:
            if self.say(text) is None:
                raise EpisodeFailed(
                    f"{type(self._environment).__name__} is over after turns that it went on after before: whatever it "
                    "draws has to be drawn from the argument `seed` of reset()"
                )

    def _stepped(self, step: Callable[..., Any], text: str) -> Observation | None:
        answer: Any = self._called("step()", step, text)
        if hasattr(answer, "done"):
            reward = getattr(answer, "reward", None)
            self._earned += 0.0 if reward is None else self._number("step()", reward)
            answer, self.over = getattr(answer, "observation", None), bool(answer.done)
        told = self._text("step()", answer)
        return None if told is None else Observation(told)

    def _acted(self, text: str) -> Observation | None:
        """Call the tools that a turn calls; one that calls none is the answer, and the last."""
        calls = calls_in(text)
        if not calls:
            self._answer = text
            return None
        results = tuple((call.name, self._result(call)) for call in calls)
        named = tuple(call.id for call in calls) if any(call.id for call in calls) else ()
        return Observation("\n".join(result for _, result in results), results, named)

    def _result(self, call: Call) -> str:
        """Returns what a tool gives; what is wrong with the call, or what the tool raises, is said to the policy."""
        try:
            given = bound(self._tools, call)
        except ValueError as error:
            self._wrong += 1
            return f"error: {error}"
        try:
            return written(self._awaited(self._tools[call.name](**given)))
        except MemoryError as error:
            raise _failed(f"{call.name}()", error) from error
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool raises what it likes
            return f"error: {type(error).__name__}: {error}"

    @property
    def turns(self) -> int:
        """Returns how many turns the environment was told."""
        return self._most - self._left

    def cut(self, text: str) -> None:
        """Tell a last turn that was cut off, if the environment is interested."""
        if (cut := self._method("cut")) is not None:
            self._called("cut()", cut, text)

    def judgement(self) -> Judgement:
        """Returns the reward of the episode as it stands, its turns, and how many of its calls could not be made."""
        reward = self._earned
        if (get_reward := self._method("get_reward")) is not None:
            given = _accepted(get_reward, {"answer": self._answer})
            reward = self._number("get_reward()", self._called("get_reward()", get_reward, **given))
        wrong = {"wrong_calls": float(self._wrong)} if self._tools else {}
        return Judgement(reward, {"turns": float(self.turns), **wrong})

    def close(self) -> None:
        """Let the environment go. An error in its `close()` changes nothing any more."""
        try:
            if (close := self._method("close")) is not None:
                self._called("close()", close)
        except EpisodeFailed:
            pass
        finally:
            if self._loop is not None:
                self._loop.close()

    def _method(self, name: str) -> Callable[..., Any] | None:
        found = getattr(self._environment, name, None)
        return found if callable(found) else None

    def _called(self, what: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            return self._awaited(call(*given, **named))
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise _failed(what, error) from error

    def _awaited(self, answer: Any) -> Any:
        if not inspect.isawaitable(answer):
            return answer
        self._loop = self._loop or asyncio.new_event_loop()  # one for all: what it opens belongs to its loop
        return self._loop.run_until_complete(_awaited(answer))

    def _text(self, what: str, answer: object) -> str | None:
        if answer is None or isinstance(answer, str):
            return answer
        raise EpisodeFailed(f"{what} of {type(self._environment).__name__} gave {answer!r:.80}: return a text or None")

    def _number(self, what: str, answer: object) -> float:
        if isinstance(answer, int | float) and math.isfinite(answer):
            return float(answer)
        raise EpisodeFailed(
            f"{what} of {type(self._environment).__name__} gave the reward {answer!r:.80}: return a number"
        )


def begun(make: Callable[[], Environment], fields: Mapping[str, Json], seed: int, turns: int, prompt: str) -> Episode:
    """Returns an episode that the prompt's text belongs to. Raises `UserError` where `reset` says something else than
    when the prompt was made.
    """
    episode = Episode(make, fields, seed, turns)
    if episode.first is not None and episode.first.strip() not in prompt:
        raise UserError(
            f"reset() said {quote(episode.first)} for seed {seed}, and something else when the prompt was made: "
            "whatever it draws has to be drawn from its argument `seed`"
        )
    return episode


def _failed(what: str, error: BaseException) -> EpisodeFailed:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return EpisodeFailed(
        f"{what} raised {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}: {frame.line})"
    )


async def _awaited(answer: Any) -> Any:
    return await answer


def _accepted(call: Callable[..., Any], given: Mapping[str, Json]) -> dict[str, Json]:
    """Returns those arguments that a function declares; all where it takes any."""
    declared = inspect.signature(call).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in declared):
        return dict(given)
    return {p.name: given[p.name] for p in declared if p.name in given}
