"""Writes docs/reference.md: every setting with its default, and every public name of `import tba` with its signature.

    python tools/reference_page.py

Invariant: everything on the page is read from the code. A setting's meaning is the comment behind its field, of which
the page has the first clause and the one that says what the default means; a name's is its docstring's first sentence.
Which classes fill a slot (a task, an objective, ...) is found by what they can do, so that a new one appears by itself.
"""

from __future__ import annotations

import dataclasses
import functools
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

import tba
from tba.apps.preference.options import RewardModelOptions
from tba.apps.red_team.options import ClassifierOptions, RedTeamEvalOptions
from tba.command.collecting import SmoothingOptions
from tba.command.options import (
    EvalOptions,
    ImportOptions,
    PushOptions,
    ReplayOptions,
    SampleOptions,
    SearchOptions,
    TrainOptions,
)
from tba.command.sft import SftOptions
from tba.fields import comments, is_plain
from tba.recipe import Recipe
from tba.settings import LEADING_FLAGS

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"

HEAD = """\
# Reference

Every setting, then [every public name](#names-of-import-tba). `python tools/reference_page.py` makes this page from the
code; a test keeps it up to date. `tba train RECIPE --help` says more of each setting, with that recipe's values;
`help(tba.NAME)` of each name.

Set a field by its flag (`tba train quickstart --steps 100 --task.digits 4`), or by its name in the class in bold, in a
recipe. `no-` before the last name turns a switch off (`--record.no-tensorboard`). After a flag stand its default and,
in brackets, its choices; `required`: the recipe's code has to give it.
"""
CHOSEN = """\
## What a recipe is made of

A recipe's code decides *which* task, model or objective it has; flags change the values in it. So `--task.operations`
exists where the task is `Arithmetic`, and nowhere else. *Also*: the fields of a class that has a list of
its own on this page.
"""
OTHERS = "Those of the others, such as `tba red-team world`, are in their `--help`.\n"


@dataclass(frozen=True)
class Slot:
    """A field that takes one of several settings classes: those in `where` that have all of `can`."""

    flag: str  # what the flags of its fields begin with
    title: str
    where: str  # modules, or packages of which every module is searched
    can: tuple[str, ...]  # attributes that such a class has
    said: str = ""
    named: bool = False  # of each class only its name: a page says what they are


_TEMPERATURES = "`--objective.reward-temperature` and `--objective.reference-temperature` take the same classes."
_LOSSES = "What each computes: [objectives.md](objectives.md#what-each-computes)."
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
    Slot("--objective", "Objectives", "tba.objectives", ("needs", "by_group"), _LOSSES, named=True),
    Slot("--objective.beta", "Schedules of beta and of temperatures", "tba.schedules", ("last",), _TEMPERATURES),
    Slot("--objective.correction", "Corrections of an objective", "tba.objectives.correction", ("form", "level")),
    Slot("--exploration", "Exploration", "tba.rollout.exploration", ("draw", "full_support")),
    Slot("--replay.selection", "Selection from replay", "tba.replay.selection", ("m", "start")),
    Slot("--optimizer.schedule", "Schedules of the learning rate", "tba.schedules", ("warmup", "__call__")),
    Slot("--replay.buffer.near-duplicates", "Near duplicates", "tba.apps.red_team.near", ("start", "keep")),
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
    "tba replay RUN": ReplayOptions,
    "tba push RUN OWNER/NAME": PushOptions,
    "tba sample RECIPE": SampleOptions,
    "tba sft FILE.jsonl": SftOptions,
    "tba sft RUN": SmoothingOptions,
    "tba reward-model PAIRS": RewardModelOptions,
    "tba red-team eval RECIPE": RedTeamEvalOptions,
    "tba red-team classifier FILE": ClassifierOptions,
}
SLOT_OF = {slot.flag: slot for slot in SLOTS}
BETA = "--objective.beta."
LONG, MOST = 8, 24  # words of a clause that is kept whole, and of a comment that says what choices are
COLUMN = 46  # characters of a flag and its default, before what it means


