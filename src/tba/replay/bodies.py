"""Bodies of trajectories in memory, in a few large blocks instead of an object each.

Invariant: a body is read as it was put until it is removed. A block in which nothing is wanted any longer is given back
at once, and what is wanted of blocks that are mostly dead moves together, so that no more than twice what is wanted is
held, and a few blocks. Putting, reading and removing cost O(1), amortised.
"""

from __future__ import annotations

from array import array
from typing import TypeVar

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 1 << 20
_SPARE = 8  # blocks' worth that may be dead without anything being moved
_NONE = -1
_Number = TypeVar("_Number", bound=np.generic)


class Bodies:
    """Bytes by row, a number from 0."""

    def __init__(self) -> None:
        self._blocks: list[bytearray] = []  # empty: given back
        self._filled: list[int] = []  # bytes of each block
        self._wanted: list[int] = []  # and how many of them are
        self._members: list[array[int]] = []  # rows that were put into each, also those that have left
        self._free: list[int] = []  # numbers of blocks that were given back
        self._moving = False
        self._block = np.zeros(0, dtype=np.int32)  # by row
        self._at = np.zeros(0, dtype=np.int32)
        self._size = np.zeros(0, dtype=np.int32)
        self._current = self._open(BLOCK_BYTES)

    @property
    def wanted_bytes(self) -> int:
        """Of the bodies that are there."""
        return sum(self._wanted)

    @property
    def held_bytes(self) -> int:
        """The bytes that the blocks take."""
        return sum(map(len, self._blocks))

    def put(self, row: int, body: bytes) -> None:
        """`row` must have none."""
        if row >= len(self._block):
            self._block, self._at, self._size = (widened(c, row + 1) for c in (self._block, self._at, self._size))
        if self._filled[self._current] + len(body) > len(self._blocks[self._current]):
            self._next_block(len(body))
        number = self._current
        at = self._filled[number]
        self._blocks[number][at : at + len(body)] = body
        self._block[row], self._at[row], self._size[row] = number, at, len(body)
        self._filled[number] = at + len(body)
        self._wanted[number] += len(body)
        self._members[number].append(row)

    def get(self, row: int) -> bytes:
        """A copy of one body's bytes."""
        at = self._at.item(row)
        return bytes(memoryview(self._blocks[self._block.item(row)])[at : at + self._size.item(row)])

    def has_at(self, row: int, at: int, data: bytes) -> bool:
        """Whether the row's body has `data` at this place."""
        start = self._at.item(row) + at
        return self._blocks[self._block.item(row)].startswith(data, start)

    def remove(self, row: int) -> None:
        """`row` must have one."""
        number = int(self._block[row])
        self._block[row] = _NONE
        self._wanted[number] -= int(self._size[row])
        if self._wanted[number] == 0 and number != self._current:
            self._give_back(number)

    def _next_block(self, size: int) -> None:
        full = self._current
        self._current = self._open(max(BLOCK_BYTES, size))
        if self._wanted[full] == 0:
            self._give_back(full)
        if not self._moving and self.held_bytes > 2 * self.wanted_bytes + _SPARE * BLOCK_BYTES:
            self._moving = True
            mostly_dead = [
                n for n, block in enumerate(self._blocks) if n != self._current and 2 * self._wanted[n] < len(block)
            ]
            for number in mostly_dead:
                self._move_out_of(number)
            self._moving = False

    def _move_out_of(self, number: int) -> None:
        for row in self._members[number]:
            if self._block[row] == number:  # once, though it may have been put here twice
                body = self.get(row)
                self.remove(row)
                self.put(row, body)

    def _open(self, size: int) -> int:
        if not self._free:
            self._free.append(len(self._blocks))
            self._blocks.append(bytearray())
            self._filled.append(0)
            self._wanted.append(0)
            self._members.append(array("i"))
        number = self._free.pop()
        self._blocks[number], self._filled[number], self._members[number] = bytearray(size), 0, array("i")
        return number

    def _give_back(self, number: int) -> None:
        self._blocks[number], self._filled[number], self._members[number] = bytearray(), 0, array("i")
        self._free.append(number)


def widened(column: npt.NDArray[_Number], rows: int, least: int = 1024) -> npt.NDArray[_Number]:
    """The column with room for at least so many rows, and for `least`; the new ones are zero."""
    wider = np.zeros(max(rows, 2 * len(column), least), dtype=column.dtype)
    wider[: len(column)] = column
    return wider
