"""Trajectories for the tests of replay, small and exactly comparable."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from tba.replay.buffer import Buffer, BufferSettings
from tba.replay.codec import Damaged, MissingCounts, StoredTrajectory
from tba.types import ELSEWHERE, Completion, Prompt, Score, StopReason, Trajectory, Version

FIRST = Version()
_serial = itertools.count()


def prompt(number: int) -> Prompt:
    """Prompt number `number`."""
    return Prompt("toy", np.array([number, 7], dtype=np.int32), f"question {number}", {"answer": str(number)})


def trajectory(
    of: Prompt | int = 0,
    tokens: Sequence[int] = (1, 2),
    version: Version | int = 0,
    reward: float = 0.0,
    uid: str | None = None,
    reference: Version = FIRST,
) -> Trajectory:
    """One trajectory; `tokens` decide which are duplicates."""
    version = Version(0, version) if isinstance(version, int) else version
    completion = Completion(np.array(tokens, dtype=np.int32), "", StopReason.EOS, (version, version))
    return Trajectory(
        uid=uid or f"t{next(_serial)}",
        prompt=of if isinstance(of, Prompt) else prompt(of),
        completion=completion,
        reward=reward,
        log_reference=np.zeros(len(tokens), dtype=np.float32),
        reference=reference,
    )


class Pile:
    """A source in memory: what is laid on it comes off, once. Nobody scores anything anew."""

    def __init__(self, waiting: Sequence[Trajectory] = ()) -> None:
        self.waiting = list(waiting)
        self.position = self.score_position = 0
        self.needed_from: int | None = None

    def body(self, place: int) -> bytes:
        raise Damaged("what came off the pile is nowhere else")

    def drain_stored(self, limit: int | None = None, until: int | None = None) -> list[StoredTrajectory]:
        taken, self.waiting = self.waiting[:limit], self.waiting[len(self.waiting[:limit]) :]
        self.position += len(taken)
        return [StoredTrajectory.of(t) for t in taken]

    def take_missing_counts(self) -> MissingCounts:
        return MissingCounts()

    def ask(self, reference: Version, uids: Sequence[str]) -> None: ...

    def drain_scores(self, limit: int | None = None, until: int | None = None) -> list[Score]:
        return []


def plain_edits(left: Sequence[int], right: Sequence[int]) -> int:
    """Levenshtein's distance, cell by cell."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        above, row = row, [i]
        for j, b in enumerate(right, start=1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (a != b)))
    return row[-1]


def store(sizes: Sequence[int], recent: Sequence[int] | None = None, rewards: Sequence[float] | None = None) -> Buffer:
    """A buffer with `sizes[p]` distinct trajectories of prompt p, the last `recent[p]` of them of searchers (all)."""
    buffer = Buffer(BufferSettings())
    for p, size in enumerate(sizes):
        fresh = size if recent is None else recent[p]
        for i in range(size):
            reward = 0.0 if rewards is None else rewards[i]
            buffer.add(trajectory(p, (1, 100 + i), version=10 if i >= size - fresh else ELSEWHERE, reward=reward))
    buffer.now = Version(0, 10)
    return buffer


def same(left: Any, right: Any) -> bool:
    """Equal in every field, arrays bit for bit and of the same type (a scalar NaN is a NaN)."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left)
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return np.float64(left).tobytes() == np.float64(right).tobytes() or (np.isnan(left) and np.isnan(right))
    return bool(left == right)
