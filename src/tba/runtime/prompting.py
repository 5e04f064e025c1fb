"""A recipe's prompts: those of a split, and the order in which a searcher answers them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType

import numpy as np

from tba.clock import ShareClock
from tba.environments.engine import EpisodeEngine
from tba.environments.hosts import CAN_FORK, EpisodeLimits, Hosts, InProcessHost
from tba.environments.turn_encoding import TurnEncoder
from tba.errors import UserError
from tba.grading import RETRIES, Grader
from tba.protocols import (
    Acted,
    Engine,
    Examined,
    Journal,
    LimitsEpisodes,
    Model,
    PromptSource,
    Reference,
    Reward,
    ScoredByCalls,
    Selective,
    Task,
    Tokenizer,
)
from tba.recipe import Recipe
from tba.rollout.prompts import EncodedPrompts, PosteriorPrompts, PromptStream, UniformPrompts, encode
from tba.rollout.vine import VineRollouts
from tba.runtime.isolation import RecipeSource, isolated_reward
from tba.runtime.run_directory import RunDirectory
from tba.types import Prompt, Split, Version
from tba.user_code import problems_of, user_code_error

# a prompt not answered by then is handed out again; this is longer than long answers and their grades take
LEASE_SECONDS = 7200.0

log = logging.getLogger("tba.searcher")


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a split, and what became of its other problems."""

    prompts: list[Prompt]
    counts: Mapping[str, int]  # problems, prompts, and those that were left out or cut, by the reason
    note: str  # a sentence about what is left out or cut; empty where nothing is


def prompts_of(recipe: Recipe, model: Model, split: Split) -> list[Prompt]:
    """Returns the prompts of a split, as the recipe's settings encode them; the log says what is left out."""
    prompts = prompt_set_of(recipe, model, split)
    if prompts.note:
        log.warning("%s", prompts.note)
    return prompts.prompts


def prompt_set_of(recipe: Recipe, model: Model, split: Split) -> PromptSet:
    """Returns the prompts of a split with what is left out.

    Raises `UserError` where the model has no room for a prompt beside an answer.
    """
    problems = problems_of(recipe.task, split)
    limit = recipe.prompts.limit if split == "train" else recipe.evaluation.problems or None
    problems, settings = problems[:limit] if limit else problems, replace(recipe.prompts, limit=None)
    encoding = encode(problems, recipe.task.name, model.tokenizer(), settings, _room(model))
    exclusions = recipe.task.left_out() if split == "train" and isinstance(recipe.task, Selective) else {}
    counts = {"problems": len(problems), "prompts": len(encoding.prompts)} | {
        reason: count
        for reason, count in {
            "too_long": encoding.dropped,
            "no_room": encoding.no_room,
            "truncated": encoding.truncated,
            **exclusions,
        }.items()
        if count
    }
    note = _exclusion_note(recipe, model, split, len(problems), encoding, exclusions)
    return PromptSet(encoding.prompts, counts, note)


def _room(model: Model) -> int | None:
    """Returns the tokens of a prompt for which a model has positions beside the longest answer; None: no limit."""
    if model.positions is None:
        return None
    room = model.positions - model.max_completion_tokens
    if room < 1:
        raise UserError(
            f"the model has {model.positions:,} positions for a prompt and its answer, and none are left by "
            f"--model.generation.max-completion-tokens {model.max_completion_tokens}: lower it, so that the two fit, "
            "or take another model"
        )
    return room


def _exclusion_note(
    recipe: Recipe, model: Model, split: Split, problems: int, encoding: EncodedPrompts, exclusions: Mapping[str, int]
) -> str:
    """Returns the sentence about what is left out or cut of a split; empty where nothing is."""
    kind, max_tokens = "training" if split == "train" else "held-out", recipe.prompts.max_tokens
    lost_count, excluded_count, reasons = problems - len(encoding.prompts), sum(exclusions.values()), list[str]()
    longest = f"the longest has {encoding.longest:,}"
    if encoding.dropped:
        reasons.append(f"{encoding.dropped:,} have more than --prompts.max-tokens {max_tokens:,} tokens ({longest})")
    if encoding.no_room:
        reasons.append(
            f"{encoding.no_room:,} leave less than --model.generation.max-completion-tokens "
            f"{model.max_completion_tokens:,} of the model's {model.positions or 0:,} positions ({longest} tokens)"
        )
    notes = []
    if lost_count:
        alarm = "MOST OF THE DATA ARE NOT USED: " if lost_count > problems / 2 else ""
        notes.append(
            f"{alarm}{lost_count:,} of {problems:,} {kind} problems are left out, {len(encoding.prompts):,} are asked: "
            f"{', '.join(reasons)}"
        )
    if encoding.truncated:
        notes.append(f"{encoding.truncated:,} of {problems:,} {kind} prompts lose their beginnings ({longest} tokens)")
    if excluded_count > problems:
        notes.append(
            f"MOST OF THE DATA ARE NOT USED: beside the {problems:,} training problems "
            + ", ".join(f"{count:,} are left out: {reason}" for reason, count in exclusions.items() if count)
        )
    return "; ".join(notes)


