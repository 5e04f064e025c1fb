"""Writes docs/recipes.md: every recipe that comes with the package, by its own description, commands and lists.

    python tools/recipes_page.py

Invariant: everything on the page is read from the recipes, so the page cannot say anything that they do not.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from tba.models.huggingface import HuggingFace
from tba.recipe import Recipe
from tba.recipe_names import description_of, recipe_names
from tba.settings import find, module_of

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
HEAD = """\
# Recipes

A recipe is a complete run: task, model, objective and settings. `tba train NAME` runs it, and `tba check NAME`
estimates its memory and time before. `tba train NAME --help` lists its settings, and
`python -c "help('tba.recipes.NAME')"` says what it is for. To write your own, start with [your task](your_task.md).
The laboratory describes `gsm8k` [at a laptop's size](../lab/gsm8k.md), and how [MATH is graded](../lab/math.md).

Recipes with a link need commands first, or differ from the paper; the sections below have both. *Batch* is prompts
times answers to each prompt. `python tools/recipes_page.py` makes this page from the code, and a test keeps it up to
date.

| recipe | what it trains | model | batch | steps |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = [row(name, find(name)) for name in recipe_names()]
    return HEAD + "\n".join([*rows, "", *(entry(name) for name in recipe_names() if details(name))])


def row(name: str, recipe: Recipe) -> str:
    """The recipe's line in the table."""
    model = recipe.model
    named = model.path if isinstance(model, HuggingFace) else ""
    own = "its own, shipped or made" if isinstance(model, HuggingFace) and model.warm_start else "yours: `--model.path`"
    path = f"`{named}`" if named else own
    if Path(named).is_absolute():
        path = "shipped"  # in the package, wherever that is
    batch = f"{recipe.groups_per_step}x{recipe.group_size}"
    said = f"[{name}](#{name})" if details(name) else name
    return f"| {said} | {description_of(name)} | {path} | {batch} | {recipe.steps:,} |"


def entry(name: str) -> str:
    """A heading, then what a docstring sets apart from its prose."""
    return f"## {name}\n\n" + "\n\n".join(details(name)) + "\n"


def details(name: str) -> list[str]:
    """The blocks of a recipe's docstring that are commands or lists, columns made by spaces as clauses."""
    blocks = (module_of(name).__doc__ or "").strip().split("\n\n")
    shown = []
    for before, block in itertools.pairwise(blocks):
        if block.startswith("    "):
            shown.append(block)
        elif block.startswith("- "):
            shown += [before, re.sub(" {2,}(?=[`(])", ": ", block)]
    return shown


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
