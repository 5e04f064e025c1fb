"""The prompts of a split, as a recipe's settings encode them, and what is left out of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tba.errors import UserError
from tba.protocols import Model, Selective
from tba.recipe import Recipe
from tba.rollout.prompts import EncodedPrompts, encode
from tba.types import Prompt, Split
from tba.user_code import problems_of

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