def reward_of(task: Task) -> Reward:
    """Returns a task's reward. Raises `UserError` when it is none, such as the plain function itself."""
    try:
        reward: object = task.reward()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise user_code_error(f"reward() of task {task.name}", error) from error
    if isinstance(reward, type) or not isinstance(reward, Reward):
        description = f"the function {reward.__name__!r}" if isinstance(reward, FunctionType) else f"{reward!r:.80}"
        raise UserError(
            f"reward() of task {task.name} gave {description}, which has no judge(): for a plain function return "
            "tba.WeightedFunctions(((function, 1.0),))"
        )
    return reward


def grader_of(
    recipe: Recipe,
    source: RunDirectory | RecipeSource | None,
    split: Split = "train",
    *,
    retries: int = RETRIES,
    share: tuple[int, int] = (0, 1),
    report: Callable[[str], None] = lambda message: None,
    teachers: Sequence[Reference] = (),
) -> Grader:
    """Returns the grader that all commands and runs use for a task's reward.

    source: what rebuilds the recipe in another process, should the reward have to run there. split: `eval` takes the
    reward that evaluates, where the task has another one for that. teachers: those that are servers score the answers
    beside it. The rest is as `Grader` has it.
    """
    task, deadline = recipe.task, recipe.run.reward_deadline
    reward = task.examination() if split == "eval" and isinstance(task, Examined) else reward_of(task)
    isolate = isolated_reward(source, deadline, split, f"the reward of task {task.name}")
    scorers = [teacher.scoring for teacher in teachers if isinstance(teacher, ScoredByCalls)]
    return Grader(reward, deadline, retries, share, report, isolate, scorers=scorers)


def engine_of(recipe: Recipe, model: Model, version: Version, clock: ShareClock | None = None) -> Engine:
    """Returns the engine of a recipe's model; where the task is acted in environments, one whose answers are episodes.

    clock: counts the time that the engine waits for environments as theirs.
    """
    task, longest_prompt = recipe.task, recipe.prompts.max_tokens
    longest_prompt += recipe.model.max_completion_tokens if recipe.vine else 0  # answers begun are prompts there
    if not isinstance(task, Acted):
        return model.engine(version, longest_prompt)
    worlds = worlds_of(task, inline=recipe.runtime == "inline")  # before there is a model whose memory it would share
    engine = model.engine(version, longest_prompt)
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


def prompt_source(recipe: Recipe, prompts: list[Prompt], journal: Journal, rng: np.random.Generator) -> PromptSource:
    """Returns the source of prompts in the order that the recipe wants.

    Raises `UserError` when there are too few to choose from.
    """
    seconds, selection = LEASE_SECONDS, recipe.prompts.selection
    if selection == "epochs":
        return PromptStream(prompts, recipe.seed, lambda count: journal.lease(count, seconds))
    at_once = recipe.searcher_count * recipe.prompts_per_round
    if at_once > len(prompts):
        raise UserError(
            f"--prompts.selection is {selection}, but {recipe.searcher_count} searchers answer {at_once} different "
            f"prompts at once, and there are {len(prompts)}: give fewer --prompts-per-round, or epochs"
        )

    def lease(order: Sequence[int], count: int) -> list[int]:
        return journal.lease_first(order, count, seconds)

    if selection == "uniform":
        return UniformPrompts(prompts, rng, lease)
    return PosteriorPrompts(prompts, rng, lease, journal.outcomes, recipe.prompts.posterior)
