"""The trajectories in memory as rows of a few arrays: the fields that the rules need in columns, the rest as bytes.

Invariant: a trajectory that is asked for equals what was added, and nothing that is held of it (its body, its uid and
numbers) is tracked by the garbage collector. A row keeps its number until it is removed; numbers are used again.
Everything but a list of all rows costs O(1), amortised.

Bodies beyond a number of bytes are not held: of the rows that have been here longest they are read from their source
again when they are asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, overload
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from tba.replay.codec import Damaged, Stored, decode_logs, decode_trajectory, encode_logs, tokens_of
from tba.types import FloatArray, IntArray, Prompt, Trajectory, Version

_Number = TypeVar("_Number", bound=np.generic)


class Lost(Exception):
    """Raised for a row whose body is not in memory and cannot be read from its source any more."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row = row


class Rows:
    """Keeps trajectories in columns, by row. The values of a row that does not exist are meaningless.

    read: gives the body at a place of the source, or raises `Damaged`; None: all bodies are held. room: bytes of bodies
    that are held otherwise.
    """

    def __init__(self, read: Callable[[int], bytes] | None = None, room: float = 0.0) -> None:
        self.length = np.zeros(0, dtype=np.int32)
        self.reward = np.zeros(0, dtype=np.float64)
        self.incarnation = np.zeros(0, dtype=np.int32)  # of the oldest weights that sampled a part of it
        self.step = np.zeros(0, dtype=np.int32)
        self.reference = np.zeros(0, dtype=np.int32)  # by number, see `reference_number`
        self.uses = np.zeros(0, dtype=np.int32)
        self.arrival = np.zeros(0, dtype=np.int64)
        self.is_recent = np.zeros(0, dtype=np.bool_)
        self.passing = np.zeros(0, dtype=np.int8)  # why it is no longer kept, where it is here only while it is recent
        self._standing = np.zeros(0, dtype=np.float64)  # its reward while it is kept, else infinite
        self._digest = np.zeros(0, dtype=np.uint64)  # of the completion
        self._uids: list[str] = []
        self._bodies: list[bytes] = []
        self._read, self._room = read, room
        self._held = 0  # bytes of bodies
        self._here: OrderedDict[int, None] = OrderedDict()  # rows whose bodies may be let go of, in order of arrival
        self._spilled: OrderedDict[int, None] = OrderedDict()  # rows whose bodies were, in that order
        self._scores: dict[int, bytes] = {}  # log-probabilities under another reference than the body's
        self._by_uid: dict[str, int] = {}
        self._by_answer: dict[int, int] = {}  # by hash; the row that was added last
        self._prompts: list[Prompt | None] = []
        self._interned: WeakValueDictionary[str, Prompt] = WeakValueDictionary()  # one object for each, by key
        self._references: list[Version] = []
        self._numbers: dict[Version, int] = {}  # the number of each reference
        self._free: list[int] = []
        self._used = 0
        self._kept: OrderedDict[int, None] = OrderedDict()  # rows that are kept, in order of arrival

    def __len__(self) -> int:
        return len(self._by_uid)

    def add(self, stored: Stored, arrival: int, incarnation: int) -> int:
        """Add a trajectory; returns its row. `incarnation` is the one it counts as; nothing may have arrived later."""
        row = self._free.pop() if self._free else self._new()
        self.length[row], self.reward[row] = stored.length, stored.reward
        self.incarnation[row], self.step[row] = incarnation, stored.version.step
        self.reference[row] = self.reference_number(stored.reference)
        self.uses[row], self.arrival[row], self.is_recent[row], self._prompts[row] = (
            0,
            arrival,
            False,
            self._one_of(stored.prompt),
        )
        self.passing[row], self._standing[row] = 0, stored.reward
        self._digest[row], self._uids[row], self._bodies[row] = stored.digest, stored.uid, stored.body
        self._held += len(stored.body)
        self._by_uid[stored.uid] = self._by_answer[hash((stored.prompt.key, stored.digest))] = row
        self._kept[row] = None
        if self._read is not None:
            self._here[row] = None
            self._spill()
        return row

    def _spill(self) -> None:
        """Let go of the bodies that have been held longest, while they are too many bytes."""
        while self._held > self._room and self._here:
            row, _ = self._here.popitem(last=False)
            self._spilled[row] = None
            self._held -= len(self._bodies[row])
            self._bodies[row] = b""

    def remove(self, row: int) -> None:
        """Remove a row; its number may be given to another."""
        del self._by_uid[self._uids[row]]
        answer = hash((self.prompt(row).key, int(self._digest[row])))
        if self._by_answer.get(answer) == row:
            del self._by_answer[answer]
        self._held -= len(self._bodies[row])
        self._uids[row], self._bodies[row], self._prompts[row] = "", b"", None
        for rows in (self._here, self._spilled, self._scores):
            rows.pop(row, None)
        self._standing[row], self.passing[row] = np.inf, 0
        self._kept.pop(row, None)
        self._free.append(row)

    def let_pass(self, row: int, how: int) -> None:
        """Mark a row as no longer kept, but here for a while; `how` is its value in `passing`, above 0."""
        self._standing[row], self.passing[row] = np.inf, how
        del self._kept[row]

    def find(self, uid: str) -> int | None:
        """Returns the row of a trajectory."""
        return self._by_uid.get(uid)

    def copy_of(self, prompt: str, digest: int) -> int | None:
        """Returns the row with the same answer to the same prompt: the last that was added, while that is there."""
        row = self._by_answer.get(hash((prompt, digest)))
        if row is None or int(self._digest[row]) != digest or self.prompt(row).key != prompt:
            return None
        return row

    def rescore(self, row: int, log_reference: FloatArray, reference: Version) -> None:
        """Give a row its log-probabilities under another reference.

        Raises `ValueError` when they are not as many as its tokens.
        """
        if len(log_reference) != self.length[row]:
            raise ValueError(f"a score of {len(log_reference)} tokens is given to a trajectory of {self.length[row]}")
        self._scores[row] = encode_logs(log_reference)
        self.reference[row] = self.reference_number(reference)

    def uid(self, row: int) -> str:
        """Returns the trajectory's uid."""
        return self._uids[row]

    @property
    def first_spilled(self) -> int | None:
        """Returns the place of the oldest body that is not held; None when all are."""
        return None if not self._spilled else int(self.arrival[next(iter(self._spilled))])

    def _body(self, row: int) -> bytes:
        if row not in self._spilled or self._read is None:
            return self._bodies[row]
        try:
            return self._read(int(self.arrival[row]))
        except Damaged as error:
            raise Lost(row, str(error)) from error

    def trajectory(self, row: int) -> Trajectory:
        """Returns a row as it was added, with the incarnation that it counts as, and scored as it was last.

        Raises `Lost` when it cannot be read any more.
        """
        found = decode_trajectory(self._body(row), self.prompt(row), compare=False)
        if row in self._scores:
            scored = self.reference_of(int(self.reference[row]))
            found = replace(found, log_reference=decode_logs(self._scores[row]), reference=scored)
        incarnation = self.incarnation.item(row)
        return found if found.version.incarnation == incarnation else _renamed(found, incarnation)

    def prompt(self, row: int) -> Prompt:
        """Returns the trajectory's prompt."""
        prompt = self._prompts[row]
        assert prompt is not None
        return prompt

    def _one_of(self, prompt: Prompt) -> Prompt:
        """Returns an equal prompt that is here, else the prompt; its key leaves out text and fields."""
        known = self._interned.setdefault(prompt.key, prompt)
        return known if (known.text, known.fields) == (prompt.text, prompt.fields) else prompt

    def reference_number(self, reference: Version) -> int:
        """Returns the number of a reference."""
        number = self._numbers.setdefault(reference, len(self._references))
        if number == len(self._references):
            self._references.append(reference)
        return number

    def reference_of(self, number: int) -> Version:
        """Returns the reference of a number."""
        return self._references[number]

    def tokens(self, row: int) -> IntArray:
        """Returns the tokens of its completion, [T]. Raises as `trajectory` does."""
        return tokens_of(self._body(row), self.length.item(row))

    @property
    def lowest(self) -> int:
        """Returns, of those that are kept, the one with the lowest reward, the oldest of several. Reads all rewards."""
        standing = self._standing[: self._used]
        rows = np.flatnonzero(standing == standing.min())
        return int(rows[self.arrival[rows].argmin()])

    @property
    def oldest(self) -> int:
        """Returns, of those that are kept, the one that arrived first; there must be one."""
        return next(iter(self._kept))

    def in_order(self) -> npt.NDArray[np.intp]:
        """Returns all rows, oldest first."""
        there = np.ones(self._used, dtype=np.bool_)
        there[self._free] = False
        rows = np.flatnonzero(there)
        return rows[np.argsort(self.arrival[rows])]

    def _new(self) -> int:
        if self._used == len(self.length):
            for name in _COLUMNS:
                setattr(self, name, widened(getattr(self, name), self._used + 1))
        self._used += 1
        self._uids.append("")
        self._prompts.append(None)
        self._bodies.append(b"")
        return self._used - 1


_COLUMNS = (
    *("length", "reward", "incarnation", "step", "reference", "uses", "arrival", "is_recent", "passing", "_standing"),
    "_digest",
)


class Answers(Sequence[Trajectory]):
    """Some rows as trajectories, each decoded when it is asked for."""

    def __init__(self, rows: Rows, numbers: Sequence[int]) -> None:
        self._rows = rows
        self._numbers = numbers

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(index, slice):
            return [self._rows.trajectory(row) for row in self._numbers[index]]
        return self._rows.trajectory(self._numbers[index])

    def __len__(self) -> int:
        return len(self._numbers)


def _renamed(trajectory: Trajectory, incarnation: int) -> Trajectory:
    """Returns the trajectory as if `incarnation` had sampled it."""
    first, last = (replace(version, incarnation=incarnation) for version in trajectory.completion.versions)
    return replace(trajectory, completion=replace(trajectory.completion, versions=(first, last)))


def widened(column: npt.NDArray[_Number], rows: int, least: int = 1024) -> npt.NDArray[_Number]:
    """Returns the column with room for at least `rows` and `least` rows; the new ones are zero."""
    wider = np.zeros(max(rows, 2 * len(column), least), dtype=column.dtype)
    wider[: len(column)] = column
    return wider
