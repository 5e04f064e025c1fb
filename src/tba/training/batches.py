"""A batch for the trainer: the groups that replay drew, and the same as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tba.batch import Batch
from tba.types import Group


@dataclass(frozen=True)
class Fetched:
    """One batch and the groups it was made of."""

    groups: Sequence[Group]
    batch: Batch
