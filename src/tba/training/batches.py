"""Where the trainer's batches come from: the groups that replay chose, and the same as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tba.batch import Batch, collate
from tba.protocols import Replay
from tba.types import Group


@dataclass(frozen=True)
class Fetched:
    """One batch and the groups it was made of."""

    groups: Sequence[Group]
    batch: Batch


@dataclass(frozen=True)
class Sampled:
    """Batches sampled when they are asked for: B prompts with K trajectories each."""

    replay: Replay
    groups_per_step: int  # B
    group_size: int  # K

    def next(self) -> Fetched:
        groups = self.replay.sample(self.groups_per_step, self.group_size)
        return Fetched(groups, collate(groups))
