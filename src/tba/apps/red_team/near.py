"""Near duplicates: answers that nearly equal another one to the same prompt, by edits of tokens or by embeddings.

`BufferSettings(near_duplicates=NearDuplicates("edit"))` keeps them out of a replay buffer (`NearSettings`
in `replay/buffer.py`).

Invariant: `of` gives exactly the rows that are nearer than the distance; rows are skipped before tokens are compared
only by a bound that no near one can break. No loop over rows is in Python. By edits a query costs one pass over T bytes
of each of N rows, and a table of T x L for each row that the bound lets through; by cosine, one product of N x D.

Shape legend: N rows of a prompt, F features of a row, T tokens of the answer in question, C candidates, L tokens of the
longest of them, D dimensions of an embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from tba.errors import UserError
from tba.fields import as_declared
from tba.replay.codec import StoredTrajectory, trajectory_header
from tba.replay.columns import widen
from tba.types import FloatArray, IntArray

_BUCKETS = 256
_BYTE_MAX = 255  # of one bucket that a byte can count
_TABLE_CELLS = 1 << 21  # of a table of edits at a time
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # multiplied by it, the upper bits of a number are well mixed
_Rows = npt.NDArray[np.intp]


class Embedding(Protocol):
    """Embeds texts: similar texts get similar directions."""

    def embed(self, sentences: Sequence[str]) -> FloatArray:
        """Returns [N, D], in order."""


@dataclass(frozen=True)
class HashedNgrams:
    """Byte n-grams, counted in hashed buckets with signs (Weinberger et al. 2009): no model, no download.

    Texts with the same words have similar embeddings; the same meaning in other words does not.
    """

    dimensions: int = 256  # hash buckets
    shortest: int = 2  # bytes of the shortest n-gram
    longest: int = 4  # bytes of the longest n-gram

    def __post_init__(self) -> None:
        if self.dimensions < 2 or not 1 <= self.shortest <= self.longest <= 8:
            raise UserError(
                f"the embedding counts runs of {self.shortest} to {self.longest} bytes in {self.dimensions} buckets: "
                "give runs of 1 to 8 bytes, the shortest first, and at least 2 buckets"
            )

    def embed(self, sentences: Sequence[str]) -> FloatArray:
        """Returns [N, D], rows of length 1 (of zeros for a text without any n-gram), in order."""
        counts = [self._ngram_counts(sentence) for sentence in sentences]
        count_ND = np.array(counts, dtype=np.float32).reshape(len(counts), self.dimensions)
        norm_N1 = np.linalg.norm(count_ND, axis=1, keepdims=True)
        return np.asarray(count_ND / np.maximum(norm_N1, 1e-12), dtype=np.float32)

    def _ngram_counts(self, sentence: str) -> FloatArray:
        words = " ".join(sentence.lower().split())
        bytes_ = np.frombuffer(f" {words} ".encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint64)
        count_D = np.zeros(self.dimensions, dtype=np.float32)
        if not words:
            return count_D
        for n in range(self.shortest, min(self.longest, len(bytes_)) + 1):
            hash_ = np.full(len(bytes_) - n + 1, n, dtype=np.uint64)
            for i in range(n):
                hash_ = (hash_ << np.uint64(8)) + bytes_[i : len(bytes_) - n + 1 + i]
            hash_ = hash_ * _HASH_FACTOR
            bucket = (hash_ >> np.uint64(20)) % np.uint64(self.dimensions)
            sign = np.where(hash_ >> np.uint64(63), 1.0, -1.0)
            count_D += np.bincount(bucket.astype(np.intp), sign, self.dimensions).astype(np.float32)
        return count_D


@dataclass(frozen=True)
@as_declared
class NearDuplicates:
    """Keeps one of two answers that are nearly the same to the same prompt (Lee et al. 2024, arXiv 2405.18540)."""

    measure: Literal["edit", "cosine"] = "edit"  # what is compared: token edits, embeddings of the texts
    distance: float = 0.25  # answers nearer than this are near: edits / tokens of both, or 1 - cosine
    keep: Literal["better", "newer"] = "better"  # the higher reward (in a tie the earlier), or the newer
    embedding: Embedding = HashedNgrams()  # computed by the trainer, as an answer arrives

    def __post_init__(self) -> None:
        if not 0 < self.distance <= 2:
            raise UserError(
                f"--replay.buffer.near-duplicates.distance is {self.distance}: give edits per token of both "
                "answers (up to 1), or 1 - cosine (up to 2), above 0"
            )

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect while tokens are compared."""
        return {"embedding": "measure cosine"} if self.measure == "edit" else {}

    def start(self, tokens: Callable[[int], IntArray]) -> EditIndex | CosineIndex:
        """Returns an empty index; `tokens` gives the tokens of a row."""
        return (
            EditIndex(self.distance, tokens) if self.measure == "edit" else CosineIndex(self.distance, self.embedding)
        )


