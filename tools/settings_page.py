"""Writes docs/settings.md: every field that a recipe can set, its default and its meaning.

    python tools/settings_page.py

Invariant: everything on the page is read from the dataclasses; the meaning of a field is the comment behind it, so the
page cannot say anything that the code does not. Every setting is on it once, those that are set most at the top. Which
classes fill a slot (a task, an objective, ...) is found by what they can do, so that a new one appears by itself.
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

from tba.apps.preference.options import RewardModelOptions
from tba.apps.red_team.options import ClassifierOptions, RedTeamEvalOptions
from tba.apps.red_team.world import WorldOptions
from tba.command.collecting import SmoothingOptions
from tba.command.options import (
    EvalOptions,
    ImportOptions,
    PushOptions,
    ReplayOptions,
    SampleOptions,
    SearchOptions,
    StudyOptions,
    TrainOptions,
)
from tba.command.sft import SftOptions
from tba.fields import comments, is_plain
from tba.recipe import Recipe
from tba.settings import FIRST

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = """\
# Every setting

This page is made from the code by `python tools/settings_page.py`; a test keeps it up to date. It has the defaults;
`tba train RECIPE --help` lists the settings that have an effect in one recipe, with the values that it gives them.

A setting is changed on the command line by its flag (`tba train quickstart --steps 100 --task.digits 4`), or in a
recipe file by its name in the class in bold. A switch that is on is turned off with `no-` before its last name
(`--record.no-tensorboard`). *required*: the recipe's code has to give it.
"""
CHOSEN = """\
## What a recipe is made of

*Which* task, model, objective, exploration or schedule a recipe is made of is decided by its code; a flag changes the
values in it. So `--task.operations` exists where the task is `Arithmetic` or `Countdown`, and nowhere else.
"""


@dataclass(frozen=True)
class Slot:
    """A field that takes one of several settings classes: those in `where` that have all of `can`."""

    flag: str  # what the flags of its fields begin with
    title: str
    where: str  # modules, or packages of which every module is searched
    can: tuple[str, ...]  # attributes that such a class has
    said: str = ""

    @property
    def link(self) -> str:
        return f"[{self.title}](#{self.title.lower().replace(' ', '-')})"


_TEMPERATURES = "`--objective.reward-temperature` and `--objective.reference-temperature` take the same classes."
VICTIMS = "tba.apps.red_team.victim tba.apps.red_team.endpoint"
SLOTS = (
    Slot(
        "--task",
        "Tasks",
        "tba.tasks tba.environments.task tba.environments.verifiers_task tba.apps.preference.tldr "
        "tba.apps.red_team.task",
        ("problems", "reward"),
    ),
    Slot("--task.victim", "Victims of red-teaming", VICTIMS, ("max_tokens", "start")),
    Slot("--task.classifier", "Classifiers of red-teaming", "tba.apps.red_team.toxicity", ("path", "start")),
    Slot("--model", "Models", "tba.models", ("prepared", "policy", "engine", "reference")),
    Slot("--objective", "Objectives", "tba.objectives", ("needs", "by_group")),
    Slot("--objective.beta", "Schedules of beta and of temperatures", "tba.schedules", ("last",), _TEMPERATURES),
    Slot("--objective.correction", "Corrections of an objective", "tba.objectives.correction", ("form", "level")),
    Slot("--exploration", "Exploration", "tba.search.exploration", ("draw", "full_support")),
    Slot("--replay.selection", "Selection from replay", "tba.replay.selection", ("m", "start")),
    Slot("--optimizer.schedule", "Schedules of the learning rate", "tba.schedules", ("warmup", "__call__")),
    Slot("--embedding", "Embeddings of answers", "tba.search.embedding", ("start", "embed")),
)
SAME = {  # fields that take the same classes as another: these are listed once
    "--objective.reward-temperature": "--objective.beta",
    "--objective.reference-temperature": "--objective.beta",
    "--teacher.schedule": "--objective.beta",
}
COMMANDS: dict[str, type] = {
    "tba train RECIPE": TrainOptions,
    "tba search": SearchOptions,
    "tba import RUN FILE": ImportOptions,
    "tba eval RECIPE": EvalOptions,
    "tba study STUDY": StudyOptions,
    "tba replay RUN": ReplayOptions,
    "tba push RUN OWNER/NAME": PushOptions,
    "tba sample RECIPE": SampleOptions,
    "tba sft FILE.jsonl": SftOptions,
    "tba sft RUN": SmoothingOptions,
    "tba reward-model PAIRS": RewardModelOptions,
    "tba red-team eval RECIPE": RedTeamEvalOptions,
    "tba red-team classifier FILE": ClassifierOptions,
    "tba red-team world": WorldOptions,
}
SLOT_OF = {slot.flag: slot for slot in SLOTS}
BETA = "--objective.beta."
TOP = "| flag | default | meaning |\n|---|---|---|"


class Page:
    """The page while it is written.

    Invariant: a settings class is explained where it comes first, and a flag of `FIRST` on top of the page alone.
    """

    def __init__(self) -> None:
        self.first: dict[str, str] = {}  # flag of FIRST -> its row
        self.explained: set[type] = set()

    def table(self, title: str, *blocks: Sequence[str], said: str = "", level: int = 3) -> str:
        """A heading, and one table of some classes' rows."""
        intro = [f"{said}\n"] if said else []
        return "\n".join([f"{'#' * level} {title}\n", *intro, TOP, *(row for block in blocks for row in block), ""])

    def rows(self, prefix: str, kind: type, name: str = "", inner: bool = True) -> list[str]:
        """The rows of a class: what it is, then its fields, then (`inner`) the classes in it."""
        self.explained.add(kind)
        said, hints = comments(kind), typing.get_type_hints(kind)
        rows = [f"| **{name or kind.__name__}** | | {cell(summary(kind))} |"]
        after = []
        for f in dataclasses.fields(kind):
            flag, within = f"{prefix}{dashed(f.name)}", settings_in(hints[f.name])
            slot = SLOT_OF.get(SAME.get(flag, flag))
            if slot is not None and hints[f.name] is not str:
                rows.append(f"| `{flag}.*` | | see {slot.link} |")
            elif within is not None and within in self.explained:
                rows.append(f"| `{flag}.*` | | the fields of **{within.__name__}**, above |")
            elif within is not None and inner:
                after.append((f"{flag}.", within))
            elif within is None and f.init and "by_code" not in f.metadata:
                meaning = "; ".join(filter(None, (said.get(f.name, ""), choices(hints[f.name]))))
                spelt = f"`{flag}`" if is_plain(hints[f.name]) else f"`{f.name}`, in code only"
                row = f"| {spelt} | {default(f)} | {cell(meaning)} |"
                if flag in FIRST and not flag.startswith(BETA) and kind not in COMMANDS.values():
                    self.first[flag] = row
                else:
                    rows.append(row)
        return rows + [row for flags, inside in after for row in self.rows(flags, inside)]


