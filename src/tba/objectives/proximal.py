"""PPO's clipped terms for advantages by token, which PPO and VinePPO share.

Shape legend: B rows (one completion each), T completion positions.
"""

from __future__ import annotations

from torch import Tensor

from tba.batch import Batch
from tba.objectives.correction import clipped, log_ratio_to_behavior
from tba.objectives.reduce import token_mean, whitened


def proximal_terms(
    log_policy_BT: Tensor, advantage_BT: Tensor, batch: Batch, clip: float, whiten: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """[B, T] max(-rho A, -clip(rho, 1 +- clip) A), rho = pi / mu of the token, and columns [B] for metrics.

    The advantages are constants; with `whiten` they are first brought to mean 0 and variance 1 over the batch's tokens.
    """
    mask_BT = batch.mask_BT
    used_BT = whitened(advantage_BT, mask_BT) if whiten else advantage_BT
    log_rho_BT = log_ratio_to_behavior(log_policy_BT, batch)
    terms_BT, cut_BT = clipped(log_rho_BT, used_BT, clip)
    columns = {
        "advantage": token_mean(advantage_BT.abs(), mask_BT),
        "cut": token_mean(cut_BT.to(terms_BT.dtype), mask_BT),
        "off_policy": -log_rho_BT.sum(1),
    }
    return terms_BT, columns
