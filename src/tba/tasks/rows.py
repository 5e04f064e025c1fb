"""Reads a task's files of rows (`tba.tables`): fields by name, nested ones by dotted name (`extra_info.index`).

Invariant: what cannot be read ends in one sentence with the file and the row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tba.errors import UserError
from tba.tables import DAMAGED, Refusal, read
from tba.types import Json, is_text

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file: its object, and its place in the file for error messages."""

    values: Mapping[str, Json]
    place: str  # "line 3 of data/train.jsonl"

    def has(self, field: str) -> bool:
        """Whether there is a field of that name, dotted or not."""
        return self._at(field) is not _ABSENT

    def at(self, field: str) -> Json:
        """Returns what is in a field: its value, or for `a.b` that of `b` in the object `a`, which may be a text of
        JSON. Nothing there is None.
        """
        found = self._at(field)
        return None if found is _ABSENT else found

    def text(self, field: str) -> str:
        """Returns the text under `field`. Raises `UserError` when it is missing, empty or not a text."""
        value = self._at(field)
        if not isinstance(value, str) or not value.strip():
            given = f"has {value!r} as its field" if value is not _ABSENT else "has no field"
            raise UserError(f"{self.place} {given} {field!r}: give it a text")
        if not is_text(value):
            raise UserError(f"{self.place} has half of a surrogate pair in its field {field!r}: give it a text")
        return value

    def _at(self, field: str) -> object:
        value: object = self.values
        for name in [field] if field in self.values else field.split("."):
            value = unpacked(value)
            if not isinstance(value, Mapping) or name not in value:
                return _ABSENT
            value = value[name]
        return value


def unpacked(value: Json) -> Json:
    """Returns the object or list that a text of JSON holds, as columns of many shapes are published; else the value."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def read_rows(path: Path) -> list[Row]:
    """Returns all rows of a file. Raises `UserError` when it is missing or empty, or a row is not an object."""
    rows = list[Row]()
    for number, values in read(path):
        place = f"{'line' if '.jsonl' in path.suffixes else 'row'} {number} of {path}"
        if isinstance(values, Refusal) and values.reason == DAMAGED:
            raise UserError(f"{path} cannot be read ({values.detail}; {len(rows)} rows could be): give the whole file")
        if isinstance(values, Refusal):
            raise UserError(f"{place} is {values}: each must be one object such as {{...}}")
        rows.append(Row(values, place))
    if not rows:
        raise UserError(f"{path} is empty: give a file of rows with a problem each")
    return rows
