"""`tba COMMAND --help`: how a command is called, and its own options."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from tba.fields import fields_of, rows

# The options of each command that has some, by where they are defined.
OPTIONS: dict[str, tuple[str, ...]] = {
    "train": ("command.options.TrainOptions", "command.options.ResumeOptions"),
    "search": ("command.options.SearchOptions",),
    "import": ("command.options.ImportOptions",),
    "sft": ("command.options.OutOptions",),
    "model": ("command.options.OutOptions",),
    "sample": ("command.options.SampleOptions",),
    "reward-model": ("command.options.OutOptions", "apps.preference.command.RewardModelOptions"),
    "red-team world": ("apps.red_team.command.WorldPlaces", "apps.red_team.world.WorldOptions"),
    "red-team classifier": (
        "apps.red_team.command.ClassifierPlaces",
        "apps.red_team.toxicity_classifier.ClassifierOptions",
    ),
    "red-team eval": ("apps.red_team.evaluation.RedTeamEvalOptions",),
    "red-team plot": ("apps.red_team.command.PlotOptions",),
    "eval": ("command.options.EvalOptions",),
    "study": ("command.options.StudyOptions",),
    "push": ("command.options.PushOptions",),
    "report": ("command.options.ReportOptions",),
    "replay": ("command.options.ReplayOptions",),
}


def help_of(command: str, usage: str) -> str:
    """The lines of `usage` about a command (`train`, or all of `red-team`), and its options with their defaults."""
    lines = list(about(command, usage))
    for name, places in OPTIONS.items():
        if name != command and not name.startswith(f"{command} "):
            continue
        options = [field for place in places for field in fields_of(_options(place)())]
        lines += ["", f"options of `tba {name}`:", *rows(options)]
    return "\n".join(lines)


def about(command: str, usage: str) -> Iterator[str]:
    """Yields the lines of the usage that begin with the command, and their continuation lines."""
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
