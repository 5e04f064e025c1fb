"""Sums over positions and means over groups: the only places where an objective crosses rows.

Invariant: rows belong together because `group_B` says so, never because they are neighbours; results are gathered back
to rows, so that a permutation of the rows permutes the results and does nothing else. All of it is differentiable.

Shape legend: B rows, T completion positions, G groups.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tba.protocols import Measured

Aggregation: TypeAlias = Literal["row", "sequence", "token"]


def masked_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns [B] sums over sampled positions; values elsewhere are ignored, even if they are not finite."""
    return torch.where(mask_BT, x_BT, torch.zeros((), dtype=x_BT.dtype, device=x_BT.device)).sum(1)


def token_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns [B] means over the positions the policy sampled; 0 for a row without any."""
    return masked_sum(x_BT, mask_BT) / mask_BT.sum(1).clamp(min=1)


def average(x_BT: Tensor, mask_BT: Tensor, aggregation: Aggregation) -> Tensor:
    """Returns a scalar from terms at sampled positions; |y| counts a row's, N the batch's.

    `row` (1 / B) sum x, `sequence` (1 / B) sum x / |y|, `token` (1 / N) sum x. The last one ties all rows together.
    """
    if aggregation == "token":
        return masked_sum(x_BT, mask_BT).sum() / mask_BT.sum().clamp(min=1)
    return (token_mean if aggregation == "sequence" else masked_sum)(x_BT, mask_BT).mean()


def whitened(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns [B, T]: mean 0 and variance 1 over all sampled positions of the batch, 0 elsewhere."""
    count = mask_BT.sum().clamp(min=1)
    centred_BT = torch.where(mask_BT, x_BT - masked_sum(x_BT, mask_BT).sum() / count, 0.0)
    return centred_BT * (centred_BT.square().sum() / count + 1e-8).rsqrt()


def group_sizes(group_B: Tensor, groups: int) -> Tensor:
    """Returns [B] int64: how many rows the row's own group has, itself included."""
    return group_B.new_zeros(groups).index_add(0, group_B, torch.ones_like(group_B))[group_B]


def group_mean(x_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Returns [B]: the mean of `x_B` over the row's own group."""
    return _group_sum(x_B, group_B, groups) / group_sizes(group_B, groups)


def leave_one_out_mean(x_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Returns [B]: the mean over the *other* rows of the row's group; a row alone in its group gets its own value.

    In a group of K, x - mean = (K - 1)/K (x - leave-one-out mean).
    """
    size_B = group_sizes(group_B, groups)
    mean_B = (_group_sum(x_B, group_B, groups) - x_B) / (size_B - 1).clamp(min=1)
    return torch.where(size_B > 1, mean_B, x_B)


def group_std(x_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Returns [B]: the standard deviation over the row's own group (of a sample: K - 1 below), 0 for a row alone."""
    square_B = (x_B - group_mean(x_B, group_B, groups)).square()
    return (_group_sum(square_B, group_B, groups) / (group_sizes(group_B, groups) - 1).clamp(min=1)).sqrt()


def group_max(x_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Returns [B]: the largest over the row's own group."""
    return x_B.new_full((groups,), -torch.inf).scatter_reduce(0, group_B, x_B, "amax")[group_B]


def row_means(**columns_B: Tensor) -> Measured:
    """Returns means over rows, left on the device: reading them would wait for it."""
    return {name: x.detach().to(torch.float32).mean() for name, x in columns_B.items()}


def _group_sum(x_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Returns [B]: the sum over the row's own group."""
    return x_B.new_zeros(groups).index_add(0, group_B, x_B)[group_B]
