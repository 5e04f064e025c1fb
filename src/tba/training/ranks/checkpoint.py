"""A checkpoint that all ranks write, each its own rows, while the next steps are computed.

Invariant: what is written are copies, made between two steps; the weights may change at once. Rank 0 writes the headers
of the two files, with room for all rows, and all that is not sharded; then every rank writes its rows in their places.
The folder gets its name when all ranks have reported that their rows are on the disk. At most one is being written; its
error is raised by the next wait, or at the next step.

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
from tba.training.optimizer import STATE_FILE, Optimizer
from tba.training.ranks.background import Background
from tba.training.ranks.messages import Ranks, name_of_rank

MODEL = "model.safetensors"
Rows = Mapping[str, tuple[int, Tensor]]


def checkpoint_thread(ranks: Ranks) -> Background:
    """Returns the thread in which a rank writes its checkpoints."""
    seconds = 2 * ranks.word_deadline  # each wait in it has that of the ranks
    timeout_message = f"{name_of_rank(ranks.rank)} waited {seconds:g} s for a checkpoint to be on the disk"
    return Background("checkpoint", seconds, timeout_message)


@dataclass
class Shards:
    """Holds copies of a rank's rows of model and optimizer, at one step."""

    model: Rows
    optimizer: Rows

    @classmethod
    def of(cls, policy: SavedPolicy, optimizer: Optimizer) -> Shards:
        optimizer.swap_local_averages()  # of a model with averages these are saved
        local_rows = {name: copy_local_rows(local_part(t), t) for name, t in policy.everything().items()}
        optimizer.swap_local_averages()
        return cls({name: rows for name, rows in local_rows.items() if rows is not None}, optimizer.snapshot())

    def write(self, ranks: Ranks, folder: str) -> None:
        """Write the rows into the files that rank 0 has made in `folder`. Every rank calls it.

        Raises `PartFailed` where another rank could not write its rows, and the error of this one.
        """
        purpose, error_here = "for the other ranks to write their rows of a checkpoint", None
        folder = ranks.share_text(folder, "for the place of a checkpoint", ranks.checkpoint_group)
        try:
            write_rows(Path(folder) / MODEL, self.model)
            write_rows(Path(folder) / STATE_FILE, self.optimizer)
        except OSError as error:
            error_here = error
        failed_ranks = ranks.gather_failures(error_here is None, purpose, ranks.checkpoint_group)
        if error_here is not None:
            raise error_here
        if failed_ranks:
            raise PartFailed(f"{name_of_rank(failed_ranks[0])} could not write its rows of a checkpoint: see its log")


@dataclass
class ModelWithoutRows:
    """Stands for the policy where a checkpoint is saved: writes its folder, with room for the rows of all ranks."""

    policy: SavedPolicy
    meta_tensors: Mapping[str, Tensor]

    def save(self, path: Path, tokenizer: Any = None) -> None:
        self.policy.save(path, tokenizer, self.meta_tensors)


@dataclass
class AllRows:
    """Stands for the optimizer, which is saved after the model: writes its files with room for all rows, and then has
    all ranks write the rows of both.
    """

    optimizer: Optimizer
    meta_tensors: Mapping[str, Tensor]
    shards: Shards
    ranks: Ranks

    def save(self, folder: Path) -> None:
        self.optimizer.write_empty_files(folder, self.meta_tensors)
        self.shards.write(self.ranks, str(folder.resolve()))


def copy_rows(policy: SavedPolicy, optimizer: Optimizer, ranks: Ranks) -> tuple[ModelWithoutRows, AllRows]:
    """Returns stand-ins for rank 0's policy and optimizer that write a checkpoint of all ranks, from copies of rows."""
    everything = policy.everything()
    meta_tensors = {name: torch.empty(tuple(t.shape), dtype=t.dtype, device="meta") for name, t in everything.items()}
    rows = AllRows(optimizer, optimizer.meta_tensors(), Shards.of(policy, optimizer), ranks)
    return ModelWithoutRows(policy, meta_tensors), rows
