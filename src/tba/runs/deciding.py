"""Decides what a recipe leaves open, before there is a run that would fail without it: weights, precision, workers.

Invariant: it is decided once, also for parts on other machines or that join later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TypeAlias

from tba.chat_prompts import writes_day
from tba.protocols import HasChatTemplate, HasDtype, Model, path_of
from tba.recipe import Recipe
from tba.runtime.sizing import Machine, places_on, refuse_what_cannot_fit, sized, unused
from tba.runtime.teaching import require_scorers, scorers_of
from tba.settings import override, with_fields, words_of

Say: TypeAlias = Callable[[str], None]  # is told a line for people
_PACKAGE = Path(__file__).parents[1]


def with_weights(recipe: Recipe, overrides: list[str], say: Say, day: str = "") -> tuple[Recipe, list[str]]:
    """Returns the recipe and its overrides, which name the weights and their precision: every part has the same.

    Weights that come with the package are not named, so that a run can be resumed where the package is elsewhere. A
    dtype of `auto` is what it is on this machine: a searcher on another device would score in another precision. Where
    a chat template writes what day it is, that is named too: `day`, or today. `say` is called when a warm start is made
    now. Raises `UserError` for a missing file or model.
    """
    prepared = recipe.model.prepared(recipe.task, say)
    prepared.tokenizer()  # which says what is wrong with a model
    require_scorers(recipe, prepared, say)
    found = path_of(prepared)
    shipped = Path(found).is_relative_to(_PACKAGE)
    decided = []
    if found and not shipped and not path_of(recipe.model):
        decided.append(("--model.path", found))
    if isinstance(recipe.model, HasDtype) and recipe.model.dtype == "auto":
        decided.append(("--model.dtype", str(recipe.model.compute).removeprefix("torch.")))
    if isinstance(recipe.model, HasChatTemplate) and not recipe.model.day and _writes_day(recipe, prepared):
        decided.append(("--model.day", day or date.today().isoformat()))
    words = [word for flag, value in decided for word in words_of(flag, value)]
    return with_fields(recipe, decided), [*overrides, *words]


def _writes_day(recipe: Recipe, prepared: Model) -> bool:
    """Returns whether the chat template of some model of the recipe writes what day it is."""
    models = (prepared, *scorers_of(recipe, prepared).values())
    return any(writes_day(model.tokenizer()) for model in models)


def with_sizes(recipe: Recipe, overrides: list[str], say: Say) -> tuple[Recipe, list[str]]:
    """Returns the recipe and its overrides, with as many ranks and searchers as this machine's GPUs are for, where the
    recipe leaves that open. Raises `UserError` where it cannot fit; nothing has been loaded yet.
    """
    machine, prepared = Machine.here(), replace(recipe, model=recipe.model.prepared(recipe.task))
    decided = sized(prepared, machine)
    sized_too = override(prepared, decided, "tba train", recorded=True)
    refuse_what_cannot_fit(sized_too, machine)
    if decided:
        places = ", ".join(f"{worker} on {place}" for worker, place in places_on(sized_too, machine).items())
        say(f"where it runs: {places}")
    if (idle := unused(sized_too, machine)) is not None:
        say(f"note: {idle}")
    return override(recipe, decided, "tba train", recorded=True), [*overrides, *decided]