def page() -> str:
    """The whole page."""
    made, hints = Page(), typing.get_type_hints(Recipe)
    common = [made.table("The run", made.rows("--", Recipe, inner=False))]
    for name, hint in hints.items():
        flag, kind = f"--{dashed(name)}", settings_in(hint)
        if kind is not None and flag not in SLOT_OF:
            common.append(made.table(f"`{flag}`", made.rows(f"{flag}.", kind)))
    chosen = [
        made.table(slot.title, *(made.rows(f"{slot.flag}.", kind) for kind in fillings(slot)), said=slot.said)
        for slot in SLOTS
    ]
    options = [made.rows("--", kind, f"`{command}`") for command, kind in COMMANDS.items()]
    beta = f"| `{BETA}*` | | see {SLOT_OF[BETA[:-1]].link} |"
    first = dict.fromkeys(made.first.get(flag, beta) for flag in FIRST)
    return "\n".join(
        [
            HEAD,
            made.table("What is set most", list(first), level=2),
            "## What every recipe has\n",
            *common,
            CHOSEN,
            *chosen,
            made.table("Options of the commands", *options, level=2),
        ]
    )


def cell(text: str) -> str:
    """Text in a cell of a table."""
    return text.replace("|", "\\|")


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
    if isinstance(f.default, bool):
        return f"`{'on' if f.default else 'off'}`"
    text = str(f.default).replace("\n", "\\n")
    return f"`{text}`" if text else "empty"


def dashed(name: str) -> str:
    """A field's name as a flag spells it."""
    return name.replace("_", "-")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
