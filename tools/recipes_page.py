"""Writes docs/recipes.md: every recipe that comes with the package, by its own description and docstring.

    python tools/recipes_page.py

Invariant: everything on the page is read from the recipes, so the page cannot say anything that they do not.
"""

from __future__ import annotations

import re
from pathlib import Path

from tba.models.huggingface import HuggingFace
from tba.recipe import Recipe
from tba.settings import find, module_of
from tba.shipped import description_of, names

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
HEAD = """\
# Recipes

This page is made from the code by `python tools/recipes_page.py`; a test keeps it up to date. `tba train NAME` runs a
recipe, `tba check NAME` says beforehand what it takes, `tba train NAME --help` lists its settings. Your own recipe is a
file like these ([your_task.md](your_task.md)). *B x K*: prompts times answers in a batch.

| recipe | what | model | B x K | steps |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = [row(name, find(name)) for name in names()]
    return HEAD + "\n".join([*rows, "", *(entry(name) for name in names())])


def row(name: str, recipe: Recipe) -> str:
    """The recipe's line in the table."""
    model = recipe.model
    named = model.path if isinstance(model, HuggingFace) else ""
    own = "its own warm start" if isinstance(model, HuggingFace) and model.warm_start else "yours: `--model.path`"
    path = f"`{named}`" if named else own
    if Path(named).is_absolute():
        path = "shipped"  # in the package, wherever that is
    batch = f"{recipe.groups_per_step}x{recipe.group_size}"
    return f"| [{name}](#{name}) | {description_of(name)} | {path} | {batch} | {recipe.steps:,} |"


def entry(name: str) -> str:
    """A heading and the docstring: prose as it is, what is indented as it stands."""
    blocks = (module_of(name, "recipe").__doc__ or "").strip().split("\n\n")
    return f"## {name}\n\n" + "\n\n".join(linked(block) for block in blocks) + "\n"


def linked(block: str) -> str:
    """A block of a docstring, in which the pages that it names are links; columns made by spaces become clauses."""
    return (
        block
        if block.startswith("    ")
        else re.sub(r"docs/(\w+\.md)", r"[\1](\1)", re.sub(" {2,}(?=[`(])", ": ", block))
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
