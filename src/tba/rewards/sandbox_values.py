"""Values of Python as JSON: what a sandboxed program is given and gives back, without pickle.

Invariant: what is decoded or compared is plain data, whatever a program has sent: no class of the program, none of its
methods and no hash of its choosing takes part. `canonical` maps two encoded values to the same text exactly where plain
Python values of these types would be equal (`1 == 1.0 == True`, `[1] != (1,)`, sets without an order). It writes each
part of a value once, however deep that lies.

None, booleans, strings, floats and integers of up to 15 digits are JSON's own; all else is a list that begins with its
kind. What is no data stays where it is, and travels as `["object", number]`.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

_DEEPEST = 60
_MOST_ITEMS = 1 << 20  # of one value
_MOST_HASHED = 10_000  # items of all sets and dictionaries of a decoded value: an attacker may choose equal hashes
_LARGEST = 10**15  # integers beyond are written in hexadecimal digits
_LARGEST_IN_DIGITS = 1 << 128  # whole numbers beyond are compared in hexadecimal digits, which take no time to find
_SCALARS: tuple[type, ...] = (str, int, float, complex, bytes, bytearray, range)
_COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_SEQUENCES: dict[str, Any] = {**_COLLECTIONS, "iterator": iter}
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.items()))
_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter("")), type(iter(range(0))), type(iter(set())))
_ITERATORS += (
    map,
    filter,
    zip,
    enumerate,
    reversed,
    type(reversed([])),
    islice,
    type(_ for _ in ()),
    type({}.values()),
)


class Unreadable(ValueError):
    """Raised for what is no encoded value."""


def encode_value(
    value: Any, keep: Callable[[Any], int] | None = None, depth: int = 0, budget: list[int] | None = None
) -> Any:
    """Returns a value as JSON. Raises `ValueError` for one that is too large or deep, or that is no data.

    keep: takes an object that is no data and returns its number. An instance of a class derived from list, dict, ... is
    encoded as what it is derived from; an iterator as its items, which are taken out of it.
    """
    budget = [_MOST_ITEMS] if budget is None else budget  # items that are left
    budget[0] -= 1
    if depth > _DEEPEST or budget[0] < 0:
        raise ValueError("the value is too large, or too deeply nested")
    if value is None or value is True or value is False:
        return value
    for scalar in _SCALARS:
        if isinstance(value, scalar):
            return _encode_scalar(scalar, value)

    def inner(item: Any) -> Any:
        return encode_value(item, keep, depth + 1, budget)

    if isinstance(value, dict):
        return ["dict", [[inner(k), inner(v)] for k, v in dict.items(value)]]
    for kind, base in _COLLECTIONS.items():
        if isinstance(value, base):
            return [kind, [inner(item) for item in base.__iter__(value)]]
    for kind, types in (("set", _VIEWS), ("iterator", _ITERATORS)):
        if isinstance(value, types):
            items: Any = value
            return [kind, [inner(item) for item in items]]
    if keep is None:
        raise ValueError(f"a {type(value).__name__} is no data")
    return ["object", keep(value)]


def _encode_scalar(base: type, value: Any) -> Any:
    if base is str:
        return str.__str__(value)
    if base is int:
        number = int.__int__(value)
        return number if -_LARGEST < number < _LARGEST else ["int", hex(number)]
    if base is float:
        return float.__float__(value)
    if base is complex:
        return ["complex", value.real, value.imag]
    return ["range", str(value.start), str(value.stop), str(value.step)] if base is range else ["bytes", value.hex()]


def decode_value(encoded: Any, find: Callable[[int], Any] | None = None) -> Any:
    """Returns the plain value that was encoded. Raises `Unreadable` for anything else.

    find: returns what stands for the object of a number.
    """
    return _Decoder(find).value(encoded, 0)


class _Decoder:
    """Decodes one value, and counts what it has to hash."""

    def __init__(self, find: Callable[[int], Any] | None) -> None:
        self._find, self._hashed = find, 0

    def value(self, encoded: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise Unreadable("it is too deeply nested")
        if not isinstance(encoded, list):
            if isinstance(encoded, dict):
                raise Unreadable("it has an object of JSON")
            return encoded
        kind, content = _split(encoded)
        if kind == "object" and self._find is not None and isinstance(content, int):
            return self._find(content)
        if kind in ("int", "complex", "bytes", "range"):
            return _decode_scalar(kind, encoded)
        if kind == "dict":
            pairs = [(self.value(k, depth + 1), self.value(v, depth + 1)) for k, v in _pairs(content)]
            return self._hash(dict, pairs)
        if kind not in _SEQUENCES:
            raise Unreadable(f"it has the kind {kind!r:.40}")
        items = [self.value(item, depth + 1) for item in content]
        return self._hash(_SEQUENCES[kind], items) if kind in ("set", "frozenset") else _SEQUENCES[kind](items)

    def _hash(self, build: Callable[[list[Any]], Any], items: list[Any]) -> Any:
        self._hashed += len(items)
        if self._hashed > _MOST_HASHED:
            raise Unreadable(f"its sets and dictionaries have more than {_MOST_HASHED} items")
        try:
            return build(items)
        except TypeError:
            raise Unreadable("it has an item that cannot be hashed") from None


def canonical(encoded: Any, as_json: bool = False) -> str | None:
    """Returns a text that is the same for two encoded values exactly where the values are equal; None: it equals none.

    as_json: values are compared as JSON has them: tuples and iterators are lists, and keys are texts. Raises
    `Unreadable` for what is no encoded value.
    """
    try:
        return json.dumps(_canonical(encoded, as_json, 0))
    except _EqualsNothing:
        return None


class _EqualsNothing(Exception):
    """Raised for NaN, for objects and for iterators."""


def _canonical(encoded: Any, as_json: bool, depth: int) -> Any:
    if depth > _DEEPEST:
        raise Unreadable("it is too deeply nested")
    if encoded is None or isinstance(encoded, str):
        return encoded
    if isinstance(encoded, bool | int | float):
        return _canonical_number(encoded)
    kind, content = _split(encoded)
    if kind in ("int", "complex"):
        value = _decode_scalar(kind, encoded)
        real, imaginary = _canonical_number(value.real), _canonical_number(value.imag)
        return ["c", real, imaginary] if value.imag else real
    if kind == "range":
        items = _decode_scalar(kind, encoded)
        return ["r", *([str(items[0]), str(items[-1]), str(items.step * (items[:2] != items[:1]))] if items else [])]
    if kind == "bytes":
        return ["b", _decode_scalar(kind, encoded).hex()]
    if kind == "dict":
        pairs = [[_canonical(k, as_json, depth + 1), _canonical(v, as_json, depth + 1)] for k, v in _pairs(content)]
        return ["d", _digest([_json_key(k) if as_json else k, v] for k, v in pairs)]
    if kind == "object" or (kind == "iterator" and not as_json):
        raise _EqualsNothing
    if kind not in _SEQUENCES:
        raise Unreadable(f"it has the kind {kind!r:.40}")
    items = [_canonical(item, as_json, depth + 1) for item in content]
    if kind in ("set", "frozenset"):
        return ["s", _digest(items)]
    return ["list" if as_json else kind, *items]


def _digest(items: Iterable[Any]) -> str:
    """Returns a digest of canonical items in any order, so that no level of nesting is written again at the next."""
    return hashlib.sha256("\n".join(sorted(map(json.dumps, items))).encode()).hexdigest()


def _json_key(key: Any) -> Any:
    """Returns a canonical key as JSON has it: a text also where it is a whole number."""
    is_integer = isinstance(key, list) and key[0] == "n" and key[1].removeprefix("-").isdigit()
    return key[1] if is_integer else key


def _canonical_number(value: float) -> Any:
    if value != value:
        raise _EqualsNothing
    if abs(value) < _LARGEST_IN_DIGITS and value == int(value):
        return ["n", str(int(value))]
    with suppress(OverflowError):  # an integer beyond all floats
        if (number := float(value)) == value:
            return ["n", number.hex()]
    return ["n", hex(int(value))]


def _split(encoded: Any) -> tuple[str, Any]:
    """Returns the kind and the content of an encoded value that is not JSON's own."""
    if not (isinstance(encoded, list) and len(encoded) >= 2 and isinstance(encoded[0], str)):
        raise Unreadable("it has no kind")
    kind, content = encoded[0], encoded[1]
    if kind in _SEQUENCES and not isinstance(content, list):
        raise Unreadable(f"its {kind} has no items")
    return kind, content


def _pairs(content: Any) -> Iterator[list[Any]]:
    for pair in content if isinstance(content, list) else [None]:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise Unreadable("it has a dictionary without pairs")
        yield pair


def _decode_scalar(kind: str, encoded: list[Any]) -> Any:
    try:
        if kind == "int":
            return int(encoded[1], 16)
        if kind == "complex":
            return complex(float(encoded[1]), float(encoded[2]))
        return bytes.fromhex(encoded[1]) if kind == "bytes" else range(*map(int, encoded[1:4]))
    except (ValueError, TypeError, IndexError, OverflowError):
        raise Unreadable(f"its {kind} cannot be read") from None
