"""`tba COMMAND --help`: how a command is called, and its own options."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence

from tba.fields import fields_of, rows


def help_of(command: str, usage: str, options: Mapping[str, Sequence[str]]) -> str:
    """Returns the lines of `usage` about a command (or all of `red-team`), and its options with their defaults.

    `options` names the classes of every command's options by the modules that define them.
    """
    lines = list(about(command, usage))
    for name, places in options.items():
        if name != command and not name.startswith(f"{command} "):
            continue
        found = [field for place in places for field in fields_of(_options(place)())]
        lines += ["", f"options of `tba {name}`:", *rows(found)]
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
