"""Values as JSON: what comes back is what went in, and two are the same where Python says so."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.rewards.sandbox_values import Unreadable, canonical, decode_value, encode_value

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.binary(max_size=3)
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
VALUES = st.recursive(
    HASHABLE | st.sets(HASHABLE, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(HASHABLE, inner, max_size=3),
    max_leaves=6,
)
Pair = namedtuple("Pair", "a b")


def sent(value: Any) -> Any:
    """A value as it arrives."""
    return json.loads(json.dumps(encode_value(value)))


@given(VALUES)
def test_what_is_decoded_is_what_was_encoded(value: Any) -> None:
    decoded = decode_value(sent(value))
    assert decoded == value
    assert type(decoded) is type(value)


@given(VALUES, VALUES)
def test_canonical_texts_are_equal_where_the_values_are(a: Any, b: Any) -> None:
    assert (canonical(sent(a)) == canonical(encode_value(b))) == (a == b)
    assert canonical(sent(a)) == canonical(encode_value(a))


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (defaultdict(int, {1: 2}), {1: 2}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (Pair(1, 2), (1, 2)),
        (True, 1),
        (2.0, 2),
        (range(0, 4, 2), range(0, 3, 2)),
        ({1: 2}.keys(), {1}),
    ],
)
def test_values_that_python_calls_equal_are(value: Any, plain: Any) -> None:
    assert canonical(sent(value)) == canonical(encode_value(plain))


@pytest.mark.parametrize(("value", "other"), [([1], (1,)), ((1,), [1]), ({1}, [1]), ("1", 1), (None, 0), (deque(), [])])
def test_values_that_python_calls_different_are(value: Any, other: Any) -> None:
    assert canonical(sent(value)) != canonical(encode_value(other))


def test_as_json_has_them_tuples_are_lists_and_keys_are_texts() -> None:
    assert canonical(sent((1, {1: (2,)})), as_json=True) == canonical(encode_value([1, {"1": [2]}]), as_json=True)
    assert canonical(sent(x for x in "ab"), as_json=True) == canonical(encode_value(["a", "b"]), as_json=True)


def test_an_integer_of_many_digits_is_carried() -> None:
    assert decode_value(sent(-(10**5000))) == -(10**5000)
    assert canonical(sent(10**5000)) == canonical(encode_value(10**5000))


def test_nan_and_what_is_no_data_equal_nothing() -> None:
    assert canonical(sent(math.nan)) is None
    assert canonical(["list", [["object", 0]]]) is None
    assert canonical(sent(iter([1]))) is None


class Liar(int):
    """Says that it equals everything, and that it is 7."""

    def __eq__(self, other: object) -> bool:
        return True

    def __int__(self) -> int:
        return 7

    def __index__(self) -> int:
        return 7

    __hash__ = int.__hash__


def test_a_class_derived_from_data_is_what_it_was_made_from_whatever_it_says() -> None:
    assert canonical(sent(Liar(3))) == canonical(3)


@pytest.mark.parametrize(
    "encoded",
    [
        {},
        [],
        ["list"],
        ["list", 3],
        ["nothing", []],
        ["int", "x"],
        ["dict", [[1]]],
        ["set", [["list", []]]],
        ["range", "x"],
    ],
)
def test_what_is_no_encoded_value_is_refused(encoded: Any) -> None:
    with pytest.raises(Unreadable):
        decode_value(encoded)


def test_deep_and_endless_and_foreign_values_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    within: list[Any] = []
    within.append(within)
    for value in (deep, within, (i for i in iter(int, 1)), object(), print):
        with pytest.raises(ValueError, match=r"too large|no data"):
            encode_value(value)
    nested: Any = 1
    for _ in range(100):
        nested = ["list", [nested]]
    for read in (decode_value, canonical):
        with pytest.raises(Unreadable, match="nested"):
            read(nested)


def test_a_deep_value_has_a_text_of_its_own_size() -> None:
    value: Any = "'\""
    for _ in range(50):
        value = {frozenset({1}): value}
    text = canonical(sent(value))
    assert text is not None
    assert len(text) < 10_000


def test_a_set_has_a_text_of_one_size_whatever_is_in_it() -> None:
    for one, many in (({1}, set(map(str, range(1000)))), ({1: 1}, dict.fromkeys(range(1000), "x"))):
        assert len(canonical(encode_value(one)) or "") == len(canonical(encode_value(many)) or "")


@pytest.mark.parametrize("value", [2.0**127, -(2.0**128), 9e307, 5e-324, 0.1, -0.0, math.inf, -math.inf])
def test_a_float_has_a_short_text_and_equals_its_integer(value: float) -> None:
    text = canonical(sent(value))
    assert len(text or "") < 50
    if value == value and abs(value) >= 1 and not math.isinf(value):
        assert text == canonical(sent(int(value)))
        assert text != canonical(sent(int(value) + 1))
    assert text == canonical(["complex", value, 0])


def test_whole_numbers_are_keys_of_json_up_to_many_digits() -> None:
    for key in (0, -7, 10**18, 2**127):
        assert canonical(sent({key: 1}), as_json=True) == canonical(sent({str(key): 1}), as_json=True)


def test_a_number_in_nested_lists_is_refused() -> None:
    nested: Any = "1"
    for _ in range(100_000):
        nested = [nested]
    for kind in ("int", "complex", "bytes", "range"):
        with pytest.raises(Unreadable):
            canonical([kind, nested, nested, nested])


def test_a_set_that_would_hash_slowly_is_not_built_and_still_compared() -> None:
    slow = ["set", [["int", hex(k * (2**61 - 1))] for k in range(20_000)]]
    with pytest.raises(Unreadable, match="more than"):
        decode_value(slow)
    assert canonical(slow) != canonical(encode_value({1}))
