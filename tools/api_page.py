"""Writes docs/api.md: every public name of `import tba`, with its docstring, its fields and its methods.

    python tools/api_page.py

Invariant: everything on the page is read from the code, so the page cannot say anything that the code does not. The
names are those of `tba.__all__`; a class's fields are explained by the comments behind them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import tba
from tba.fields import comments

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
WIDE = 80  # characters of a signature beyond which each parameter has a line of its own
HEAD = """\
# The Python API

This page is made from the code by `python tools/api_page.py`; a test keeps it up to date. All of these are names of
`import tba`, each loaded when it is first used. What a field of a recipe means is also in [settings.md](settings.md);
shapes: B rows, T completion tokens, P prompt tokens.
"""
SECTIONS: dict[str, tuple[str, ...]] = {  # by what a module's name begins with; the first that fits
    "Train, check, evaluate, look": ("tba.api",),
    "The nouns": ("tba.types",),
    "Errors": ("tba.errors",),
    "A recipe and its parts": (
        *("tba.recipe", "tba.models", "tba.engines", "tba.policy", "tba.training"),
        *("tba.replay", "tba.search", "tba.evaluation", "tba.record"),
    ),
    "Tasks and rewards": ("tba.tasks", "tba.rewards", "tba.environments"),
    "Objectives": ("tba.objectives",),
    "Schedules": ("tba.schedules",),
}


def page() -> str:
    """The whole page."""
    parts, left = [HEAD], list(tba.__all__)
    for title, modules in SECTIONS.items():
        names = [name for name in left if getattr(tba, name).__module__.startswith(modules)]
        left = [name for name in left if name not in names]
        parts += [f"## {title}\n", *(entry(name) for name in names)]
    if left:
        raise ValueError(f"no section of {PAGE.name} takes {', '.join(left)}")
    return "\n".join(parts)


def entry(name: str) -> str:
    """A heading, the signature or the fields, the docstring, and the public methods."""
    thing = getattr(tba, name)
    lines = [f"### `tba.{name}`\n"]
    if not inspect.isclass(thing):
        lines.append(f"```python\n{signature(name, thing)}\n```\n")
    lines.append(text(thing))
    if inspect.isclass(thing):
        lines += fields(thing)
        lines += [f"- `{call}`: {text(member, 1)}" for call, member in methods(thing)]
        lines.append("")
    return "\n".join(lines)


def text(thing: object, paragraphs: int | None = None) -> str:
    """The docstring as Markdown: what is indented in it is set as it stands."""
    blocks = (inspect.getdoc(thing) or "").split("\n\n")[:paragraphs]
    if paragraphs:
        return " ".join(" ".join(blocks).split())
    shown = [f"```\n{inspect.cleandoc(block)}\n```" if block.startswith("    ") else escaped(block) for block in blocks]
    return "\n\n".join(shown) + "\n"


def escaped(block: str) -> str:
    """Prose in which nothing is taken for Markdown but what stands between backticks."""
    parts = re.split(r"(`[^`]*`)", block)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<|])", r"\\\1", part) for part in parts)


def fields(kind: type) -> list[str]:
    """A table of a dataclass's fields."""
    if not dataclasses.is_dataclass(kind):
        return []
    said = meanings(kind)
    rows = [
        f"| `{f.name}` | `{cell(f.type)}` | {default(f)} | {cell(said[f.name])} |"
        for f in dataclasses.fields(kind)
        if f.init
    ]
    return ["| field | type | default | meaning |\n|---|---|---|---|", *rows, ""] if rows else []


def meanings(kind: Any) -> dict[str, str]:
    """Field -> the comment behind it; without one, what its type says of itself; empty where neither says anything."""
    said, hints = comments(kind), typing.get_type_hints(kind)
    return {f.name: said.get(f.name) or of_type(hints[f.name]) for f in dataclasses.fields(kind)}


def of_type(hint: object) -> str:
    """The first sentence of a class of ours, in lower case; empty for anything else."""
    kinds = [k for k in (hint, *typing.get_args(hint)) if inspect.isclass(k) and k.__module__.startswith("tba.")]
    if not kinds:
        return ""
    said = text(kinds[0], 1).split(". ")[0].rstrip(".")
    return said[0].lower() + said[1:]


def default(field: dataclasses.Field[object]) -> str:
    """As one would write it."""
    if field.default is not dataclasses.MISSING:
        value = field.default.value if isinstance(field.default, Enum) else field.default
        return f"`{cell(value if isinstance(value, str) and not value else repr(value))}`" if value != "" else "empty"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{cell(getattr(field.default_factory, '__name__', 'made'))}()`"
    return "*required*"


def methods(kind: type) -> Iterator[tuple[str, object]]:
    """(how it is written, the member) of the public methods and properties that the class defines itself."""
    for name, member in vars(kind).items():
        inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name.startswith("_") or not inspect.getdoc(inner):
            continue
        if isinstance(inner, property | functools.cached_property):
            yield name, inner
        elif inspect.isfunction(inner):
            yield signature(name, inner, bare=True), inner


def signature(name: str, function: Callable[..., object], bare: bool = False) -> str:
    """`name(parameters) -> result`, a long one with a line for each parameter; bare: without `self` and types."""
    found = inspect.signature(function)
    if not bare:
        shown = [p.replace(annotation=AsWritten(p.annotation)) for p in found.parameters.values()]
        whole = str(found.replace(parameters=shown, return_annotation=AsWritten(found.return_annotation)))
        if len(whole) > WIDE:
            inner, result = whole[1:].rsplit(") ->", 1)
            each = re.split(r", (?![^\[]*\])", inner)  # not within brackets
            whole = "(\n" + "".join(f"    {one},\n" for one in each) + f") ->{result}"
        return f"tba.{name}{whole}"
    return f"{name}({', '.join(p for p in found.parameters if p not in ('self', 'cls'))})"


class AsWritten(str):
    """An annotation without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def cell(value: object) -> str:
    """One line of a table."""
    return " ".join(str(value).replace("|", "\\|").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {len(tba.__all__)} names\n")
