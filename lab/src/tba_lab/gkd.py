"""Generalised knowledge distillation, the loss that distillation by Trajectory Balance is compared with.

Shape legend: N token positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def generalised_jsd(log_student_NV: Tensor, log_teacher_NV: Tensor, beta: float) -> Tensor:
    """Returns the mean over positions of the generalised Jensen-Shannon divergence, in nats, as TRL's `GKDTrainer` has
    it: beta KL(p_T || m) + (1 - beta) KL(p_S || m) with m = beta p_T + (1 - beta) p_S. beta 0 is KL(p_T || p_S), beta 1
    KL(p_S || p_T), the reverse KL of on-policy distillation. Both are log-probabilities.

    Source: equation 1 of Agarwal et al. 2024, arXiv 2306.13649, whose limits at 0 and 1 are 0; TRL takes these instead.
    """
    if beta == 0:
        return kl(log_teacher_NV, log_student_NV).mean()
    if beta == 1:
        return kl(log_student_NV, log_teacher_NV).mean()
    log_mixture_NV = (beta * log_teacher_NV.exp() + (1 - beta) * log_student_NV.exp()).log()
    return (beta * kl(log_teacher_NV, log_mixture_NV) + (1 - beta) * kl(log_student_NV, log_mixture_NV)).mean()


def kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """Returns KL(p || q) [N] at each position."""
    return torch.sum(log_p_NV.exp() * (log_p_NV - log_q_NV), -1)
