"""Sums over positions and means over groups: the only places where an objective crosses rows.

Invariant: rows belong together because `group_B` says so, never because they are neighbours; results are gathered back
to rows, so that a permutation of the rows permutes the results and does nothing else. All of it is differentiable.

Shape legend: B rows, T completion positions, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B] sums over the positions the policy sampled; what lies elsewhere is ignored, even if it is not finite."""
    return torch.where(mask_BT, x_BT, torch.zeros((), dtype=x_BT.dtype, device=x_BT.device)).sum(1)


def group_sizes(group_B: Tensor, groups: int) -> Tensor:
    """[B] int64: how many rows the row's own group has, itself included."""
    return torch.bincount(group_B, minlength=groups)[group_B]


def group_mean(x_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """[B]: the mean of `x_B` over the row's own group."""
    return _group_sum(x_B, group_B, groups) / group_sizes(group_B, groups)


def leave_one_out_mean(x_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """[B]: the mean over the *other* rows of the row's group; a row alone in its group gets its own value.

    In a group of K, x - mean = (K - 1)/K (x - leave-one-out mean).
    """
    size_B = group_sizes(group_B, groups)
    others_B = (_group_sum(x_B, group_B, groups) - x_B) / (size_B - 1).clamp(min=1)
    return torch.where(size_B > 1, others_B, x_B)


def row_means(**columns_B: Tensor) -> dict[str, float]:
    """Means over rows as floats, read from the device once."""
    means = torch.stack([x.detach().to(torch.float32).mean() for x in columns_B.values()])
    return dict(zip(columns_B, means.tolist(), strict=True))


def _group_sum(x_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """[B]: the sum over the row's own group."""
    return x_B.new_zeros(groups).index_add(0, group_B, x_B)[group_B]
