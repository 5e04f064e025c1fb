"""The order in which a searcher answers its prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tba.errors import UserError
from tba.protocols import Journal, PromptSource
from tba.recipe import Recipe
from tba.rollout.prompts import PosteriorPrompts, PromptStream, UniformPrompts
from tba.types import Prompt

# a prompt not answered by then is handed out again; this is longer than long answers and their grades take
LEASE_SECONDS = 7200.0


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
