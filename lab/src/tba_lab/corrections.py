"""Corrections of published methods that are compared with those of the package.

Shape legend: B rows (one completion each), T completion positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tba.batch import Batch
from tba.objectives.correction import Correction, log_behavior, log_ratio_to_behavior

_LARGEST = 20.0  # of a log-ratio, whose exponential would overflow


@dataclass(frozen=True)
class Dppo(Correction):
    """-rho A by token, 0 where a probability has moved far enough, + pull log(rho)^2 everywhere.

    Far enough: pi - mu above `difference` where A > 0, below -`difference` elsewhere. It is the loss that prime-rl has
    by default (src/prime_rl/trainer/rl/loss.py, August 2026): the mask of DPPO (arXiv 2602.04879) in its binary form,
    with the square of Kimi K2.5 (arXiv 2602.02276).
    """

    difference: float = 0.2
    pull: float = 1e-3

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"log_behavior"})

    def terms(self, log_policy_BT: Tensor, advantage_B: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """[B, T] terms at sampled positions, and `cut` [B], the share of a row's tokens that were left out."""
        advantage_B1, mask_BT = advantage_B.detach()[:, None], batch.mask_BT
        log_rho_BT = log_ratio_to_behavior(log_policy_BT, batch)
        moved_BT = torch.where(mask_BT, log_policy_BT.detach().exp() - log_behavior(batch).exp(), 0.0)
        far_BT = torch.where(advantage_B1 > 0, moved_BT > self.difference, moved_BT < -self.difference)
        rho_BT = log_rho_BT.clamp(-_LARGEST, _LARGEST).exp()
        terms_BT = torch.where(far_BT, 0.0, -rho_BT * advantage_B1) + self.pull * log_rho_BT.square()
        share_B = (far_BT & mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)
        return terms_BT, {"cut": share_B, "off_policy": -log_rho_BT.detach().sum(1)}


@dataclass(frozen=True)
class Topr(Correction):
    """-SG[w] A log pi, w = 1 where A > 0 and min(rho, 1) elsewhere, rho of the whole answer.

    Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286): bad answers lose their weight as they become
    rare, good ones never do.
    """

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"log_behavior"})

    def terms(self, log_policy_BT: Tensor, advantage_B: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """[B, T] terms at sampled positions, and `cut` [B], whether a row's ratio was cut at 1."""
        log_rho_B = log_ratio_to_behavior(log_policy_BT.detach(), batch).sum(1)
        weight_B = torch.where(advantage_B > 0, 1.0, log_rho_B.clamp(max=0).exp())
        columns = {"cut": (advantage_B <= 0) & (log_rho_B > 0), "off_policy": -log_rho_B}
        return -(weight_B * advantage_B.detach())[:, None] * log_policy_BT, columns