class _Sheet:
    """The rows of one prompt, in no order, each with its features."""

    def __init__(self, feature_F: npt.NDArray[Any]) -> None:
        self._feature_FN = np.zeros((len(feature_F), 0), dtype=feature_F.dtype)
        self._length_N = np.zeros(0, dtype=np.int32)
        self._row_N = np.zeros(0, dtype=np.int32)
        self.size = 0

    @property
    def feature_FN(self) -> npt.NDArray[Any]:
        return self._feature_FN[:, : self.size]

    @property
    def length_N(self) -> npt.NDArray[np.int32]:
        """Returns the number of tokens of each row."""
        return self._length_N[: self.size]

    @property
    def row_N(self) -> npt.NDArray[np.int32]:
        return self._row_N[: self.size]

    def add(self, row: int, length: int, feature_F: npt.NDArray[Any]) -> int:
        """Add a row; returns its index."""
        place = self.size
        if place == len(self._row_N):
            self._length_N, self._row_N = widen(self._length_N, place + 1, 16), widen(self._row_N, place + 1, 16)
            wider_FN = np.zeros((len(feature_F), len(self._row_N)), dtype=feature_F.dtype)
            wider_FN[:, :place] = self._feature_FN
            self._feature_FN = wider_FN
        self._feature_FN[:, place] = feature_F
        self._length_N[place], self._row_N[place] = length, row
        self.size += 1
        return place

    def remove(self, place: int) -> int:
        """Remove an index; returns the row that has it now (the same where it was the last)."""
        self.size -= 1
        last_place = self.size
        self._feature_FN[:, place] = self._feature_FN[:, last_place]
        self._length_N[place], self._row_N[place] = self._length_N[last_place], self._row_N[last_place]
        return int(self._row_N[place])


class _Index(ABC):
    """The rows in memory by prompt, each with the features by which it is compared."""

    def __init__(self) -> None:
        self._sheets: dict[str, _Sheet] = {}
        self._place = np.zeros(0, dtype=np.int32)  # by row, its index in the sheet of its prompt

    def of(self, stored: StoredTrajectory) -> _Rows:
        """Returns the rows of the same prompt that are near."""
        sheet = self._sheets.get(stored.prompt.key)
        if sheet is None:
            return np.zeros(0, dtype=np.intp)
        return sheet.row_N[self._near(sheet, stored)].astype(np.intp)

    def add(self, row: int, stored: StoredTrajectory) -> None:
        """Add a row, which must not be there yet."""
        feature_F = self._features(stored)
        sheet = self._sheets.setdefault(stored.prompt.key, _Sheet(feature_F))
        if row >= len(self._place):
            self._place = widen(self._place, row + 1)
        self._place[row] = sheet.add(row, stored.length, feature_F)

    def remove(self, row: int, prompt: str) -> None:
        """Remove a row, which must be there; the last one of its prompt takes its index."""
        sheet, place = self._sheets[prompt], int(self._place[row])
        self._place[sheet.remove(place)] = place
        if not sheet.size:
            del self._sheets[prompt]

    @abstractmethod
    def _features(self, stored: StoredTrajectory) -> npt.NDArray[Any]:
        """Returns [F], what is kept of an answer."""

    @abstractmethod
    def _near(self, sheet: _Sheet, stored: StoredTrajectory) -> npt.NDArray[Any]:
        """Returns the indexes of a sheet that are near."""


