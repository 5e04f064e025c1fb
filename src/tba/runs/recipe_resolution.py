"""Decides what a recipe leaves open, before there is a run that would fail without it: device, weights, precision,
workers.

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
from tba.runs.validating import require_ray
from tba.runtime.cluster.placement import address_of
from tba.runtime.hardware import ClusterNodes, Hardware, Machine
from tba.runtime.sizing import (
    device_flags,
    place_descriptions,
    refuse_what_cannot_fit,
    sizing_flags,
    unknown_gpus,
    unused_gpus,
)
from tba.runtime.teaching import require_scorers, scorers_of
from tba.settings import override, with_fields, words_of

Say: TypeAlias = Callable[[str], None]  # is told a line for people
_PACKAGE = Path(__file__).parents[1]


def hardware_of(recipe: Recipe) -> Hardware:
    """Returns the hardware of a recipe's run. Raises `UserError` where its cluster cannot be reached."""
    if recipe.runtime != "cluster":
        return Machine.here()
    if described_nodes := recipe.cluster.described_nodes():
        return ClusterNodes(tuple(Machine(gpus=(int(gb * 1e9),) * gpus) for gpus, gb in described_nodes))
    if (address := address_of(recipe)) is None:  # a cluster of its own
        return Machine.here()
    require_ray()
    from tba.runtime.cluster.machines import machines_at

    return ClusterNodes(machines_at(address))


def with_device(recipe: Recipe, overrides: list[str], hardware: Hardware) -> tuple[Recipe, list[str]]:
    """Returns the recipe and its overrides, with the device of the cluster's nodes where this machine has none."""
    decisions = device_flags(recipe, hardware)
    return override(recipe, decisions, "tba train", recorded=True), [*overrides, *decisions]


def with_weights(recipe: Recipe, overrides: list[str], say: Say, day: str = "") -> tuple[Recipe, list[str]]:
    """Returns the recipe and its overrides, which name the weights and their precision: every part has the same.

    Weights that come with the package are not named, so that a run can be resumed where the package is elsewhere. A
    dtype of `auto` is what it is on this machine: a searcher on another device would score in another precision. Where
    a chat template writes what day it is, that is named too: `day`, or today. `say` is called when a warm start is made
    now. Raises `UserError` for a missing file or model.
    """
    prepared_model = recipe.model.prepared(recipe.task, say)
    prepared_model.tokenizer()  # which says what is wrong with a model
    require_scorers(recipe, prepared_model, say)
    path = path_of(prepared_model)
    is_packaged = Path(path).is_relative_to(_PACKAGE)
    decisions = []
    if path and not is_packaged and not path_of(recipe.model):
        decisions.append(("--model.path", path))
    if isinstance(recipe.model, HasDtype) and recipe.model.dtype == "auto":
        decisions.append(("--model.dtype", str(recipe.model.compute).removeprefix("torch.")))
    if isinstance(recipe.model, HasChatTemplate) and not recipe.model.day and _writes_day(recipe, prepared_model):
        decisions.append(("--model.day", day or date.today().isoformat()))
    words = [word for flag, value in decisions for word in words_of(flag, value)]
    return with_fields(recipe, decisions), [*overrides, *words]


def _writes_day(recipe: Recipe, prepared_model: Model) -> bool:
    """Returns whether the chat template of some model of the recipe writes what day it is."""
    models = (prepared_model, *scorers_of(recipe, prepared_model).values())
    return any(writes_day(model.tokenizer()) for model in models)


def with_sizes(recipe: Recipe, overrides: list[str], hardware: Hardware, say: Say) -> tuple[Recipe, list[str]]:
    """Returns the recipe and its overrides, with as many ranks and searchers as the GPUs are for, where the recipe
    leaves that open. Raises `UserError` where it cannot fit; nothing has been loaded yet.
    """
    prepared_recipe = replace(recipe, model=recipe.model.prepared(recipe.task))
    decisions = sizing_flags(prepared_recipe, hardware)
    sized_recipe = override(prepared_recipe, decisions, "tba train", recorded=True)
    refuse_what_cannot_fit(sized_recipe, hardware)
    if decisions and (descriptions := place_descriptions(sized_recipe, hardware)):
        mark, separator = (": ", "; ") if recipe.runtime == "cluster" else (" on ", ", ")
        say(f"where it runs: {separator.join(map(mark.join, descriptions.items()))}")
    for note in filter(None, (unused_gpus(sized_recipe, hardware), unknown_gpus(sized_recipe, hardware))):
        say(f"note: {note}")
    return override(recipe, decisions, "tba train", recorded=True), [*overrides, *decisions]