class Settings:
    """The settings' part while it is written.

    Invariant: a settings class is explained where it comes first, and a leading flag on top of the page alone.
    """

    def __init__(self) -> None:
        self.first: dict[str, str] = {}  # flag of LEADING_FLAGS -> its line
        self.explained: set[type] = set()

    def lines(self, prefix: str, kind: type, name: str = "", inner: bool = True) -> list[str]:
        """The lines of a class: what it is and what else fills it, its fields, then (`inner`) the classes in it."""
        self.explained.add(kind)
        said, hints = comments(kind), typing.get_type_hints(kind)
        elsewhere: list[str] = []
        lines: list[str] = []
        after: list[tuple[str, type]] = []
        for f in dataclasses.fields(kind):
            flag, within = f"{prefix}{dashed(f.name)}", settings_in(hints[f.name])
            slot = SLOT_OF.get(SAME.get(flag, flag))
            if slot is not None and not is_plain(hints[f.name]):
                elsewhere.append(f"`{flag}.*`")
            elif within is not None and within in self.explained:
                elsewhere.append(f"`{flag}.*` (as **{within.__name__}**)")
            elif within is not None and inner:
                after.append((f"{flag}.", within))
            elif within is None and f.init and "by_code" not in f.metadata:
                spelt = flag if is_plain(hints[f.name]) else f"{f.name} (in code only)"
                given = f"{spelt} {default(f)}{choices(hints[f.name])}"
                comment = said.get(f.name, "")
                whole = choices(hints[f.name]) and len(comment.split()) <= MOST
                line = f"{given:<{COLUMN}}  {comment if whole else meaning(comment, f)}".rstrip()
                if flag in LEADING_FLAGS and not flag.startswith(BETA) and kind not in COMMANDS.values():
                    self.first[flag] = line
                else:
                    lines.append(line)
        also = f" Also {', '.join(elsewhere)}." if elsewhere else ""
        own = [f"**{name or kind.__name__}**{'' if name else f': {first_sentence(kind)}'}{also}\n", *block(lines)]
        return own + [line for flags, inside in after for line in self.lines(flags, inside)]


def page() -> str:
    """The whole page."""
    made = Settings()
    return "\n".join([*settings(made), *names(made.explained)])


def settings(made: Settings) -> Iterator[str]:
    """Those set most, those of every recipe, those of the classes that fill slots, and the options of commands."""
    hints = typing.get_type_hints(Recipe)
    common = ["### The run\n", *made.lines("--", Recipe, inner=False)]
    for name, hint in hints.items():
        flag, kind = f"--{dashed(name)}", settings_in(hint)
        if kind is not None and flag not in SLOT_OF:
            common += [f"### `{flag}`\n", *made.lines(f"{flag}.", kind)]
    chosen = []
    for slot in SLOTS:
        chosen += [f"### {slot.title}\n", *([f"{slot.said}\n"] if slot.said else [])]
        chosen += [
            line for kind in fillings(slot) for line in made.lines(f"{slot.flag}.", kind, kind.__name__ * slot.named)
        ]
    options = [line for command, kind in COMMANDS.items() for line in made.lines("--", kind, f"`{command}`")]
    beta = f"{BETA + '*':<{COLUMN}}  below"
    most = list(dict.fromkeys(made.first.get(flag, beta) for flag in LEADING_FLAGS))
    yield from [HEAD, "## What is set most\n", *block(most), "## What every recipe has\n", *common]
    yield from [CHOSEN, *chosen, "## Options of the commands\n", *options, OTHERS]


