"""Reads labelled texts for a toxicity classifier: JSON Lines or CSV (gzipped if the name ends in `.gz`).

Invariant: every line is either used or refused under a reason that is counted; equal texts are used once, with their
first label, so that none is on both sides of a split.
"""

from __future__ import annotations

import csv
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tba.errors import UserError
from tba.tables import Refusal, cells, read_table
from tba.types import Json, is_text


@dataclass(frozen=True)
class LabelledFields:
    """Names the fields of a line that hold its text and its label."""

    text: str = "text"  # field of the text; in a CSV file without a header, a column's number from 0
    label: str = "label"  # field of the label, likewise
    toxic: tuple[str, ...] = ("1", "true", "toxic")  # labels that mean toxic, in any case; all others do not


@dataclass
class LabelledTexts:
    """The labelled texts of a file, and how many lines were refused."""

    texts: list[str] = field(default_factory=list)
    toxic: list[bool] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


def read_labelled(path: Path, fields: LabelledFields) -> LabelledTexts:
    """Returns all labelled texts of a file. Raises `UserError` when it cannot be read or has none."""
    texts, earlier_texts = LabelledTexts(), set[str]()
    is_csv = path.name.removesuffix(".gz").endswith(".csv")
    for values in _csv(path, fields) if is_csv else (values for _, values in read_table(path)):
        if isinstance(values, Refusal):
            texts.refused[values.reason] += 1
            continue
        text, label = values.get(fields.text), values.get(fields.label)
        reason = _reason(text, label, earlier_texts)
        if reason:
            texts.refused[reason] += 1
            continue
        earlier_texts.add(str(text))
        texts.texts.append(str(text))
        texts.toxic.append(_label_text(label) in {_label_text(value) for value in fields.toxic})
    if not texts.texts:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in texts.refused.most_common())
        raise UserError(
            f"{path} has no labelled text ({reasons or 'it is empty'}): name its fields with --fields.text and "
            "--fields.label (numbers from 0 for a CSV file without a heading)"
        )
    return texts


def _reason(text: Json, label: Json, earlier_texts: set[str]) -> str:
    if not isinstance(text, str) or not text.strip():
        return "no text"
    if not is_text(text):
        return "half of a surrogate pair"
    if label is None or isinstance(label, list | dict):
        return "no label"
    return "a text that was there before" if text in earlier_texts else ""


def _label_text(label: Json) -> str:
    """Returns numbers and booleans as they would be written in a file."""
    return json.dumps(label) if isinstance(label, bool | int | float) else str(label).strip().lower()


def _csv(path: Path, fields: LabelledFields) -> Iterator[Mapping[str, Json] | Refusal]:
    try:
        rows = list(cells(path, errors="replace"))
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path} cannot be read ({cause}): give a CSV or JSON Lines file") from error
    if fields.text.isdigit() and fields.label.isdigit():  # columns by number: the file has no header
        return _mappings(rows, [str(n) for n in range(max(map(len, rows), default=0))])
    return _mappings(rows[1:], rows[0] if rows else [])


def _mappings(rows: Iterable[Sequence[str]], names: Sequence[str]) -> Iterator[Mapping[str, Json] | Refusal]:
    return (dict(zip(names, row, strict=False)) for row in rows if row)
