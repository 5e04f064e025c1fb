"""Declared types and JSON values: what fits, and the sentence about what does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from tba.json_input import check_json, parse_json
from tba.types import Version

DEEP = 200_000


@dataclass
class Shape:
    """Two fields, one of them with a default."""

    n: int
    kind: Literal["a", "b"] = "a"


def test_kinds_are_annotations() -> None:
    assert parse_json('{"a": 1, "b": [0.5, 2]}', a=int, b=list[float], c=str | None) == {"a": 1, "b": [0.5, 2]}
    assert parse_json(b'{"n": 3}', Shape) == Shape(3)
    assert parse_json('{"1": ["0.2", null]}', dict[int, tuple[Version, str | None]]) == {1: (Version(0, 2), None)}
    for value, kind, sentence in (
        (True, int, "it is True, it must be a whole number"),
        (2**70, int, "must be a whole number"),
        (float("inf"), float, "it is inf, it must be a number"),
        ("x.y", Version, "it is 'x.y', it must be a version such as '0.12'"),
        ([1, "2"], list[int], "number 1 of it is '2', it must be a whole number"),
        ([1], tuple[int, int], "it is a list of 1, it must be one of 2"),
        ({"a": {"b": None}}, dict[str, dict[str, int]], "'b' of 'a' of it is missing or null"),
        ({"n": 1, "kind": "c"}, Shape, "kind is 'c', it must be 'a' or 'b'"),
        ({"n": 1, "m": 2}, Shape, "it has a field 'm' that is unknown"),
        ({}, Shape, "n is missing or null, it must be a whole number"),
        (3, str | None, "it is 3, it must be a text or null"),
    ):
        with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
            check_json(value, kind, "it")
    with pytest.raises(ValueError, match="not JSON"):
        parse_json("[" * DEEP, list[Any])
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        parse_json("[" * 65 + "]" * 65, list[Any])
    assert parse_json("[" * 64 + "]" * 64, list[Any])
