"""Where the row with a key lies: a hash table in two arrays, so that a million entries are not a million objects.

Invariant: with linear probing, every cell between a key's home and its place is taken. Keys may come more than once:
who looks says which of them is meant. Finding, adding and removing cost O(1); growing is done in whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_FREE = -1
_SMALLEST = 1 << 10


class Places:
    """64-bit keys -> rows (0 and above)."""

    def __init__(self) -> None:
        self._count = 0
        self._make(_SMALLEST)

    def __len__(self) -> int:
        return self._count

    def find(self, key: int, meant: Callable[[int], bool]) -> int | None:
        """The row with this key that is meant, or None."""
        at = key & self._mask
        while (row := self._row[at]) != _FREE:
            if self._key[at] == key and meant(row):
                return row
            at = (at + 1) & self._mask
        return None

    def add(self, key: int, row: int) -> None:
        """Add another entry."""
        if 2 * self._count >= self._mask:
            self._grow()
        at = key & self._mask
        while self._row[at] != _FREE:
            at = (at + 1) & self._mask
        self._key[at], self._row[at] = key, row
        self._count += 1

    def remove(self, key: int, row: int) -> None:
        """The entry must be there. What lies behind it moves up, so that no gap is left before its place."""
        gap = key & self._mask
        while self._row[gap] != row:
            gap = (gap + 1) & self._mask
        at = gap
        while True:
            self._row[gap] = _FREE
            while True:
                at = (at + 1) & self._mask
                if self._row[at] == _FREE:
                    self._count -= 1
                    return
                home = self._key[at] & self._mask
                if (at - home) & self._mask >= (at - gap) & self._mask:
                    break  # its home is not between the gap and itself
            self._key[gap], self._row[gap] = self._key[at], self._row[at]
            gap = at

    def _make(self, cells: int) -> None:
        self._mask = cells - 1
        self._keys, self._rows = np.zeros(cells, dtype=np.int64), np.full(cells, _FREE, dtype=np.int32)
        self._key, self._row = self._keys.data, self._rows.data  # memory views: a cell is read at half the cost

    def _grow(self) -> None:
        taken = self._rows != _FREE
        keys, rows = self._keys[taken], self._rows[taken]
        self._make(4 * (self._mask + 1))
        at = keys & self._mask
        while len(keys):  # each into its cell where that is free, the first of several; the others one further
            free = np.flatnonzero(self._rows[at] == _FREE)
            _, first = np.unique(at[free], return_index=True)
            placed = free[first]
            self._keys[at[placed]], self._rows[at[placed]] = keys[placed], rows[placed]
            left = np.ones(len(keys), dtype=np.bool_)
            left[placed] = False
            keys, rows, at = keys[left], rows[left], (at[left] + 1) & self._mask
