"""A checkpoint that all ranks write, each its own rows, while the next steps are computed.

Invariant: what is written are copies, made between two steps; the weights may change at once. Rank 0 writes the headers
of the two files, with room for all rows, and all that is not sharded; then every rank writes its rows in their places.
The folder gets its name when all of them have said that theirs are on the disk. At most one is under way; what fails in
it is raised where it is next waited for, or at the next step.

A rank needs the memory of its share once more until its rows are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tba.errors import PartFailed
from tba.protocols import SavedPolicy
from tba.sharding import copy_local_rows, local_part
from tba.streaming import write_rows
from tba.training.optimizer import STATE, Optimizer
from tba.training.ranks.background import Background
from tba.training.ranks.messages import Ranks, name_of_rank

MODEL = "model.safetensors"
Rows = Mapping[str, tuple[int, Tensor]]


def saving(ranks: Ranks) -> Background:
    """Returns a rank's thread for the checkpoint that is under way."""
    seconds = 2 * ranks.word_deadline  # each wait in it has that of the ranks
    what = f"{name_of_rank(ranks.rank)} waited {seconds:g} s for a checkpoint to be on the disk"
    return Background("checkpoint", seconds, what)


@dataclass
class Shards:
    """Copies of what a rank holds, at one step."""

    model: Rows
    optimizer: Rows

    @classmethod
    def of(cls, policy: SavedPolicy, optimizer: Optimizer) -> Shards:
        optimizer.exchange()  # of a model with averages these are saved
        own = {name: copy_local_rows(local_part(t), t) for name, t in policy.everything().items()}
        optimizer.exchange()
        return cls({name: rows for name, rows in own.items() if rows is not None}, optimizer.snapshot())

    def write(self, ranks: Ranks, folder: str) -> None:
        """Write them into the files that rank 0 has laid out in `folder`. Every rank calls it.

        Raises `PartFailed` where another rank could not write its rows, and what went wrong in this one.
        """
        what, failed = "for the other ranks to write their rows of a checkpoint", None
        folder = ranks.tell(folder, "for the place of a checkpoint", ranks.saving)
        try:
            write_rows(Path(folder) / MODEL, self.model)
            write_rows(Path(folder) / STATE, self.optimizer)
        except OSError as error:
            failed = error
        others = ranks.agree(failed is None, what, ranks.saving)
        if failed is not None:
            raise failed
        if others:
            raise PartFailed(f"{name_of_rank(others[0])} could not write its rows of a checkpoint: see its log")


@dataclass
class ModelWithoutRows:
    """Stands for the policy where a checkpoint is saved: writes its folder, with room for the rows of all ranks."""

    policy: SavedPolicy
    like: Mapping[str, Tensor]

    def save(self, path: Path, tokenizer: Any = None) -> None:
        self.policy.save(path, tokenizer, self.like)


@dataclass
class AllRows:
    """Stands for the optimizer, which is saved after the model: writes its files likewise, and then has all ranks write
    the rows of both.
    """

    optimizer: Optimizer
    like: Mapping[str, Tensor]
    shards: Shards
    ranks: Ranks

    def save(self, folder: Path) -> None:
        self.optimizer.save_empty(folder, self.like)
        self.shards.write(self.ranks, str(folder.resolve()))


def lay_out(policy: SavedPolicy, optimizer: Optimizer, ranks: Ranks) -> tuple[ModelWithoutRows, AllRows]:
    """Returns what stands for rank 0's policy and optimizer, as they are now, in a checkpoint of all ranks."""
    everything = policy.everything()
    like = {name: torch.empty(tuple(t.shape), dtype=t.dtype, device="meta") for name, t in everything.items()}
    rows = AllRows(optimizer, optimizer.like(), Shards.of(policy, optimizer), ranks)
    return ModelWithoutRows(policy, like), rows
