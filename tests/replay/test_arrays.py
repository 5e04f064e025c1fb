"""What the trainer's memory is made of: a hash table and blocks of bytes, against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import tba.replay.bodies
from tba.replay.bodies import BLOCK_BYTES, Bodies
from tba.replay.hash_index import Places

# Few homes in a small table: many collide, some wrap around its end.
KEYS = st.sampled_from([0, 1, 2, 3, 1021, 1022, 1023, 1024, 1025, 2047, -1, -2, 5 << 40, -(5 << 40)])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(KEYS, st.integers(0, 30), st.booleans()), max_size=120))
def test_a_table_finds_exactly_what_is_in_it(operations: list[tuple[int, int, bool]]) -> None:
    places, plain = Places(), dict[int, int]()  # row -> key
    for key, row, remove in operations:
        if remove and row in plain:
            places.remove(plain.pop(row), row)
        elif not remove and row not in plain:
            places.add(key, row)
            plain[row] = key
        assert len(places) == len(plain)
        for r in range(31):
            for k in {key, plain.get(r, key)}:
                found = places.find(k, lambda candidate, r=r: candidate == r)
                assert found == (r if plain.get(r) == k else None)


def test_a_table_that_grows_keeps_all_its_entries() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63 - 1, 6000).tolist()
    keys[1::2] = [key & 0xFFF for key in keys[1::2]]  # half of them collide now and then
    places = Places()
    for row, key in enumerate(keys):
        places.add(key, row)
    sample = rng.integers(0, len(keys), 300).tolist()
    for row in sample:
        assert places.find(keys[row], lambda candidate, row=row: candidate == row) == row
        assert places.find(keys[row] ^ 1 << 50, lambda candidate, row=row: candidate == row) is None


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 1500)), max_size=150))
def test_bodies_are_read_as_they_were_put_and_blocks_hold_little_more(operations: list[tuple[int, int]]) -> None:
    small = 1 << 10
    bodies, plain = Bodies(), dict[int, bytes]()
    for n, (row, size) in enumerate(operations):
        if row in plain:
            bodies.remove(row)
            del plain[row]
        else:
            plain[row] = bytes([n % 256]) * (size * small // 4)
            bodies.put(row, plain[row])
        assert bodies.wanted_bytes == sum(map(len, plain.values()))
        assert bodies.held_bytes <= 2 * bodies.wanted_bytes + 10 * BLOCK_BYTES
    assert {row: bodies.get(row) for row in plain} == plain
    assert all(bodies.has_at(row, 0, body[:4]) and not bodies.has_at(row, 1, b"\1\2") for row, body in plain.items())


def test_a_body_larger_than_a_block_has_one_of_its_own() -> None:
    bodies = Bodies()
    large = bytes(range(256)) * (tba.replay.bodies.BLOCK_BYTES // 100)
    for row in range(3):
        bodies.put(row, large)
    bodies.remove(1)
    assert bodies.get(0) == bodies.get(2) == large
    assert bodies.held_bytes < 4 * len(large) + BLOCK_BYTES
