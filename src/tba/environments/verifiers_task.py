"""Tasksets of `verifiers` (its interface `verifiers.v1`, an optional package) as a task, unchanged.

Invariant: their code plays the episode and gives the reward, in a child process with limits of time and memory
(`verifiers_process.py`), which is all that imports them. What passes between are texts: the tokens stay with the
engine, so that what is trained is what was sampled.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tba.environments.hosts import EpisodeLimits
from tba.environments.task import EnvironmentReward
from tba.errors import UserError
from tba.fields import as_declared
from tba.rewards.children import Children
from tba.types import Json, Problem, Split

_SERIES = "0.4"  # the versions of the package whose interface is spoken
_START_SECONDS = 600.0  # that the process may take to load a taskset and its data
_GRACE = 5.0  # seconds that the process has to answer for itself that something took too long


@dataclass(frozen=True)
@as_declared
class VerifiersTask:
    """Tasks of one taskset of `verifiers`, played by one agent without tools; its first tasks are held out."""

    taskset: str  # the id of an installed taskset, e.g. textarena
    parameters: str = "{}"  # the taskset's own settings as a JSON object, e.g. '{"game": "Hangman-v0"}'
    turns: int = 8  # turns of an episode at most
    train_problems: int = 1000  # tasks for training, those after the held-out ones; fewer where there are fewer
    eval_problems: int = 100  # the first tasks of the taskset, for evaluation
    seconds: float = 60.0  # that the environment may take for one answer, or for the reward

    def __post_init__(self) -> None:
        for field in ("turns", "train_problems", "eval_problems", "seconds"):
            if not getattr(self, field) >= 1:
                raise UserError(f"the task {self.name}'s {field} is {getattr(self, field)}, it must be at least 1")
        try:
            settings = json.loads(self.parameters)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.name} has parameters {self.parameters!r}, which are not JSON: {error}") from error
        if not isinstance(settings, dict) or "id" in settings:
            raise UserError(f"{self.name} has parameters {self.parameters!r}: give a JSON object without an id")

    @property
    def name(self) -> str:
        return f"verifiers/{self.taskset}"

    @property
    def limits(self) -> EpisodeLimits:
        """Returns limits without processes: the process that loads the taskset plays all, within its own."""
        return EpisodeLimits(processes=0)

    @property
    def environment(self) -> Callable[[], VerifiersEpisode]:
        """Returns a function that makes the environment of one episode."""
        return functools.partial(VerifiersEpisode, self)

    def problems(self, split: Split) -> list[Problem]:
        """Returns each task as its agent is first asked; the seed is its place in the taskset. Raises `UserError` when
        the package is missing, or the taskset cannot be played here.
        """
        _require_version()
        held_out_tasks = self._tasks(0, self.eval_problems)
        if split == "eval":
            return [_problem(task) for task in held_out_tasks]
        held_out_contents = {task["content"] for task in held_out_tasks}
        training_tasks = self._tasks(self.eval_problems, self.train_problems)
        training_tasks = [task for task in training_tasks if task["content"] not in held_out_contents]
        if not training_tasks:
            raise UserError(
                f"{self.name} has {len(held_out_tasks)} tasks, of which none is left for training: lower eval_problems"
            )
        self._play_one(training_tasks[0]["index"])
        return [_problem(task) for task in training_tasks]

    def reward(self) -> EnvironmentReward:
        return EnvironmentReward()

    def ask(self, *question: Json) -> Any:
        """Returns what the process of this task answers. Raises `UserError` when it refuses the taskset, and
        `RuntimeError` for an episode that has failed.
        """
        (answer,) = self._process().ask([list(question)])
        return _read_answer(self, answer)

    def _tasks(self, first_index: int, count: int) -> list[dict[str, Any]]:
        answers = self._process().ask([["task", index] for index in range(first_index, first_index + count)])
        try:
            tasks = [_read_answer(self, answer) for answer in answers]
        except RuntimeError as error:
            raise UserError(f"{self.name} cannot give its tasks: {error}") from error
        return [task for task in tasks if task]

    def _play_one(self, index: int) -> None:
        """Begin an episode, so that what cannot be played is refused before the run."""
        episode = VerifiersEpisode(self)
        try:
            episode.reset(index)
        except RuntimeError as error:
            raise UserError(f"{self.name} cannot be played: {error}") from error
        finally:
            episode.close()

    def _process(self) -> Children:
        return _process(self.taskset, self.parameters, self.turns, self.seconds, os.getpid())


class VerifiersEpisode:
    """One episode of a taskset, in its process. The reward is the one that `verifiers` gives."""

    def __init__(self, task: VerifiersTask) -> None:
        self._task = task
        self._number = f"{os.getpid()}-{next(_numbers)}"

    def reset(self, seed: int) -> str:
        """Begin the task `seed`. Returns the last message that its agent is asked with."""
        return str(self._task.ask("begin", self._number, seed)["messages"][-1]["content"])

    def step(self, text: str) -> str | None:
        """Returns the message that is the answer to a turn; None when the episode is over."""
        answer: str | None = self._task.ask("say", self._number, text)["text"]
        return answer

    def cut(self, text: str) -> None:
        """Pass on the last turn, which was cut off."""
        self._task.ask("cut", self._number, text)

    def get_reward(self) -> float:
        """Returns the reward of the episode, which ends here if it has not."""
        return float(self._task.ask("judge", self._number)["reward"])

    def close(self) -> None:
        """End the episode in its process."""
        self._task.ask("end", self._number)


_numbers = itertools.count()


@functools.cache
def _process(taskset: str, parameters: str, turns: int, seconds: float, owner: int) -> Children:
    """Returns the pool of the one process that plays a taskset for process `owner`."""
    settings = json.dumps({"taskset": {"id": taskset, **json.loads(parameters)}, "turns": turns, "seconds": seconds})
    command = (sys.executable, "-m", "tba.environments.verifiers_process", settings)
    return Children(command, 1, seconds + _GRACE, start_seconds=_START_SECONDS)


def _read_answer(task: VerifiersTask, answer: Any) -> Any:
    if answer is None:
        raise RuntimeError(f"its process has died, or was ended after {task.seconds + _GRACE:g} s")
    if "refused" in answer:
        raise UserError(f"{task.name} cannot be used: {answer['refused']}")
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    return answer["answer"]


def _problem(task: dict[str, Any]) -> Problem:
    return Problem(tuple(task["messages"]), seed=task["index"])


def _require_version() -> None:
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            "a taskset of verifiers needs the package verifiers: `pip install 'tba-rl[verifiers]'`"
        ) from error
    if not version.startswith(f"{_SERIES}."):
        raise UserError(
            f"verifiers {version} is installed, but its interface verifiers.v1 is spoken as in {_SERIES}: "
            f"`pip install 'verifiers=={_SERIES}.*'`"
        )
