"""Writes docs/settings.md: every field that a recipe can set, its default and its meaning.

    python tools/settings_page.py

Invariant: everything on the page is read from the dataclasses; the meaning of a field is the comment behind it, so the
page cannot say anything that the code does not. Which settings fill a slot (a task, an objective, ...) is found by what
they can do, not by a list: a new one appears by itself.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, UnionType
from typing import Literal

from tba.apps.preference.command import RewardModelOptions
from tba.apps.red_team.evaluation import RedTeamEvalOptions
from tba.apps.red_team.toxicity_classifier import ClassifierOptions
from tba.apps.red_team.world import WorldOptions
from tba.command.collecting import SmoothingOptions
from tba.command.importing import ImportOptions
from tba.command.options import EvalOptions, TrainOptions
from tba.command.replay import ReplayOptions
from tba.command.sample import SampleOptions
from tba.command.search import SearchOptions
from tba.command.sft import SftOptions
from tba.field_comments import comments
from tba.recipe import Recipe
from tba.research.command import StudyOptions

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = """\
# Every setting

This page is made from the code by `python tools/settings_page.py`; a test keeps it up to date.

A field is set on the command line by its flag (`tba train quickstart --steps 100 --task.digits 4`) or in a recipe file
by its name. `tba train RECIPE --help` lists the fields of one recipe with the values that it gives them. A switch that
is on is turned off with `no-` before its last name (`--record.no-tensorboard`). *required*: a recipe has to give it.

*Which* task, model, objective, exploration or schedule a recipe is made of is decided by its code; a flag sets the
values inside of what is there. So `--task.digits` exists where the task is `Arithmetic`, and nowhere else.
"""


@dataclass(frozen=True)
class Slot:
    """A place in the recipe that one of several settings fills: those in `where` that have all of `can`."""

    flag: str  # what its fields' flags begin with
    title: str
    where: str  # a module, or a package, of which every module is looked at
    can: tuple[str, ...]  # attributes that a filling has


VICTIMS = "tba.apps.red_team.victim tba.apps.red_team.endpoint"
SLOTS = (
    Slot("--task", "The task", "tba.tasks tba.apps.preference.tldr tba.apps.red_team.task", ("problems", "reward")),
    Slot("--task.victim", "The victim of red-teaming", VICTIMS, ("max_tokens", "start")),
    Slot("--task.classifier", "The classifier of red-teaming", "tba.apps.red_team.toxicity", ("path", "start")),
    Slot("--model", "The model", "tba.models", ("prepared", "policy", "engine", "reference")),
    Slot("--objective", "The objective", "tba.objectives", ("needs", "by_group")),
    Slot("--objective.beta", "Schedules of beta", "tba.schedules", ("last",)),
    Slot("--objective.reward-temperature", "Schedules of the reward temperature", "tba.schedules", ("last",)),
    Slot("--objective.reference-temperature", "Schedules of the reference temperature", "tba.schedules", ("last",)),
    Slot("--objective.correction", "Corrections of an objective", "tba.objectives.correction", ("form", "level")),
    Slot("--embedding", "Embeddings of answers", "tba.search.embedding", ("start", "embed")),
    Slot("--exploration", "Exploration", "tba.search.exploration", ("draw", "full_support")),
    Slot("--replay.selection", "Selection from replay", "tba.replay.selection", ("m", "start")),
    Slot("--optimizer.schedule", "Schedules of the learning rate", "tba.schedules", ("warmup", "__call__")),
)
COMMANDS: dict[str, type] = {
    "train RECIPE": TrainOptions,
    "search": SearchOptions,
    "import RUN FILE": ImportOptions,
    "eval RECIPE": EvalOptions,
    "study STUDY": StudyOptions,
    "replay RUN": ReplayOptions,
    "sample RECIPE": SampleOptions,
    "red-team eval RECIPE": RedTeamEvalOptions,
}
SLOT_OF = {slot.flag: slot for slot in SLOTS}


def page() -> str:
    """The whole page."""
    parts = [HEAD, *section("The recipe", "--", Recipe)]
    for slot in SLOTS:
        parts.append(f"## {slot.title}\n\nOne of these fills `{slot.flag}`.\n")
        for kind in fillings(slot):
            parts += section(kind.__name__, f"{slot.flag}.", kind, level=3)
    for command, kind in COMMANDS.items():
        parts += section(f"`tba {command}`", "--", kind)
    parts += section("`tba sft FILE.jsonl`", "--", SftOptions, inner=False)
    parts += section("`tba sft RUN`", "--", SmoothingOptions)
    parts += section("`tba reward-model PAIRS`", "--", RewardModelOptions)
    parts += section("`tba red-team classifier FILE`", "--", ClassifierOptions)
    parts += section("`tba red-team world`", "--", WorldOptions, inner=False)
    return "\n".join(parts)


def section(title: str, prefix: str, kind: type, level: int = 2, inner: bool = True) -> list[str]:
    """A heading, the class's own sentence and a table of its fields; then the settings inside of it, likewise."""
    said, hints = comments(kind), typing.get_type_hints(kind)
    rows, after = [], []
    for f in dataclasses.fields(kind):
        flag, within = f"{prefix}{dashed(f.name)}", settings_in(hints[f.name])
        if (slot := SLOT_OF.get(flag)) is not None and hints[f.name] is not str:
            rows.append(f"| `{flag}.*` | see [{slot.title}](#{dashed(slot.title.lower(), ' ')}) | |")
        elif within is not None:
            rows.append(f"| `{flag}.*` | see [{within.__name__}](#{within.__name__.lower()}) | |")
            after += section(within.__name__, f"{flag}.", within, level) if inner else []
        elif f.init:
            meaning = "; ".join(filter(None, (said.get(f.name, ""), choices(hints[f.name]))))
            rows.append(f"| `{flag}` | {default(f)} | {meaning.replace('|', chr(92) + '|')} |")
    table = "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows]) if rows else "It has no fields."
    return [f"{'#' * level} {title}\n\n{summary(kind)}\n\n{table}\n", *after]