class EditIndex(_Index):
    """Finds the rows that few edits of tokens turn into an answer.

    The bound: e edits leave max(a, b) - e tokens in common, counted with repeats (the bag distance, Bartolini et al.
    2002), and tokens are counted in buckets, which can only make more of them common.
    """

    def __init__(self, distance: float, tokens: Callable[[int], IntArray]) -> None:
        super().__init__()
        self._distance = distance
        self._tokens = tokens

    def _features(self, stored: StoredTrajectory) -> npt.NDArray[Any]:
        return np.minimum(_bucket_counts(stored.tokens), _BYTE_MAX).astype(np.uint8)

    def _near(self, sheet: _Sheet, stored: StoredTrajectory) -> npt.NDArray[Any]:
        answer_T, length_N = stored.tokens, sheet.length_N
        count_F = _bucket_counts(answer_T)
        common_N: npt.NDArray[Any] = np.zeros(sheet.size, dtype=np.uint8 if len(answer_T) <= _BYTE_MAX else np.int32)
        for bucket in np.flatnonzero(count_F).tolist():
            for count in range(1, min(int(count_F[bucket]), _BYTE_MAX) + 1):  # comparisons are vectorised, minima not
                common_N += (sheet.feature_FN[bucket] >= np.uint8(count)).view(np.uint8)
        longest = int(length_N.max())
        least_common = self._least_common(len(answer_T), longest, int(np.maximum(count_F - _BYTE_MAX, 0).sum()))
        candidate_C = np.flatnonzero(common_N >= least_common.astype(common_N.dtype)[length_N])
        limit_C = self._distance * (length_N[candidate_C] + len(answer_T))
        rows_per_table = max(1, _TABLE_CELLS // (longest + 1))
        near_candidates = [candidate_C[:0]]
        for start in range(0, len(candidate_C), rows_per_table):
            rows = slice(start, start + rows_per_table)
            other_answers = [self._tokens(row) for row in sheet.row_N[candidate_C[rows]].tolist()]
            near_candidates.append(candidate_C[rows][edits(answer_T, other_answers) < limit_C[rows]])
        return np.concatenate(near_candidates)

    def _least_common(self, length: int, longest: int, uncounted_tokens: int) -> npt.NDArray[np.int64]:
        """[longest + 1] Returns how many tokens answers of each length must have in common with one of `length`, to be
        near.

        uncounted_tokens: how many of those in common a byte may have failed to count.
        """
        length_L = np.arange(longest + 1)
        larger_L, limit_L = np.maximum(length_L, length), self._distance * (length_L + length)
        common_L = np.floor(larger_L - limit_L).astype(np.int64)
        common_L += larger_L - common_L >= limit_L  # the fewest with larger - common < limit
        return np.clip(common_L - uncounted_tokens, 0, _BYTE_MAX if length <= _BYTE_MAX else None)


class CosineIndex(_Index):
    """Finds the rows whose embeddings have a small angle to an answer's. An embedding of zeros is near nothing."""

    def __init__(self, distance: float, embedding: Embedding) -> None:
        super().__init__()
        self._distance = distance
        self._embedding = embedding
        self._last_embedding: tuple[str, FloatArray] | None = None  # an answer is compared, then added

    def _features(self, stored: StoredTrajectory) -> npt.NDArray[Any]:
        if self._last_embedding is None or self._last_embedding[0] != stored.uid:
            text = trajectory_header(stored.body)["text"]
            embedding_F = np.asarray(self._embedding.embed([text])[0], dtype=np.float32)
            norm = np.linalg.norm(embedding_F)
            unit_F = embedding_F / norm if norm > 0 else np.full_like(embedding_F, np.nan)  # not above any cosine
            self._last_embedding = stored.uid, unit_F
        return self._last_embedding[1]

    def _near(self, sheet: _Sheet, stored: StoredTrajectory) -> npt.NDArray[Any]:
        return self._features(stored) @ sheet.feature_FN > np.float32(1 - self._distance)


def edits(answer_T: IntArray, other_answers: list[IntArray]) -> npt.NDArray[np.int32]:
    """[C] Returns insertions, deletions and substitutions between `answer_T` and each of the others (Levenshtein 1966).

    This is Wagner and Fischer's table for all of them at once, a row for each token of the answer. Within a row the
    insertions are a running minimum: a step to the right costs 1.
    """
    length_C = np.array([len(other_answer) for other_answer in other_answers], dtype=np.int32)
    longest = int(length_C.max(initial=0))
    other_LC = np.full((longest, len(other_answers)), -1, dtype=np.int32)
    for c, other_answer in enumerate(other_answers):
        other_LC[: len(other_answer), c] = other_answer
    step_L1 = np.arange(longest + 1, dtype=np.int32)[:, None]
    row_LC = np.repeat(step_L1, len(other_answers), axis=1)  # the row of the empty prefix: as many insertions as tokens
    for t, token in enumerate(answer_T.tolist(), start=1):
        least_LC = np.empty_like(row_LC)
        least_LC[0] = t
        np.minimum(row_LC[:-1] + (other_LC != token), row_LC[1:] + 1, out=least_LC[1:])
        least_LC -= step_L1
        row_LC = np.minimum.accumulate(least_LC, axis=0, out=least_LC)
        row_LC += step_L1
    return row_LC[length_C, np.arange(len(other_answers))]


def _bucket_counts(tokens: IntArray) -> npt.NDArray[np.intp]:
    """[F] Returns how many tokens fall into each bucket."""
    bucket_T = (tokens.astype(np.uint32) * np.uint32(2654435761)) >> np.uint32(24)  # Knuth's multiplicative hash
    return np.bincount(bucket_T, minlength=_BUCKETS)
