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

from tba.replay.codec import Damaged, StoredTrajectory, decode_logs, decode_trajectory, encode_logs, tokens_of
from tba.types import FloatArray, IntArray, Prompt, Trajectory, Version

_Number = TypeVar("_Number", bound=np.generic)


class LostRow(Exception):
    """Raised for a row whose body is not in memory and cannot be read from its source any more."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


class TrajectoryTable:
    """Keeps trajectories in columns, by row. The values of a row that does not exist are meaningless.

    read_body: returns the body at a place of the source, or raises `Damaged`; None: all bodies are held. held_bytes:
    the most bytes of bodies that are held otherwise.
    """

    def __init__(self, read_body: Callable[[int], bytes] | None = None, held_bytes: float = 0.0) -> None:
        self.length = np.zeros(0, dtype=np.int32)
        self.reward = np.zeros(0, dtype=np.float64)
        self.incarnation = np.zeros(0, dtype=np.int32)  # of the oldest weights that sampled a part of it
        self.step = np.zeros(0, dtype=np.int32)
        self.reference = np.zeros(0, dtype=np.int32)  # by number, see `reference_number`
        self.uses = np.zeros(0, dtype=np.int32)
        self.arrival = np.zeros(0, dtype=np.int64)
        self.is_recent = np.zeros(0, dtype=np.bool_)
        self.exit_reason = np.zeros(0, dtype=np.int8)  # why it is not kept, where it is here only while it is recent
        self._kept_reward = np.zeros(0, dtype=np.float64)  # its reward while it is kept, else infinite
        self._digests = np.zeros(0, dtype=np.uint64)  # of the completion
        self._uids: list[str] = []
        self._bodies: list[bytes] = []
        self._read_body, self._most_held_bytes = read_body, held_bytes
        self._held_bytes = 0  # bytes of bodies
        self._held_rows: OrderedDict[int, None] = OrderedDict()  # whose bodies may be dropped, in order of arrival
        self._spilled_rows: OrderedDict[int, None] = OrderedDict()  # whose bodies were dropped, in that order
        self._scores_by_row: dict[int, bytes] = {}  # log-probabilities under another reference than the body's
        self._rows_by_uid: dict[str, int] = {}
        self._rows_by_answer: dict[int, int] = {}  # by hash; the row that was added last
        self._prompts: list[Prompt | None] = []
        self._interned: WeakValueDictionary[str, Prompt] = WeakValueDictionary()  # one object for each, by key
        self._references: list[Version] = []
        self._reference_numbers: dict[Version, int] = {}  # the number of each reference
        self._free_rows: list[int] = []
        self._row_count = 0
        self._kept_rows: OrderedDict[int, None] = OrderedDict()  # rows that are kept, in order of arrival

    def __len__(self) -> int:
        return len(self._rows_by_uid)

    def add(self, stored: StoredTrajectory, arrival: int, incarnation: int) -> int:
        """Add a trajectory; returns its row. `incarnation` is the one it counts as; nothing may have arrived later."""
        row = self._free_rows.pop() if self._free_rows else self._new_row()
        self.length[row], self.reward[row] = stored.length, stored.reward
        self.incarnation[row], self.step[row] = incarnation, stored.version.step
        self.reference[row] = self.reference_number(stored.reference)
        self.uses[row], self.arrival[row], self.is_recent[row] = 0, arrival, False
        self._prompts[row] = self._intern(stored.prompt)
        self.exit_reason[row], self._kept_reward[row] = 0, stored.reward
        self._digests[row], self._uids[row], self._bodies[row] = stored.digest, stored.uid, stored.body
        self._held_bytes += len(stored.body)
        self._rows_by_uid[stored.uid] = self._rows_by_answer[hash((stored.prompt.key, stored.digest))] = row
        self._kept_rows[row] = None
        if self._read_body is not None:
            self._held_rows[row] = None
            self._spill()
        return row

    def _spill(self) -> None:
        """Drop the bodies that have been held longest, while they are too many bytes."""
        while self._held_bytes > self._most_held_bytes and self._held_rows:
            row, _ = self._held_rows.popitem(last=False)
            self._spilled_rows[row] = None
            self._held_bytes -= len(self._bodies[row])
            self._bodies[row] = b""

    def remove(self, row: int) -> None:
        """Remove a row; its number may be given to another."""
        del self._rows_by_uid[self._uids[row]]
        answer = hash((self.prompt(row).key, int(self._digests[row])))
        if self._rows_by_answer.get(answer) == row:
            del self._rows_by_answer[answer]
        self._held_bytes -= len(self._bodies[row])
        self._uids[row], self._bodies[row], self._prompts[row] = "", b"", None
        for rows in (self._held_rows, self._spilled_rows, self._scores_by_row):
            rows.pop(row, None)
        self._kept_reward[row], self.exit_reason[row] = np.inf, 0
        self._kept_rows.pop(row, None)
        self._free_rows.append(row)

    def let_pass(self, row: int, reason: int) -> None:
        """Mark a row as no longer kept, but here for a while; `reason` is its value in `exit_reason`, above 0."""
        self._kept_reward[row], self.exit_reason[row] = np.inf, reason
        del self._kept_rows[row]

    def find(self, uid: str) -> int | None:
        """Returns the row of a trajectory; None when it is not in memory."""
        return self._rows_by_uid.get(uid)

    def copy_of(self, prompt: str, digest: int) -> int | None:
        """Returns the row with the same answer to the same prompt, of several the last added; None without one."""
        row = self._rows_by_answer.get(hash((prompt, digest)))
        if row is None or int(self._digests[row]) != digest or self.prompt(row).key != prompt:
            return None
        return row

    def rescore(self, row: int, log_reference: FloatArray, reference: Version) -> None:
        """Store a row's log-probabilities under another reference.

        Raises `ValueError` when they are not as many as its tokens.
        """
        if len(log_reference) != self.length[row]:
            raise ValueError(f"a score of {len(log_reference)} tokens is given to a trajectory of {self.length[row]}")
        self._scores_by_row[row] = encode_logs(log_reference)
        self.reference[row] = self.reference_number(reference)

    def uid(self, row: int) -> str:
        """Returns the trajectory's uid."""
        return self._uids[row]

    @property
    def first_spilled(self) -> int | None:
        """Returns the place of the oldest body that is not held; None when all are."""
        return None if not self._spilled_rows else int(self.arrival[next(iter(self._spilled_rows))])

    def _body(self, row: int) -> bytes:
        if row not in self._spilled_rows or self._read_body is None:
            return self._bodies[row]
        try:
            return self._read_body(int(self.arrival[row]))
        except Damaged as error:
            raise LostRow(row, str(error)) from error

    def trajectory(self, row: int) -> Trajectory:
        """Returns a row as it was added, with the incarnation that it counts as, and scored as it was last.

        Raises `LostRow` when it cannot be read any more.
        """
        trajectory = decode_trajectory(self._body(row), self.prompt(row), verify=False)
        if row in self._scores_by_row:
            reference = self.reference_of(int(self.reference[row]))
            trajectory = replace(trajectory, log_reference=decode_logs(self._scores_by_row[row]), reference=reference)
        incarnation = self.incarnation.item(row)
        is_same = trajectory.version.incarnation == incarnation
        return trajectory if is_same else _with_incarnation(trajectory, incarnation)

    def prompt(self, row: int) -> Prompt:
        """Returns the trajectory's prompt."""
        prompt = self._prompts[row]
        assert prompt is not None
        return prompt

    def _intern(self, prompt: Prompt) -> Prompt:
        """Returns the equal prompt that is in memory already, else this one; keys leave out text and fields."""
        interned = self._interned.setdefault(prompt.key, prompt)
        return interned if (interned.text, interned.fields) == (prompt.text, prompt.fields) else prompt

    def reference_number(self, reference: Version) -> int:
        """Returns the number of a reference."""
        number = self._reference_numbers.setdefault(reference, len(self._references))
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
        """Returns the kept row with the lowest reward, the oldest of several. Reads all rewards."""
        rewards = self._kept_reward[: self._row_count]
        rows = np.flatnonzero(rewards == rewards.min())
        return int(rows[self.arrival[rows].argmin()])

    @property
    def oldest(self) -> int:
        """Returns the kept row that arrived first; there must be one."""
        return next(iter(self._kept_rows))

    def in_order(self) -> npt.NDArray[np.intp]:
        """Returns all rows, oldest first."""
        is_used = np.ones(self._row_count, dtype=np.bool_)
        is_used[self._free_rows] = False
        rows = np.flatnonzero(is_used)
        return rows[np.argsort(self.arrival[rows])]

    def _new_row(self) -> int:
        if self._row_count == len(self.length):
            for name in _COLUMNS:
                setattr(self, name, widen(getattr(self, name), self._row_count + 1))
        self._row_count += 1
        self._uids.append("")
        self._prompts.append(None)
        self._bodies.append(b"")
        return self._row_count - 1


_COLUMNS = (
    *("length", "reward", "incarnation", "step", "reference", "uses", "arrival", "is_recent"),
    *("exit_reason", "_kept_reward", "_digests"),
)


class Answers(Sequence[Trajectory]):
    """Some rows as trajectories, each decoded when it is asked for."""

    def __init__(self, rows: TrajectoryTable, numbers: Sequence[int]) -> None:
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


def _with_incarnation(trajectory: Trajectory, incarnation: int) -> Trajectory:
    """Returns the trajectory as if `incarnation` had sampled it."""
    oldest, newest = (replace(version, incarnation=incarnation) for version in trajectory.completion.versions)
    return replace(trajectory, completion=replace(trajectory.completion, versions=(oldest, newest)))


def widen(column: npt.NDArray[_Number], rows: int, least: int = 1024) -> npt.NDArray[_Number]:
    """Returns the column with room for at least `rows` and `least` rows; the new ones are zero."""
    wider = np.zeros(max(rows, 2 * len(column), least), dtype=column.dtype)
    wider[: len(column)] = column
    return wider
