"""Reads a task's JSON Lines files: one JSON object per line, empty lines ignored; gzipped if the name ends in `.gz`.

Invariant: what cannot be read ends in one sentence with the file and the line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from tba.errors import UserError
from tba.types import Json, is_text


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file: its object, and its place in the file for error messages."""

    values: dict[str, Json]
    place: str  # "line 3 of data/train.jsonl"

    def text(self, field: str) -> str:
        """Returns the text under `field`. Raises `UserError` when it is missing, empty or not a text."""
        value = self.values.get(field)
        if not isinstance(value, str) or not value.strip():
            given = f"has {value!r} as its field" if field in self.values else "has no field"
            raise UserError(f"{self.place} {given} {field!r}: give it a text")
        if not is_text(value):
            raise UserError(f"{self.place} has half of a surrogate pair in its field {field!r}: give it a text")
        return value


def read_rows(path: Path) -> list[Row]:
    """Returns all rows of a file. Raises `UserError` when it is missing or empty, or a line is not a JSON object."""
    try:
        whole = path.read_bytes()
        lines = (gzip.decompress(whole) if path.suffix == ".gz" else whole).split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path} cannot be read ({why}): give the path of a JSON Lines file") from error
    rows = [_row(line, f"line {n} of {path}") for n, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{path} is empty: give a file with one JSON object a line")
    return rows


def _row(line: bytes, place: str) -> Row:
    try:
        values = json.loads(line.decode("utf-8-sig"))  # some editors put a mark of the encoding first
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not text in UTF-8 ({error.reason}): save the file in that encoding") from error
    except (ValueError, RecursionError) as error:  # not JSON, or nested beyond reason
        raise UserError(f"{place} is not JSON ({error}): each line must be one object such as {{...}}") from error
    if not isinstance(values, dict):
        raise UserError(f"{place} is JSON but no object ({type(values).__name__}): each line must be one {{...}}")
    return Row(values, place)
