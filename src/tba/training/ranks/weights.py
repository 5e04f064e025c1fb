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

from tba.host_copies import HostCopies
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

_WHY = "for the other ranks' part of the weights"


@dataclass(frozen=True)
class Leaving:
    """A rank's side of the weights of one version that leave all ranks."""

    shards: Mapping[str, Tensor]  # as the policy has them
    rows: Mapping[str, Tensor]  # this rank's, read by `items()`
    ranks: Ranks
    dtype: torch.dtype | None  # to which they are cast; None: they are not

    @classmethod
    def of(
        cls, policy: SavedPolicy, ranks: Ranks, everything: bool, dtype: torch.dtype | None, copies: HostCopies
    ) -> Leaving:
        """Begin; `everything` leaves as it is trained, for a checkpoint, else what is published, from `copies`."""
        shards = policy.everything() if everything else policy.weights()
        rows = {name: local_part(tensor) for name, tensor in shards.items()}
        return cls(shards, rows if everything else copies.begin_copy(rows, dtype), ranks, dtype)

    @property
    def hold(self) -> Callable[[], bool]:
        """Returns what the next update calls before it (`HostCopies`): False where the rows are read in place."""
        return self.rows.hold if isinstance(self.rows, TensorStream) else lambda: False

    @property
    def like(self) -> dict[str, Tensor]:
        """Whole tensors as they leave, on the meta device."""
        dtypes = {name: written_type(t.dtype, self.dtype) for name, t in self.shards.items()}
        return {n: torch.empty(tuple(t.shape), dtype=dtypes[n], device="meta") for n, t in self.shards.items()}

    def send(self) -> None:
        """Send what rank 0, which goes through `whole` or `changes`, asks of this rank."""
        since = self.since(None)
        if since is None:
            for _ in self.whole():
                pass
            return
        with safetensors.safe_open(since, framework="pt") as old:
            for _ in self.changes(old):
                pass

    def since(self, base: Path | None) -> Path | None:
        """Returns the file of the weights since which only changes are sent, None where everything is.

        Every rank calls it; what rank 0 gives counts, and a file that another rank does not see is none.
        """
        name = self.ranks.tell("" if base is None else base.name, _WHY, self.ranks.weights).strip()
        if not name:
            return None
        folder = self.ranks.shared(None if base is None else base.parent, _WHY, self.ranks.weights)
        return None if folder is None else folder / name

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, whole tensor) on rank 0; the others send their rows."""
        for (name, own), tensor in zip(self.rows.items(), self.shards.values(), strict=True):
            cast = own.to(written_type(own.dtype, self.dtype))  # on its device: half as much leaves it
            if not is_sharded(tensor):
                yield name, cast
                continue
            whole = gather_rows(cast.cpu(), tensor.shape, self.ranks.weights)
            if whole is not None:
                yield name, whole

    def changes(self, old: Any) -> Iterator[TensorChange]:
        """Yields what differs from an open file on rank 0; the others send what differs in their rows. Where many
        elements do, the whole tensor travels and is written.
        """
        ranks = self.ranks
        for (name, own), tensor in zip(self.rows.items(), self.shards.values(), strict=True):
            if not is_sharded(tensor):
                if ranks.rank == 0:
                    yield from changes_since(old.get_tensor, {name: own}, self.dtype)
                continue
            kind, numbers = written_type(own.dtype, self.dtype), tensor.numel()
            first, last = row_range(len(tensor), ranks.rank, ranks.count)
            flat = own.reshape(-1)
            at = changed_indices(flat, old.get_slice(name)[first:last].reshape(-1), kind)
            counts = ranks.counts(len(at), _WHY, ranks.weights)
            if is_whole_smaller(sum(counts), numbers, kind):
                whole = gather_rows(own.to(kind).cpu(), tensor.shape, ranks.weights)
                if whole is not None:
                    yield TensorChange(name, whole)
            elif any(counts):
                values = flat[at.to(flat.device)].to("cpu", kind)
                at = (at + first * (numbers // len(tensor))).to(index_type(numbers))
                all_at, all_values = (ranks.brought(part, counts, _WHY, ranks.weights) for part in (at, values))
                if all_values is not None:
                    yield TensorChange(name, all_values, all_at)
