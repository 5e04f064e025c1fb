"""Finds or makes a recipe's weights, before there is a run that would fail without them.

Invariant: which weights, and in which precision, is decided once, also for parts on other machines or that join later.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tba.recipe import Recipe
from tba.runtime.teaching import require_scorers
from tba.settings import override

_PACKAGE = Path(__file__).parents[1]


def with_weights(
    recipe: Recipe, name: str, overrides: list[str], say: Callable[[str], None]
) -> tuple[Recipe, list[str]]:
    """Returns the recipe and its overrides, which name the weights and their precision: every part has the same.

    Weights that come with the package are not named, so that a run can be resumed where the package is elsewhere. A
    dtype of `auto` is what it is on this machine: a searcher on another device would score in another precision.
    `say` is called when a warm start is made now. Raises `UserError` for a missing file or model.
    """
    prepared = recipe.model.prepared(recipe.task, say)
    prepared.tokenizer()  # which says what is wrong with a model
    require_scorers(recipe, prepared, say)
    found = getattr(prepared, "path", "")
    shipped = Path(found).is_relative_to(_PACKAGE)
    decided = []
    if found and not shipped and not getattr(recipe.model, "path", ""):
        decided += ["--model.path", found]
    if getattr(recipe.model, "dtype", None) == "auto":
        decided += ["--model.dtype", str(recipe.model.compute).removeprefix("torch.")]
    if decided:
        recipe = override(recipe, decided, f"tba train {name}", recorded=True)
    return recipe, [*overrides, *decided]
