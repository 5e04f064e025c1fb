"""Reads the rows that a task makes problems of, from a file (`tba.tables`) or a data set on the Hugging Face Hub.

Invariant: what cannot be read ends in one sentence with the file and the row, or the data set's name, why, and what to
give instead. A field is named as it is, a nested one by a dotted name (`extra_info.index`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tba.errors import UserError
from tba.tables import DAMAGED, NOT_UTF8, Refusal, Rows, is_file_of_rows, parse_json_text, read_batches, read_table
from tba.types import Json, is_text

_ABSENT = object()
_BATCH_ROWS = 1024  # rows of a data set on the Hub
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """One row of a file: its object, and its place in the file for error messages."""

    values: Mapping[str, Json]
    place: str  # "line 3 of data/train.jsonl"

    def has(self, field: str) -> bool:
        """Returns whether there is a field of that name, dotted or not."""
        return self._look_up(field) is not _ABSENT

    def value(self, field: str) -> Json:
        """Returns the value of a field, for `a.b` that of `b` in the object `a`, which may be a text of JSON. None:
        there is none.
        """
        value = self._look_up(field)
        return None if value is _ABSENT else value

    def text(self, field: str) -> str:
        """Returns the text under `field`. Raises `UserError` when it is missing, empty or not a text."""
        value = self._look_up(field)
        if not isinstance(value, str) or not value.strip():
            finding = f"has {value!r} as its field" if value is not _ABSENT else "has no field"
            raise UserError(f"{self.place} {finding} {field!r}: give it a text")
        if not is_text(value):
            raise UserError(f"{self.place} has half of a surrogate pair in its field {field!r}: give it a text")
        return value

    def _look_up(self, field: str) -> object:
        value: object = self.values
        for name in [field] if field in self.values else field.split("."):
            value = parse_json_text(value)
            if not isinstance(value, Mapping) or name not in value:
                return _ABSENT
            value = value[name]
        return value


def read_rows(path: Path) -> list[ProblemRow]:
    """Returns all rows of a file. Raises `UserError` when it is missing or empty, or a row is not an object."""
    rows = _read_all(read_table(path), str(path), "line" if ".jsonl" in path.suffixes else "row")
    if not rows:
        raise UserError(f"{path} is empty: give a file of rows with a problem each")
    return rows


def _read_all(numbered_rows: Rows, source: str, kind: str = "row") -> list[ProblemRow]:
    rows = list[ProblemRow]()
    for number, values in numbered_rows:
        place = f"{kind} {number} of {source}"
        if isinstance(values, Refusal) and values.reason == DAMAGED:
            count = f"{len(rows)} rows could be"
            raise UserError(f"{source} cannot be read ({values.detail}; {count}): give the whole file")
        if isinstance(values, Refusal):
            remedy = "save it in UTF-8" if values.reason == NOT_UTF8 else "each must be one object such as {...}"
            raise UserError(f"{place} is {values}: {remedy}")
        rows.append(ProblemRow(values, place))
    return rows


def rows_from_hub(task: str, name: str, split: str, remedy: str, configuration: str | None = None) -> list[ProblemRow]:
    """Returns all rows of a split of the data set `name` (the extra `tba-rl[hub]`).

    Raises `UserError` when it cannot be loaded; `remedy` says what the user can give instead of a Hub name.
    """
    if not _HUB_NAME.fullmatch(name) or is_file_of_rows(name):
        raise UserError(f"{task} has path {name!r}, which does not exist: give a Hub name or {remedy}")
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{task} has path {name!r}, which is no local folder or file, and a Hub name needs `pip install datasets`: "
            f"install it, or give {remedy}"
        ) from error
    try:
        rows = datasets.load_dataset(name, configuration, split=split)
    except (OSError, ValueError) as error:  # no network, no such data set, no such configuration
        raise UserError(
            f"{task} could not load {name!r} from the Hub ({type(error).__name__}: {error}): check the name and the "
            f"network, or give {remedy}"
        ) from error
    tables = rows.with_format("arrow").iter(_BATCH_ROWS)
    return _read_all(read_batches(tables, rows.features.arrow_schema), f"{name} ({split})")
