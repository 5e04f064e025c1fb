"""Fields from a file: `--config FILE.toml` on any command line that sets fields.

Invariant: a file that cannot be read, or a value that no field takes, ends in one sentence; nothing heavy is imported.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.errors import UserError


def with_config(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with `--config FILE.toml` replaced by the fields that the file sets, in the file's order.

    A table is a group of fields: `[optimizer]` with `lr = 1e-4` is `--optimizer.lr 1e-4`. Raises `UserError` for a file
    that cannot be read, and for a value that is no text, number or truth value.
    """
    words: list[str] = []
    argument_iterator = iter(arguments)
    for argument in argument_iterator:
        flag, equals_sign, value = argument.partition("=")
        if flag == "--config":
            if not (name := value if equals_sign else next(argument_iterator, "")):
                raise UserError("--config needs the name of a TOML file of fields, such as steps = 200")
            words += _flags_of_file(Path(name))
        else:
            words.append(argument)
    return words


def _flags_of_file(path: Path) -> list[str]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"--config {path} cannot be read ({reason}): give a TOML file of fields, such as steps = 200"
        ) from error
    return [word for flag in _flags(values, path) for word in flag]


def _flags(values: Mapping[str, Any], path: Path, group: str = "") -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        name = key.replace("_", "-")
        if isinstance(value, Mapping):
            yield from _flags(value, path, f"{group}{name}.")
        elif isinstance(value, bool):
            yield (f"--{group}{'' if value else 'no-'}{name}",)
        elif isinstance(value, str | int | float):
            yield (f"--{group}{name}", str(value))
        elif isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
            yield (f"--{group}{name}", *map(str, value))
        else:
            raise UserError(f"--config {path}: {group}{key} is {value!r}: give a text, a number, true, false or a list")
