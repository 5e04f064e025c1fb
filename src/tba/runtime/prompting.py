"""A recipe's prompts: those of a split, and the order in which a searcher answers them."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import FunctionType

import numpy as np

from tba.errors import UserError
from tba.protocols import Journal, PromptSource, Reward, Task, Tokenizer
from tba.recipe import Recipe
from tba.search.prompts import PosteriorPrompts, PromptStream, UniformPrompts, encode
from tba.types import Problem, Prompt, Split

# a prompt not answered by then is handed out again; this is longer than a round of long answers takes
LEASE_SECONDS = 1800.0

log = logging.getLogger("tba.searcher")


def prompts_of(recipe: Recipe, tokenizer: Tokenizer, split: Split) -> list[Prompt]:
    """Returns the prompts of a split, as the recipe's settings encode them."""
    problems = problems_of(recipe.task, split)
    limit = recipe.prompts.limit if split == "train" else recipe.evaluation.problems or None
    settings = recipe.prompts if split == "train" else replace(recipe.prompts, limit=None)
    encoded = encode(problems[:limit] if limit else problems, recipe.task.name, tokenizer, settings)
    if encoded.dropped or encoded.truncated:
        log.warning(
            "%s prompts of %s: %d longer than %d tokens were dropped, %d truncated",
            split, recipe.task.name, encoded.dropped, recipe.prompts.max_tokens, encoded.truncated,
        )  # fmt: skip
    return encoded.prompts


def problems_of(task: Task, split: Split) -> Sequence[Problem]:
    """Returns a task's problems. Raises `UserError` when there are none, or when they are something else."""
    try:
        found: object = task.problems(split)
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise UserError(f"problems({split!r}) of task {task.name} gave {found!r:.80}: return a list of tba.Problem")
        problems = found if isinstance(found, list | tuple) else list(found)
    except UserError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"problems({split!r}) of task {task.name} failed: {type(error).__name__}: {error} "
            f"({frame.filename}, line {frame.lineno}: {frame.line})"
        ) from error
    for number, problem in enumerate(problems):
        if not isinstance(problem, Problem):
            raise UserError(
                f"problem {number} of problems({split!r}) of task {task.name} is {problem!r:.80}: make each a "
                "tba.Problem(prompt, fields)"
            )
    if not problems:
        raise UserError(f"task {task.name} has no problems for {split!r}: return some from problems({split!r})")
    return problems


def reward_of(task: Task) -> Reward:
    """Returns a task's reward. Raises `UserError` when it is none, such as the plain function itself."""
    reward: object = task.reward()
    if not isinstance(reward, Reward):
        what = f"the function {reward.__name__!r}" if isinstance(reward, FunctionType) else f"{reward!r:.80}"
        raise UserError(
            f"reward() of task {task.name} gave {what}, which has no judge(): for a plain function return "
            "tba.WeightedFunctions(((function, 1.0),))"
        )
    return reward


def prompt_source(recipe: Recipe, prompts: list[Prompt], journal: Journal, rng: np.random.Generator) -> PromptSource:
    """Returns the prompts in the order that the recipe wants.

    Raises `UserError` when there are too few to choose from.
    """
    seconds, selection = LEASE_SECONDS, recipe.prompts.selection
    if selection == "epochs":
        return PromptStream(prompts, recipe.seed, lambda count: journal.lease(count, seconds))
    at_once = recipe.searchers * recipe.prompts_per_round
    if at_once > len(prompts):
        raise UserError(
            f"--prompts.selection is {selection}, but {recipe.searchers} searchers answer {at_once} different prompts "
            f"at once, and there are {len(prompts)}: give fewer --prompts-per-round, or epochs"
        )

    def lease(order: Sequence[int], count: int) -> list[int]:
        return journal.lease_first(order, count, seconds)

    if selection == "uniform":
        return UniformPrompts(prompts, rng, lease)
    return PosteriorPrompts(prompts, rng, lease, journal.outcomes, recipe.prompts.posterior)
