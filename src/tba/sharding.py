"""Tensors of which each rank holds some rows: the shards of FSDP2, as plain tensors.

Invariant: of n rows in dimension 0, rank r of R holds r c .. (r + 1) c - 1 with c = ceil(n / R), which is how FSDP2
deals them; the last ranks may hold fewer, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Sharding:
    """Over which ranks a policy's parameters are sharded, and in which type it computes."""

    mesh: Any  # a one-dimensional torch DeviceMesh
    compute: torch.dtype  # of forward and backward; parameters, sums of gradients and moments keep their own
    wait_for_ranks: Callable[[], None] = lambda: None  # a rank calls it once it has read its rows, before any
    # collective, since others may still be reading theirs


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Returns whether the tensor is a shard (a `DTensor`)."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, detached, on the same memory: its rows, or all of what is not sharded."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        local_tensor: Tensor = tensor.to_local()
    return local_tensor.detach()


def copy_local_rows(local_rows: Tensor, tensor: Tensor) -> tuple[int, Tensor] | None:
    """Returns (number of the first row, a copy of the rows on the host) for this rank's rows of what is sharded as
    `tensor` is; None where this rank has no rows, or rank 0 has the same, unsharded tensor.
    """
    if not (local_rows.ndim and is_sharded(tensor)):
        return None if dist.get_rank() else (0, local_rows.detach().to("cpu", copy=True))
    if not len(local_rows):
        return None
    first_row, _ = row_range(len(tensor), tensor.device_mesh.get_local_rank(), tensor.device_mesh.size())
    return first_row, local_rows.detach().to("cpu", copy=True)


def process_group(tensors: Sequence[Tensor]) -> Any:
    """Returns the process group over which the tensors are sharded; None when none is sharded."""
    shard = next((t for t in tensors if is_sharded(t)), None)
    return None if shard is None else shard.device_mesh.get_group()


def row_range(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns the first row of `rank` and the one after its last, of `count` rows."""
    rows_per_rank = -(-count // ranks)
    return min(rank * rows_per_rank, count), min((rank + 1) * rows_per_rank, count)


def gather_rows(local_rows: Tensor, shape: Sequence[int], group: Any) -> Tensor | None:
    """Returns the whole tensor, of `shape`, on rank 0 of `group`, else None. Every rank calls it with its rows."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return local_rows
    rows_per_rank = -(-shape[0] // ranks)
    if len(local_rows) < rows_per_rank:
        padded_rows = local_rows.new_zeros(rows_per_rank, *shape[1:])
        padded_rows[: len(local_rows)] = local_rows
        local_rows = padded_rows
    gathered_rows = local_rows.new_empty(ranks * rows_per_rank, *shape[1:]) if rank == 0 else None
    parts = None if gathered_rows is None else list(gathered_rows.split(rows_per_rank))
    dist.gather(local_rows.contiguous(), parts, group=group, group_dst=0)
    return None if gathered_rows is None else gathered_rows[: shape[0]]
