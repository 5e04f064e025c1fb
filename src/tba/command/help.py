"""`tba COMMAND --help`: how it is called, and its own options."""

from __future__ import annotations

import dataclasses
import importlib
import textwrap
from collections.abc import Iterator
from typing import Any

from tba.field_comments import comments

# The options of each command that has some, by where they are defined.
OPTIONS: dict[str, tuple[str, ...]] = {
    "train": ("command.options.TrainOptions", "command.options.ResumeOptions"),
    "search": ("command.search.SearchOptions",),
    "import": ("command.importing.ImportOptions",),
    "sft": ("command.options.OutOptions",),
    "sample": ("command.sample.SampleOptions",),
    "reward-model": ("command.options.OutOptions", "apps.preference.command.RewardModelOptions"),
    "red-team world": ("apps.red_team.command.WorldPlaces", "apps.red_team.world.WorldOptions"),
    "red-team classifier": (
        "apps.red_team.command.ClassifierPlaces",
        "apps.red_team.toxicity_classifier.ClassifierOptions",
    ),
    "red-team eval": ("apps.red_team.evaluation.RedTeamEvalOptions",),
    "red-team plot": ("apps.red_team.command.PlotOptions",),
    "eval": ("command.options.EvalOptions",),
    "study": ("research.command.StudyOptions",),
    "replay": ("command.replay.ReplayOptions",),
}


def help_of(command: str, usage: str) -> str:
    """The lines of `usage` about a command (`train`, or all of `red-team`), and its options with their defaults."""
    lines = list(_about(command, usage))
    for name, places in OPTIONS.items():
        if name != command and not name.startswith(f"{command} "):
            continue
        rows = [row for place in places for row in _rows(_options(place)(), "--")]
        lines += ["", f"options of `tba {name}`:", *rows]
    return "\n".join(lines)


def _about(command: str, usage: str) -> Iterator[str]:
    """Lines that begin with it, and those that go on from one of these."""
    its = False
    for line in usage.splitlines():
        if line.startswith("  tba "):
            its = f"{line} ".startswith(f"  tba {command} ")
        elif not line.startswith("   "):
            its = False
        if its:
            yield line


def _options(place: str) -> type:
    module, _, name = place.rpartition(".")
    found: type = getattr(importlib.import_module(f"tba.{module}"), name)
    return found


def _rows(default: Any, prefix: str) -> Iterator[str]:
    """A field a row, those of settings within under their dotted names."""
    said = comments(type(default))
    for f in dataclasses.fields(default):
        flag, value = prefix + f.name.replace("_", "-"), getattr(default, f.name)
        if dataclasses.is_dataclass(value):
            yield from _rows(value, f"{flag}.")
        else:
            given = "" if value is None or value == "" else f" (default: {value})"
            lines = textwrap.wrap(f"{said.get(f.name, '')}{given}", 80) or [""]
            yield f"\n{' ' * 28}".join([f"  {flag:24}  {lines[0]}", *lines[1:]])
