"""The engine of a recipe's model: for a task of environments its answers are episodes, which hosts play."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from tba.clock import ShareClock
from tba.environments.engine import EpisodeEngine
from tba.environments.hosts import CAN_FORK, EpisodeLimits, Hosts, InProcessHost
from tba.environments.turn_encoding import TurnEncoder
from tba.protocols import Acted, Engine, LimitsEpisodes, Model, Reward, Task, Tokenizer
from tba.recipe import Recipe
from tba.rollout.vine import VineRollouts
from tba.runtime.needs import longest_prompt
from tba.types import Version
from tba.user_code import problems_of

log = logging.getLogger("tba.searcher")


def engine_of(recipe: Recipe, model: Model, version: Version, clock: ShareClock | None = None) -> Engine:
    """Returns the engine of a recipe's model; where the task is acted in environments, one whose answers are episodes.

    clock: counts the time that the engine waits for environments as theirs.
    """
    task, prompt_tokens = recipe.task, longest_prompt(recipe)
    if not isinstance(task, Acted):
        return model.engine(version, prompt_tokens)
    worlds = worlds_of(task, inline=recipe.runtime == "inline")  # before there is a model whose memory it would share
    engine = model.engine(version, prompt_tokens)
    pause_clock = nullcontext if clock is None else partial(_environment_state, clock)
    return EpisodeEngine(engine, task, turn_encoder_of(recipe.task, model.tokenizer()), worlds, pause_clock)


def vine_of(recipe: Recipe, model: Model, engine: Engine, reward: Reward) -> VineRollouts | None:
    """Returns the estimator of the values of an answer's steps, if the recipe has one; an episode's steps are turns."""
    if recipe.vine is None:
        return None
    texts = engine.turn_encoder.turn_text if isinstance(engine, EpisodeEngine) else None
    return recipe.vine.start(engine, reward, model.tokenizer(), recipe.largest_reward, texts is not None, texts)


def _environment_state(clock: ShareClock) -> AbstractContextManager[None]:
    return clock.state("eval" if clock.current_state == "eval" else "environment")


def worlds_of(task: Acted, inline: bool) -> InProcessHost | Hosts:
    """Returns the place where a task's episodes are played. inline: this process, so that a run is repeatable."""
    limits = (task.limits if isinstance(task, LimitsEpisodes) else None) or EpisodeLimits()
    if inline or not limits.processes:
        return InProcessHost(task)
    if not CAN_FORK:
        log.warning("environments are played in the searcher's process, without limits: only Linux can fork safely")
        return InProcessHost(task)
    return Hosts(task, limits)


def turn_encoder_of(task: Task, tokenizer: Tokenizer) -> TurnEncoder:
    """Returns the writer of what an environment says, in the form that a model reads."""
    first_problem = problems_of(task, "train")[0]
    return TurnEncoder(tokenizer, not isinstance(first_problem.prompt, str), first_problem.tools)
