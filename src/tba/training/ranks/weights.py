"""Weights that leave a trainer of several ranks: gathered on rank 0 one tensor after the other, or only what changed.

Invariant: every rank goes through the same tensors in the same order. Each casts, and compares, its own rows on their
device before they travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from tba.device_to_host import HostCopies
from tba.protocols import SavedPolicy
from tba.sharding import gather_rows, is_sharded, local_part, row_range
from tba.streaming import (
    TensorChange,
    TensorStream,
    changed_indices,
    changes_since,
    index_type,
    is_whole_smaller,
    written_type,
)
from tba.training.ranks.messages import Ranks

_PURPOSE = "for the other ranks' part of the weights"


@dataclass(frozen=True)
class OutgoingWeights:
    """A rank's part of the weights of one version on their way to rank 0."""

    shards: Mapping[str, Tensor]  # as the policy has them
    rows: Mapping[str, Tensor]  # this rank's, read by `items()`
    ranks: Ranks
    dtype: torch.dtype | None  # to which they are cast; None: they are not

    @classmethod
    def of(
        cls, policy: SavedPolicy, ranks: Ranks, everything: bool, dtype: torch.dtype | None, copies: HostCopies
    ) -> OutgoingWeights:
        """Returns `everything` as it is trained, for a checkpoint, or the published weights, from `copies`."""
        shards = policy.everything() if everything else policy.weights()
        rows = {name: local_part(tensor) for name, tensor in shards.items()}
        return cls(shards, rows if everything else copies.begin_copy(rows, dtype), ranks, dtype)

    @property
    def hold(self) -> Callable[[], bool]:
        """Returns the function to call before an update (`HostCopies`); it gives False if rows are read in place."""
        return self.rows.hold if isinstance(self.rows, TensorStream) else lambda: False

    @property
    def like(self) -> dict[str, Tensor]:
        """Returns the whole tensors as rank 0 gets them, on the meta device."""
        dtypes = {name: written_type(t.dtype, self.dtype) for name, t in self.shards.items()}
        return {n: torch.empty(tuple(t.shape), dtype=dtypes[n], device="meta") for n, t in self.shards.items()}

    def send(self) -> None:
        """Send this rank's part to rank 0, which goes through `whole_tensors` or `changes`."""
        base_file = self.agree_on_base(None)
        if base_file is None:
            for _ in self.whole_tensors():
                pass
            return
        with safetensors.safe_open(base_file, framework="pt") as base_tensors:
            for _ in self.changes(base_tensors):
                pass

    def agree_on_base(self, base: Path | None) -> Path | None:
        """Returns the file of the weights since which only changes are sent, None if all weights are sent.

        Every rank calls it; the `base` of rank 0 counts, unless another rank does not see that file.
        """
        name = self.ranks.share_text("" if base is None else base.name, _PURPOSE, self.ranks.weights_group).strip()
        if not name:
            return None
        folder = self.ranks.share_folder(None if base is None else base.parent, _PURPOSE, self.ranks.weights_group)
        return None if folder is None else folder / name

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, whole tensor) on rank 0; the others send their rows."""
        for (name, rows), tensor in zip(self.rows.items(), self.shards.values(), strict=True):
            cast_rows = rows.to(written_type(rows.dtype, self.dtype))  # on its device: half as much leaves it
            if not is_sharded(tensor):
                yield name, cast_rows
                continue
            whole = gather_rows(cast_rows.cpu(), tensor.shape, self.ranks.weights_group)
            if whole is not None:
                yield name, whole

    def changes(self, base_tensors: Any) -> Iterator[TensorChange]:
        """Yields the changes since an open file on rank 0; the others send those in their rows. Where many
        elements
        differ, the whole tensor travels and is written.
        """
        ranks = self.ranks
        for (name, rows), tensor in zip(self.rows.items(), self.shards.values(), strict=True):
            if not is_sharded(tensor):
                if ranks.rank == 0:
                    yield from changes_since(base_tensors.get_tensor, {name: rows}, self.dtype)
                continue
            dtype, count = written_type(rows.dtype, self.dtype), tensor.numel()
            begin, end = row_range(len(tensor), ranks.rank, ranks.count)
            flat = rows.reshape(-1)
            index = changed_indices(flat, base_tensors.get_slice(name)[begin:end].reshape(-1), dtype)
            counts = ranks.gather_counts(len(index), _PURPOSE, ranks.weights_group)
            if is_whole_smaller(sum(counts), count, dtype):
                whole = gather_rows(rows.to(dtype).cpu(), tensor.shape, ranks.weights_group)
                if whole is not None:
                    yield TensorChange(name, whole)
            elif any(counts):
                values = flat[index.to(flat.device)].to("cpu", dtype)
                index = (index + begin * (count // len(tensor))).to(index_type(count))
                all_indices = ranks.gather_flat(index, counts, _PURPOSE, ranks.weights_group)
                all_values = ranks.gather_flat(values, counts, _PURPOSE, ranks.weights_group)
                if all_values is not None:
                    yield TensorChange(name, all_values, all_indices)
