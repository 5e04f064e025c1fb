"""Environments as a task: one problem per seed, graded by the environment itself.

Invariant: a seed is one world and one prompt. Training and evaluation share no seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tba.environments.episode import Episode, EpisodeFailed
from tba.environments.hosts import EpisodeLimits
from tba.errors import UserError
from tba.fields import as_declared
from tba.protocols import Environment
from tba.types import Completion, Judgement, Message, Problem, Prompt, Split

HELD_OUT = 1 << 30  # the first seed of evaluation


# What a scripted player says next: (what it was told so far, in order; a generator of its own) -> its turn.
Player: TypeAlias = Callable[[list[str], random.Random], str]


@dataclass(frozen=True)
@as_declared
class EnvironmentTask:
    """Problems that are answered by acting in an environment, in several turns."""

    environment: Callable[[], Environment]  # makes the environment of one episode: its class, for example
    name: str = "environment"  # part of each prompt's key
    prompt: str | tuple[Message, ...] = ""  # what the policy is told first; the text that reset() returns follows
    turns: int = 8  # turns of an episode at most
    worlds: int = 1000  # seeds for training
    held_out: int = 200  # other seeds, for evaluation
    player: Player | None = None  # plays the demonstrations for a warm start; None: there are none
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)

    def __post_init__(self) -> None:
        for name in ("turns", "worlds", "held_out"):
            if getattr(self, name) < 1:
                raise UserError(f"the environment task's {name} is {getattr(self, name)}, it must be at least 1")

    def problems(self, split: Split) -> list[Problem]:
        """Returns one problem for each seed. Raises `UserError` when an environment fails at once."""
        first_seed, count = (0, self.worlds) if split == "train" else (HELD_OUT, self.held_out)
        try:
            return [self._problem(seed, split == "train") for seed in range(first_seed, first_seed + count)]
        except EpisodeFailed as error:
            raise UserError(f"the environment of task {self.name} fails: {error}") from error

    def reward(self) -> EnvironmentReward:
        return EnvironmentReward()

    def _problem(self, seed: int, is_training: bool) -> Problem:
        episode = Episode(self.environment, {}, seed, self.turns)
        opening = "" if episode.opening is None else episode.opening
        demonstration = self._play_demonstration(episode, seed) if is_training and self.player is not None else None
        episode.close()
        prompt = _append_text(self.prompt, opening)
        if not prompt:
            raise UserError(f"task {self.name} has no prompt, and its reset() says nothing: give one of them a text")
        return Problem(prompt, {}, demonstration, seed, episode.tools)

    def _play_demonstration(self, episode: Episode, seed: int) -> tuple[str, ...]:
        """Returns the player's turns in an episode, which it plays to its end."""
        assert self.player is not None
        rng = random.Random(f"player {seed}")  # noqa: S311 - its dice; the world's own, often Random(seed), would tell
        observations = [] if episode.opening is None else [episode.opening]
        turns = []
        while not episode.is_over:
            turns.append(self.player(observations, rng))
            observation = episode.say(turns[-1])
            observations += [] if observation is None else [observation.text]
        episode.judgement()  # one that fails is found before the run
        return tuple(turns)


def _append_text(prompt: str | tuple[Message, ...], text: str) -> str | tuple[Message, ...]:
    """Returns a prompt with the text of `reset` at its end; in a chat at the end of its last message."""
    if isinstance(prompt, str):
        return prompt + text
    return (*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + text})


@dataclass(frozen=True)
class EnvironmentReward:
    """Gives an episode the reward that its environment gave it."""

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Returns one judgement for each (prompt, completion), in order. Raises `UserError` for one that was never
        acted.
        """
        judgements = [completion.judgement for _, completion in answered]
        if None in judgements:
            raise UserError(
                "an answer to a problem of an environment is graded by acting, and this one was never acted: let an "
                "EpisodeEngine play it"
            )
        return [judgement for judgement in judgements if judgement is not None]
