"""Decides which problems are held out for evaluation.

Invariant: the decision depends on a digest of the problem alone, never on order, seed, machine or the rest of the file,
so that a problem that appears twice is on one side only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from tba.errors import UserError

T = TypeVar("T")
IN_BOTH = "in the evaluation data too"  # why a problem is not trained on


def is_held_out(problem: str, share: float) -> bool:
    """Returns whether `problem` is among the `share` (0 to 1) held out."""
    digest = hashlib.blake2b(problem.encode(errors="surrogatepass"), digest_size=8, person=b"tba held out").digest()
    return int.from_bytes(digest, "little") < share * 2.0**64


def check_share(share: float, field: str) -> None:
    """Raises `UserError` unless the share leaves something on both sides."""
    if not 0 < share < 1:
        raise UserError(f"{field} is {share}: give the share of problems to hold out, above 0 and below 1")


def exclude(train: Sequence[T], held_out: Sequence[T], key: Callable[[T], object]) -> list[T]:
    """Returns the problems of `train` that are not held out, too."""
    held_out_keys = {key(problem) for problem in held_out}
    return [problem for problem in train if key(problem) not in held_out_keys]
