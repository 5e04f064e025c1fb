"""Finds or makes a recipe's weights, before there is a run that would fail without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tba.recipe import Recipe
from tba.runtime.prompting import prompts_of
from tba.settings import find, override

_PACKAGE = Path(__file__).parents[1]


def with_weights(
    recipe: Recipe, name: str, overrides: list[str], say: Callable[[str], None]
) -> tuple[Recipe, list[str]]:
    """Returns the recipe and its overrides, which name the weights, so that every part finds the same.

    Weights that come with the package are not named, so that a run can be resumed where the package is elsewhere.
    `say` is called when a warm start is made now. Raises `UserError` for a missing file or model.
    """
    prepared = recipe.model.prepared(recipe.task, say)
    prompts_of(recipe, prepared.tokenizer(), "eval")
    found = getattr(prepared, "path", "")
    shipped = Path(found).is_relative_to(_PACKAGE)
    if found and not shipped and not getattr(recipe.model, "path", ""):
        overrides = [*overrides, "--model.path", found]
        recipe = override(find(name), overrides, f"tba train {name}", recorded=True)
    return recipe, overrides