def choices(hint: object) -> str:
    """The values of a field that takes one of a few."""
    values = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    return "one of " + ", ".join(f"`{v}`" for v in values) if values else ""


def fillings(slot: Slot) -> list[type]:
    """The settings classes that can fill a slot, in the order of their modules and lines."""
    found: list[type] = []
    for module in (module for name in slot.where.split() for module in modules(name)):
        classes = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
        classes.sort(key=lambda c: inspect.getsourcelines(c)[1])
        found += [c for c in classes if dataclasses.is_dataclass(c) and all(hasattr(c, name) for name in slot.can)]
    return found


def modules(name: str) -> Iterator[ModuleType]:
    """A module, or the modules of a package."""
    module = importlib.import_module(name)
    if not hasattr(module, "__path__"):
        yield module
        return
    for found in pkgutil.iter_modules(module.__path__, f"{name}."):
        yield importlib.import_module(found.name)


def settings_in(hint: object) -> type | None:
    """The settings class of a field's type: itself, or the one in `X | None`; None for plain values and protocols."""
    options: Sequence[object] = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = [o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)]
    return kinds[0] if len(kinds) == 1 else None


def summary(kind: type) -> str:
    """The first paragraph of a class's docstring on one line, without what it raises."""
    first = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
    return re.sub(r" Raises [^.]*\.( |$)", " ", " ".join(first.split())).strip()


def default(f: dataclasses.Field[object]) -> str:
    """A field's default as a command line would give it."""
    if f.default is dataclasses.MISSING:
        return "*required*"
    if isinstance(f.default, tuple):
        return f"`{' '.join(map(str, f.default))}`" if f.default else "none"
    text = str(f.default).replace("\n", "\\n")
    return f"`{text}`" if text else "empty"


def dashed(name: str, gap: str = "_") -> str:
    """A field's name as a flag spells it."""
    return name.replace(gap, "-")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
