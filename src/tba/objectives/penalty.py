"""The distance to the reference policy, as a penalty in the reward or as a term of the loss.

Shape legend: B rows (one completion each), T completion positions.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tba.batch import Batch
from tba.objectives.correction import log_behavior

Penalised: TypeAlias = Literal["policy", "behavior"]
_LARGEST_NATS = 10.0  # of one token's log-ratio or divergence: a single token must not decide a row


def penalised_log_ratio(log_policy_BT: Tensor, batch: Batch, penalised: Penalised) -> Tensor:
    """Returns [B, T]: log q - log pi_ref at sampled positions, 0 elsewhere, without gradient. `penalised` chooses q."""
    log_q_BT = log_policy_BT.detach() if penalised == "policy" else log_behavior(batch)
    return torch.where(batch.mask_BT, log_q_BT - batch.log_reference_BT, 0.0)


def clamped_divergence(log_policy_BT: Tensor, batch: Batch) -> Tensor:
    """Returns [B]: the sum over tokens of log pi - log pi_ref, each kept within +-10, without gradient (TBA')."""
    return penalised_log_ratio(log_policy_BT, batch, "policy").clamp(-_LARGEST_NATS, _LARGEST_NATS).sum(1)


def k3(log_policy_BT: Tensor, batch: Batch) -> Tensor:
    """Returns [B, T]: u - log u - 1 with u = pi_ref / pi, at most 10 (without gradient there), 0 elsewhere.

    Never negative, and on-policy its mean is KL(pi || pi_ref) by token (Schulman 2020, "Approximating KL divergence").
    Its gradient there is not: with the answers held fixed it is that of KL(pi_ref || pi).
    """
    log_u_BT = torch.where(batch.mask_BT, batch.log_reference_BT - log_policy_BT, 0.0)
    log_u_BT = log_u_BT.clamp(-_LARGEST_NATS - 1, _LARGEST_NATS)  # wider than the bound below: only against overflow
    return (log_u_BT.exp() - log_u_BT - 1).clamp(max=_LARGEST_NATS)
