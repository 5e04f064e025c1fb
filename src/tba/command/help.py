"""`tba COMMAND --help`: how a command is called, and its own options."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence

from tba.fields import fields_of, rows


def help_of(command: str, usage: str, options: Mapping[str, Sequence[str]]) -> str:
    """Returns the lines of `usage` about a command, and its options with their defaults; of `red-team`, its commands.

    `options` names the classes of every command's options by the modules that define them.
    """
    lines = list(about(command, usage))
    if command in options:
        found = [field for place in options[command] for field in fields_of(_options(place)())]
        lines += ["", f"options of `tba {command}`:", *rows(found)]
    elif any(name.startswith(f"{command} ") for name in options):
        lines += ["", f"`tba {command} COMMAND --help` lists the options of one of them."]
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
