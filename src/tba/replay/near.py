"""Finds near duplicates: answers that nearly equal another one to the same prompt, by edits of tokens or by embeddings.

Invariant: `of` gives exactly the rows that are nearer than the distance; rows are skipped before tokens are compared
only by a bound that no near one can break. No loop over rows is in Python. By edits a query costs one pass over T bytes
of each of N rows, and a table of T x L for each row that the bound lets through; by cosine, one product of N x D.

Shape legend: N rows of a prompt, G buckets of tokens, T tokens of the answer in question, C candidates, L tokens of the
longest of them, D dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tba.errors import UserError
from tba.fields import as_declared
from tba.protocols import EMBEDDING
from tba.replay.codec import Stored
from tba.replay.rows import widened
from tba.types import FloatArray, IntArray

_BUCKETS = 256
_MOST = 255  # of one bucket that a byte can count
_CELLS = 1 << 21  # of a table of edits at a time
_Number = TypeVar("_Number", bound=np.generic)
_Rows = npt.NDArray[np.intp]


@dataclass(frozen=True)
@as_declared
class NearDuplicates:
    """What happens to an answer that is nearly another one to the same prompt (Lee et al. 2024, arXiv 2405.18540)."""

    by: Literal["none", "edit", "cosine"] = "none"  # what is compared: nothing, token edits, embeddings
    distance: float = 0.25  # answers nearer than this are near: edits / tokens of both, or 1 - cosine
    keep: Literal["better", "newer"] = "better"  # the higher reward (in a tie the earlier), or the newer

    def __post_init__(self) -> None:
        if not 0 < self.distance <= 2:
            raise UserError(
                f"--replay.buffer.near.distance is {self.distance}: give edits per token of both answers (up to 1), or "
                "1 - cosine (up to 2), above 0"
            )

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect while all answers stay."""
        return {"distance": "by", "keep": "by"} if self.by == "none" else {}

    def start(self, tokens: Callable[[int], IntArray]) -> Neighbours | None:
        """Returns an empty index; `tokens` gives the tokens of a row. None: nothing is near anything."""
        return None if self.by == "none" else Neighbours(self, tokens)


class Neighbours:
    """The rows in memory by prompt, each with the features by which it is compared."""

    def __init__(self, settings: NearDuplicates, tokens: Callable[[int], IntArray]) -> None:
        self._settings = settings
        self._tokens = tokens
        self._sheets: dict[str, _Sheet] = {}
        self._place = np.zeros(0, dtype=np.int32)  # by row, its index in the sheet of its prompt

    def of(self, stored: Stored) -> _Rows:
        """Returns the rows of the same prompt that are near."""
        sheet = self._sheets.get(stored.prompt.key)
        return np.zeros(0, dtype=np.intp) if sheet is None else sheet.near(stored)

    def add(self, row: int, stored: Stored) -> None:
        """Add a row, which must not be there yet."""
        sheet = self._sheets.get(stored.prompt.key)
        if sheet is None:
            sheet = self._sheets[stored.prompt.key] = self._sheet()
        if row >= len(self._place):
            self._place = widened(self._place, row + 1)
        self._place[row] = sheet.add(row, stored)

    def remove(self, row: int, prompt: str) -> None:
        """Remove a row, which must be there; the last one of its prompt takes its index."""
        sheet, place = self._sheets[prompt], int(self._place[row])
        moved = sheet.remove(place)
        self._place[moved] = place
        if not len(sheet):
            del self._sheets[prompt]

    def _sheet(self) -> _Sheet:
        if self._settings.by == "edit":
            return _Edits(self._settings.distance, self._tokens)
        return _Cosines(self._settings.distance)


class _Sheet(Protocol):
    """The rows of one prompt, in no order."""

    def __len__(self) -> int: ...

    def near(self, stored: Stored) -> _Rows: ...

    def add(self, row: int, stored: Stored) -> int:
        """Add an answer; returns its index."""
        ...

    def remove(self, place: int) -> int:
        """Remove an index; returns the row that has it now (the same where it was the last)."""
        ...


