"""JSON from outside, whose shape is checked before it is used.

Invariant: whatever a file or a reply holds, reading it here ends in a value of the shape that was asked for or in a
`ValueError` of one clause; nothing of it is executed or unpickled.
"""

from __future__ import annotations

import json
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

from tba.errors import UserError
from tba.typed_values import SpelledInJson, convert
from tba.types import Json

DEEPEST = 64  # nesting levels of lists and objects: ours have six


def parse_json(text: str | bytes, kind: Any = None, /, **fields: Any) -> Any:
    """Returns the JSON value in `text` as one of a kind: a declared type (`str`, `list[int]`, `float | None`, a
    dataclass for an object of its fields), or a dictionary from the names of an object's fields to their kinds, by
    default those of the keywords: then the object is checked, and returned as it is.

    A field that may be null may be missing, and an object may have other fields than the dictionary. Raises
    `ValueError` for anything else.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested beyond reason
        raise ValueError(f"not JSON ({error})") from None
    if _is_deeper(value, DEEPEST):
        raise ValueError(f"nested more than {DEEPEST} deep")
    return convert(value, fields if kind is None else kind, "json")


def check_json(value: Json, kind: Any, place: str = "it") -> None:
    """Raises `ValueError` unless the JSON value is of the kind; the message calls it `place`."""
    convert(value, kind, "json", place)


def json_fields_of(value: Any) -> Json:
    """Returns the JSON that `parse_json` reads a value of a class from, but for fields that are None: what `json.dumps`
    calls as its `default`.
    """
    if isinstance(value, SpelledInJson):
        return str(value)
    return {f.name: member for f in fields(value) if (member := getattr(value, f.name)) is not None}


def _is_deeper(value: Json, levels: int) -> bool:
    """Returns whether lists and objects are nested in more than a number of levels."""
    containers = [value]
    for _ in range(levels + 1):
        containers = [container for container in containers if isinstance(container, dict | list)]
        if not containers:
            return False
        inner_values = (c.values() if isinstance(c, dict) else c for c in containers)
        containers = list(chain.from_iterable(inner_values))
    return True


def read_json(path: Path, remedy: str, kind: Any = None, /, **fields: Any) -> Any:
    """Returns what `parse_json` returns for a file. Raises `UserError`, which ends in a remedy, when that fails."""
    try:
        return parse_json(path.read_bytes(), kind, **fields)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    except ValueError as error:
        raise UserError(f"{path} has unexpected contents ({error}): {remedy}") from error
