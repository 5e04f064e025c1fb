"""Embeddings of answers' texts, for near duplicates by cosine: computed by the searcher that sends an answer, stored
with it.

Invariant: every trajectory that goes through `embedded` has the array `embedding`; the trainer computes none.

Shape legend: N texts, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tba.errors import UserError
from tba.protocols import EMBEDDING, Embedder
from tba.types import FloatArray, Trajectory

_ODD = np.uint64(0x9E3779B97F4A7C15)  # multiplied by it, the upper bits of a number are well mixed


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

    def start(self) -> HashedNgrams:
        """Returns the embedder, which is the setting itself."""
        return self

    def embed(self, sentences: Sequence[str]) -> FloatArray:
        """Returns [N, D], rows of length 1 (of zeros for a text without any n-gram), in order."""
        counted = [self._counted(sentence) for sentence in sentences]
        count_ND = np.array(counted, dtype=np.float32).reshape(len(counted), self.dimensions)
        norm_N1 = np.linalg.norm(count_ND, axis=1, keepdims=True)
        return np.asarray(count_ND / np.maximum(norm_N1, 1e-12), dtype=np.float32)

    def _counted(self, sentence: str) -> FloatArray:
        words = " ".join(sentence.lower().split())
        bytes_ = np.frombuffer(f" {words} ".encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint64)
        count_D = np.zeros(self.dimensions, dtype=np.float32)
        if not words:
            return count_D
        for n in range(self.shortest, min(self.longest, len(bytes_)) + 1):
            run = np.full(len(bytes_) - n + 1, n, dtype=np.uint64)
            for i in range(n):
                run = (run << np.uint64(8)) + bytes_[i : len(bytes_) - n + 1 + i]
            run = run * _ODD
            bucket = (run >> np.uint64(20)) % np.uint64(self.dimensions)
            sign = np.where(run >> np.uint64(63), 1.0, -1.0)
            count_D += np.bincount(bucket.astype(np.intp), sign, self.dimensions).astype(np.float32)
        return count_D


def embedded(trajectories: Sequence[Trajectory], embedder: Embedder | None) -> Sequence[Trajectory]:
    """Returns the same with each text's embedding, in half precision; unchanged where there is no embedder."""
    if embedder is None or not trajectories:
        return trajectories
    rows = np.asarray(embedder.embed([t.completion.text for t in trajectories]), dtype=np.float16)
    return [replace(t, arrays={**t.arrays, EMBEDDING: row}) for t, row in zip(trajectories, rows, strict=True)]