def names(explained: set[type]) -> Iterator[str]:
    """The public names: the settings classes, and each other with its signature, first sentence and public methods."""
    yield "## Names of `import tba`\n"
    above = [name for name in tba.__all__ if getattr(tba, name) in explained]
    yield f"Explained above, with their fields: {', '.join(f'`{name}`' for name in above)}. The others:\n"
    others = (name for name in tba.__all__ if name not in above)
    for name in sorted(others, key=lambda name: getattr(tba, name).__module__ != "tba.api"):  # what one calls first
        thing = getattr(tba, name)
        yield f"- `tba.{name}{signature(thing)}`: {first_sentence(thing)}"
        if inspect.isclass(thing) and thing.__module__ in ("tba.api", "tba.types"):
            yield from (f"    - `{call}`: {first_sentence(member)}" for call, member in methods(thing))
    yield ""


def block(lines: Sequence[str]) -> list[str]:
    """Lines as they stand, or nothing."""
    return ["```", *lines, "```\n"] if lines else []


def signature(thing: object) -> str:
    """The parameters without types; nothing for an exception."""
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return ""
    assert callable(thing)
    found = inspect.signature(thing)
    shown = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else Shown(p.default))
        for p in found.parameters.values()
    ]
    return str(found.replace(parameters=shown, return_annotation=found.empty))


class Shown:
    """A default as one would write it."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def methods(kind: type) -> Iterator[tuple[str, object]]:
    """(how it is written, the member) of the public methods and properties that the class defines itself."""
    for name, member in vars(kind).items():
        inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name.startswith("_") or not inspect.getdoc(inner):
            continue
        if isinstance(inner, property | functools.cached_property):
            yield name, inner
        elif inspect.isfunction(inner):
            parameters = inspect.signature(inner).parameters
            yield f"{name}({', '.join(p for p in parameters if p not in ('self', 'cls'))})", inner


def meaning(comment: str, f: dataclasses.Field[object]) -> str:
    """The first clause of a comment, a long one up to what it adds, and the one that says what the default means."""
    first, *others = comment.split("; ")
    if len(first.split()) > LONG:
        ends = (
            first[: cut.start()] for cut in re.finditer(r'(?<!"): | \(|, (?:so|as|and|but|until|where|for|in) ', first)
        )
        first = next((end for end in ends if len(end.split()) >= 3), first)
    unset = {"None": ("None", "none"), "": ("empty", "none"), "()": ("empty", "none")}
    spelt = unset.get(str(f.default), (str(f.default),))
    return "; ".join([first, *(other for other in others if other.partition(":")[0] in spelt)])


def choices(hint: object) -> str:
    """The values of a field that takes one of a few."""
    values = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    return f" ({'|'.join(map(str, values))})" if values else ""


def first_sentence(thing: object) -> str:
    """The first sentence of a docstring on one line; nothing in it is taken for Markdown but what is in backticks."""
    block = " ".join(inspect.cleandoc(inspect.getdoc(thing) or "").split("\n\n")[0].split())
    said = re.match(r".*?[.:](?= [A-Z`]|$)", block)
    parts = re.split(r"(`[^`]*`)", said[0] if said else block)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<|])", r"\\\1", part) for part in parts)


def fillings(slot: Slot) -> list[type]:
    """The settings classes that can fill a slot, in the order of their modules and lines."""
    found: list[type] = []
    for module in (module for name in slot.where.split() for module in modules(name)):
        members = inspect.getmembers(module, inspect.isclass)
        classes = [c for name, c in members if c.__module__ == module.__name__ and not name.startswith("_")]
        classes.sort(key=lambda c: inspect.getsourcelines(c)[1])
        found += [c for c in classes if dataclasses.is_dataclass(c) and all(hasattr(c, name) for name in slot.can)]
    return [c for c in found if not hasattr(c, "restore")]  # that is the state of a run, which settings start


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


def default(f: dataclasses.Field[object]) -> str:
    """A field's default as a command line would give it."""
    if f.default is dataclasses.MISSING:
        return "required"
    if isinstance(f.default, tuple):
        return " ".join(map(str, f.default)) or "empty"
    if isinstance(f.default, bool):
        return "on" if f.default else "off"
    return str(f.default).replace("\n", "\\n") or "empty"


def dashed(name: str) -> str:
    """A field's name as a flag spells it."""
    return name.replace("_", "-")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
