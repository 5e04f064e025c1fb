"""Values of declared types: what the words of a command line, a value in code, or a JSON value stands for.

Invariant: the declared type decides, and nothing is guessed from a value. What the type excludes ends in a
`ValueError` of one clause, which says where the value is.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, Union, runtime_checkable

# Where a value comes from. Words of a command line are a text or a list of texts. A value in code is converted where it
# can mean only one value of the type, and a component is taken as it is. Of JSON an object becomes the instance of a
# dataclass, and a text or list the value of a class that is spelt so; numbers and texts are checked and not converted.
Source: TypeAlias = Literal["words", "code", "json"]

SCALARS: dict[Any, str] = {str: "a text", int: "a whole number", float: "a number", Path: "a path"}
SCALARS |= {bool: "True or False", NoneType: "None"}
_JSON_TYPES = {**SCALARS, bool: "true or false", NoneType: "null", list: "a list", dict: "an object"}
_BASIC = (str, Path, Real, NoneType, list, tuple, set, Mapping)  # types of values that are no components
_UNIONS = (Union, UnionType)
_LARGEST_SETTING = 2**63  # of whole numbers: torch and SQLite take no larger ones
_LARGEST_IN_JSON = 2**64
_has_fields: Callable[[object], bool] = is_dataclass  # without telling a type checker what kind it is


@runtime_checkable
class SpelledInJson(Protocol):
    """A class whose values are texts in JSON."""

    SPELLING: ClassVar[str]  # what such a text is, for messages
    parse: Callable[[str], Any]  # raises ValueError for any other text


class Mismatch(ValueError):
    """Says that the value at a place is not of a type: `Mismatch(value, kind, place)`."""

    def __str__(self) -> str:
        value, kind, place = self.args
        text = "missing or null" if value is None else repr(value)
        return f"{place} is {text if len(text) <= 60 else text[:57] + '...'}, it must be {describe(kind, 'json')}"


def convert(value: Any, kind: Any, source: Source, place: str = "it") -> Any:
    """Returns the value of the declared type `kind` that `value` stands for; `place` names it in messages.

    Raises `ValueError` if there is none.
    """
    if kind is Any:
        return value
    origin, json_type = typing.get_origin(kind) or kind, _json_type(kind) if source == "json" else None
    if source == "words" and isinstance(value, list) and origin is not tuple:
        if len(value) != 1:
            raise Mismatch(value, kind, place)
        value = value[0]
    if origin in _UNIONS:
        return _convert_to_option(value, kind, source, place)
    if origin is tuple or json_type is list:
        return _convert_items(value, kind, source, place)
    if json_type is dict:
        return _check_object(value, kind, place)
    if source == "code" and origin is not Literal and kind not in SCALARS:  # nothing is known of a protocol
        return _make_settings(value, kind) if _has_fields(kind) and isinstance(value, _BASIC) else value
    try:
        return _convert_scalar(value, kind, source)
    except (ValueError, OverflowError):
        raise Mismatch(value, kind, place) from None


def _convert_to_option(value: Any, union: Any, source: Source, place: str) -> Any:
    """Returns what a value stands for by the first type of a union that does not exclude it: in code by its own type
    first, and by text, which excludes little, last.
    """
    explanation: ValueError | None = None
    options = sorted(typing.get_args(union), key=lambda kind: (kind is not NoneType, kind in (str, Path)))
    for kind in options if source == "words" else sorted(options, key=lambda kind: type(value) is not kind):
        try:
            return convert(value, kind, source, place)
        except ValueError as error:
            if not isinstance(error, Mismatch) or error.args[2] != place:  # the value fits, and what is in it does not
                explanation = explanation or error
    raise explanation or Mismatch(value, union, place)


def _convert_items(value: Any, kind: Any, source: Source, place: str) -> Any:
    parts = typing.get_args(kind) or (Any,)
    is_tuple = typing.get_origin(kind) is tuple
    is_fixed = is_tuple and Ellipsis not in parts
    if isinstance(value, str | Path | Real) and (source == "words" or (source == "code" and not is_fixed)):
        value = (value,)
    if not isinstance(value, list if source == "json" else (list, tuple)):
        raise Mismatch(value, kind, place)
    kinds = parts if is_fixed else parts[:1] * len(value)
    if len(kinds) != len(value):
        raise ValueError(f"{place} is a list of {len(value)}, it must be one of {len(kinds)}")
    items = tuple(convert(value[i], kinds[i], source, f"number {i} of {place}") for i in range(len(value)))
    if source == "json" and not is_tuple:
        return list(items)
    return value if isinstance(value, tuple) and items == value else items


def _check_object(value: Any, kind: Any, place: str) -> Any:
    """Returns the instance of a dataclass that a JSON object has the fields of, or the dictionary with values of one
    type; an object with the fields of a dictionary stays as it is.
    """
    if not isinstance(value, dict):
        raise Mismatch(value, dict, place)
    types, parts = kind if isinstance(kind, dict) else {}, typing.get_args(kind)
    if _has_fields(kind):
        required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
        types = {name: hint for name, hint in field_types(kind).items() if name in value.keys() | required}
    members: dict[str, Any] = {
        name: convert(value.get(name), hint, "json", name if place == "it" else f"{name} of {place}")
        for name, hint in types.items()
    }
    if _has_fields(kind):
        if unknown_names := value.keys() - field_types(kind).keys():
            raise ValueError(f"{place} has a field {min(unknown_names)[:40]!r} that is unknown")
        return kind(**members)
    if not parts:
        return value
    return {
        int(name) if parts[0] is int else name: convert(inner, parts[1], "json", f"{name[:40]!r} of {place}")
        for name, inner in value.items()
    }


def _convert_scalar(value: Any, kind: Any, source: Source) -> Any:
    """Returns a number, text, path, truth value or None, or one of a few values. Raises `ValueError` for another."""
    is_literal, is_number = typing.get_origin(kind) is Literal, kind in (int, float)
    if is_literal or (source == "words" and kind in (bool, NoneType)):
        choices = typing.get_args(kind) if is_literal else (True, False) if kind is bool else (None,)
        by_spelling = {} if source == "json" else {str(choice): choice for choice in choices}
        if value not in choices and (not isinstance(value, str) or value not in by_spelling):
            raise ValueError
        return value if value in choices else by_spelling[value]
    if source == "json" and isinstance(kind, SpelledInJson):
        return kind.parse(value if isinstance(value, str) else "")
    accepted = (int, float) if kind is float else kind
    if source != "json" and is_number and isinstance(value, str | Real) and not isinstance(value, accepted):
        number = kind(value)
        if number != (number if isinstance(value, str) else value) or (kind is int and abs(number) >= _LARGEST_SETTING):
            raise ValueError
        return number
    if source != "json" and kind in (str, Path) and isinstance(value, str | Path):
        return value if isinstance(value, kind) else kind(value)
    if not isinstance(value, accepted) or (is_number and isinstance(value, bool)):
        raise ValueError
    largest = _LARGEST_IN_JSON if isinstance(value, int) else math.inf
    if source == "json" and is_number and not abs(value) < largest:
        raise ValueError
    return value


def _make_settings(value: Any, kind: Any) -> Any:
    """Returns the settings with those fields, or whose only field has that value. Raises `ValueError` for neither."""
    types = field_types(kind)
    if isinstance(value, Mapping) and value.keys() <= types.keys():
        return kind(**value)
    if len(types) != 1:
        raise Mismatch(value, kind, "it")
    return kind(*(convert(value, hint, "code") for hint in types.values()))


@cache
def field_types(kind: Any) -> Mapping[str, Any]:
    """Returns the declared types of the fields that are given to a dataclass when it is made."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind) if f.init}


def describe(kind: Any, source: Source = "code") -> str:
    """Returns in words what a value of this type is."""
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in _UNIONS:
        return " or ".join(describe(part, source) for part in parts)
    if origin is Literal:
        return " or ".join(map(repr, parts)) if source == "json" else f"one of {', '.join(map(str, parts))}"
    if source == "json":
        return kind.SPELLING if isinstance(kind, SpelledInJson) else _JSON_TYPES.get(_json_type(kind), "an object")
    if origin is tuple:
        return f"any number of: {describe(parts[0])}" if Ellipsis in parts else " and ".join(map(describe, parts))
    if _has_fields(kind) and len(types := field_types(kind)) == 1:
        return describe(*types.values())
    return SCALARS.get(kind) or f"{getattr(kind, '__name__', kind)}(...)"


def _json_type(kind: Any) -> Any:
    """Returns the Python type of JSON values of a declared type: a list or dict for one that holds others."""
    origin = typing.get_origin(kind) or kind
    if isinstance(kind, dict) or (_has_fields(kind) and not isinstance(kind, SpelledInJson)):
        return dict
    if not isinstance(origin, type) or origin is str:
        return origin
    return list if issubclass(origin, Sequence) else dict if issubclass(origin, Mapping) else origin