class _Edits:
    """Compares by edits.

    The bound: e edits leave max(a, b) - e tokens in common, counted with repeats (the bag distance, Bartolini et al.
    2002), and tokens are counted in buckets, which can only make more of them common.
    """

    def __init__(self, distance: float, tokens: Callable[[int], IntArray]) -> None:
        self._distance = distance
        self._tokens = tokens
        self._count_GN = np.zeros((_BUCKETS, 0), dtype=np.uint8)
        self._length_N = np.zeros(0, dtype=np.int32)
        self._row_N = np.zeros(0, dtype=np.int32)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def near(self, stored: Stored) -> _Rows:
        answer_T = stored.tokens
        bucket, count = _bag(answer_T)
        common_N: npt.NDArray[Any] = np.zeros(self._size, dtype=np.uint8 if len(answer_T) <= _MOST else np.int32)
        for b, n in zip(bucket.tolist(), count.tolist(), strict=True):
            for least in range(1, min(n, _MOST) + 1):  # a comparison is vectorised, the lesser of two is not
                common_N += (self._count_GN[b, : self._size] >= np.uint8(least)).view(np.uint8)
        length_N = self._length_N[: self._size]
        wanted = self._wanted(len(answer_T), int(length_N.max(initial=0)), int(np.maximum(count - _MOST, 0).sum()))
        candidate_C = np.flatnonzero(common_N >= wanted.astype(common_N.dtype)[length_N])
        limit_C = self._distance * (length_N[candidate_C] + len(answer_T))
        at_once = max(1, _CELLS // (int(length_N.max(initial=0)) + 1))
        near = [candidate_C[:0]]
        for first in range(0, len(candidate_C), at_once):
            part = slice(first, first + at_once)
            others = [self._tokens(row) for row in self._row_N[candidate_C[part]].tolist()]
            near.append(candidate_C[part][edits(answer_T, others) < limit_C[part]])
        return self._row_N[np.concatenate(near)].astype(np.intp)

    def _wanted(self, length: int, longest: int, uncounted: int) -> npt.NDArray[np.int64]:
        """[longest + 1] Returns how many tokens answers of each length must have in common with one of `length`, to be
        near.

        uncounted: how many of those in common a byte may have failed to count.
        """
        other = np.arange(longest + 1)
        larger, limit = np.maximum(other, length), self._distance * (other + length)
        common = np.floor(larger - limit).astype(np.int64)
        common += larger - common >= limit  # the fewest with larger - common < limit
        return np.clip(common - uncounted, 0, _MOST if length <= _MOST else None)

    def add(self, row: int, stored: Stored) -> int:
        place = self._size
        if place == len(self._row_N):
            self._length_N, self._row_N = widened(self._length_N, place + 1, 16), widened(self._row_N, place + 1, 16)
            wider = np.zeros((_BUCKETS, len(self._row_N)), dtype=np.uint8)
            wider[:, :place] = self._count_GN
            self._count_GN = wider
        bucket, count = _bag(stored.tokens)
        self._count_GN[:, place] = 0
        self._count_GN[bucket, place] = np.minimum(count, _MOST)
        self._length_N[place], self._row_N[place] = stored.length, row
        self._size += 1
        return place

    def remove(self, place: int) -> int:
        self._size -= 1
        last = self._size
        self._count_GN[:, place] = self._count_GN[:, last]
        self._length_N[place], self._row_N[place] = self._length_N[last], self._row_N[last]
        return int(self._row_N[place])


class _Cosines:
    """Compares by cosine. An answer without an embedding, or with one of zeros, is near nothing."""

    def __init__(self, distance: float) -> None:
        self._distance = distance
        self._unit_ND = np.zeros((0, 0), dtype=np.float32)
        self._row_N = np.zeros(0, dtype=np.int32)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def near(self, stored: Stored) -> _Rows:
        unit_D = _unit(stored)
        if unit_D is None or not self._size or not self._unit_ND.shape[1]:
            return np.zeros(0, dtype=np.intp)
        self._require(unit_D)
        near = self._unit_ND[: self._size] @ unit_D > np.float32(1 - self._distance)
        return self._row_N[: self._size][near].astype(np.intp)

    def add(self, row: int, stored: Stored) -> int:
        place, unit_D = self._size, _unit(stored)
        if unit_D is not None and not self._unit_ND.shape[1]:
            self._unit_ND = np.zeros((len(self._row_N), len(unit_D)), dtype=np.float32)
        if place == len(self._row_N):
            self._row_N = widened(self._row_N, place + 1, 16)
            wider = np.zeros((len(self._row_N), self._unit_ND.shape[1]), dtype=np.float32)
            wider[:place] = self._unit_ND
            self._unit_ND = wider
        if unit_D is None:
            self._unit_ND[place] = 0
        else:
            self._require(unit_D)
            self._unit_ND[place] = unit_D
        self._row_N[place] = row
        self._size += 1
        return place

    def remove(self, place: int) -> int:
        self._size -= 1
        self._unit_ND[place], self._row_N[place] = self._unit_ND[self._size], self._row_N[self._size]
        return int(self._row_N[place])

    def _require(self, unit_D: FloatArray) -> None:
        if len(unit_D) != self._unit_ND.shape[1]:
            raise UserError(
                f"an answer has an embedding of {len(unit_D)} numbers, and those in memory have "
                f"{self._unit_ND.shape[1]}: embed all answers of a run in the same way"
            )


def edits(answer_T: IntArray, others: list[IntArray]) -> npt.NDArray[np.int32]:
    """[C] Returns insertions, deletions and substitutions between `answer_T` and each of the others (Levenshtein 1966).

    This is Wagner and Fischer's table for all of them at once, a row for each token of the answer. Within a row the
    insertions are a running minimum: a step to the right costs 1.
    """
    length_C = np.array([len(other) for other in others], dtype=np.int32)
    longest = int(length_C.max(initial=0))
    other_LC = np.full((longest, len(others)), -1, dtype=np.int32)
    for c, other in enumerate(others):
        other_LC[: len(other), c] = other
    step_L1 = np.arange(longest + 1, dtype=np.int32)[:, None]
    row_LC = np.repeat(step_L1, len(others), axis=1)  # the row of the empty prefix: as many insertions as tokens
    for t, token in enumerate(answer_T.tolist(), start=1):
        least_LC = np.empty_like(row_LC)
        least_LC[0] = t
        np.minimum(row_LC[:-1] + (other_LC != token), row_LC[1:] + 1, out=least_LC[1:])
        least_LC -= step_L1
        row_LC = np.minimum.accumulate(least_LC, axis=0, out=least_LC)
        row_LC += step_L1
    return row_LC[length_C, np.arange(len(others))]


def _bag(tokens: IntArray) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Returns the buckets that tokens fall into, and how many fall into each."""
    bucket_T = (tokens.astype(np.uint32) * np.uint32(2654435761)) >> np.uint32(24)  # Knuth's multiplicative hash
    count_G = np.bincount(bucket_T, minlength=_BUCKETS)
    bucket = np.flatnonzero(count_G)
    return bucket, count_G[bucket]


def _unit(stored: Stored) -> FloatArray | None:
    embedding = stored.trajectory.arrays.get(EMBEDDING)
    if embedding is None:
        return None
    embedding_D = np.asarray(embedding, dtype=np.float32).ravel()
    norm = float(np.linalg.norm(embedding_D))
    return embedding_D / np.float32(norm) if norm > 0 else None
