"""Corrects an objective for the difference between the policy and the behaviour policy that sampled a row.

Invariant: where the policy equals the behaviour policy (rho = 1), every form has the gradient -A grad log pi. The form
changes an estimate only as far as the data are off-policy.

Shape legend: B rows (one completion each), T completion positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tba.batch import Batch
from tba.errors import UserError
from tba.fields import as_declared

_LARGEST_LOG_RATIO = 20.0  # of a log-ratio: beyond it a ratio has no meaning, and its exponential would overflow


@dataclass(frozen=True)
@as_declared
class Correction:
    """Sets how the ratio rho = pi / mu of policy to behaviour policy enters a policy gradient with advantages A.

    With SG for stop-gradient, the loss of one token is as follows; or, by sequence, that of one row, rho then being the
    product over the tokens that the policy sampled; or, by mean, that of one token with their geometric mean as rho:

        none       -A log pi                              as if mu were pi
        truncate   -SG[min(rho, cap)] A log pi            truncated importance weights (Ionides 2008)
        clamp      -min(rho, cap) A                       the same below the cap, and no gradient above it
        mask       -SG[rho] A log pi                      where 1 / cap <= rho <= cap, and nothing elsewhere
        clip       max(-rho A, -clip(rho, 1 +- clip) A)   PPO (Schulman et al. 2017, arXiv 1707.06347)
        decoupled  SG[min(prox / mu, cap)] max(-r A, -clip(r, 1 +- clip) A), r = pi / SG[prox]   decoupled PPO

    With `clip_high` the upper bound is 1 + clip_high (DAPO's clip-higher, Yu et al. 2025, arXiv 2503.14476).

    `decoupled` clips relative to a proximal policy that is newer than mu (Hilton et al. 2022, arXiv 2110.00641; AReaL,
    Fu et al. 2025, arXiv 2505.24298). prox is not computed but put between the two, as in A-3PO (Li et al. 2025, arXiv
    2512.06547): log prox = a log mu + (1 - a) log pi, a = 1 / d for a row that is d updates old and 0 where d is 0. So
    r is rho^(1 / d), and a ratio may move by d times as many nats as in `clip`. Where d is not known, a is 1: `clip`.

    The form `clip` by mean, with bounds of 3e-4 and 4e-4 and sums divided by each row's tokens, is GSPO (Zheng et al.
    2025, arXiv 2507.18071); `truncate` by token at 1.28 is CISPO's weight (MiniMax-M1, 2025, arXiv 2506.13585).

    mu is the distribution that was sampled from, after temperature and top-p. Where engine and trainer differ much, a
    ratio beyond its bounds is more likely their error than the policy's change: `mask` leaves it out. Raises
    `UserError` for bounds with which rho = 1 would be cut.
    """

    form: Literal["none", "truncate", "clamp", "mask", "clip", "decoupled"] = "none"  # how the ratio enters
    level: Literal["token", "sequence", "mean"] = "token"  # whose ratio: each token's, the completion's, or their mean
    cap: float = 8.0  # the largest ratio, in the forms truncate, clamp, mask and decoupled
    clip: float = 0.2  # how far from 1 a ratio still has a gradient, in the forms clip and decoupled
    clip_high: float | None = None  # the same above 1, such as 0.28; None: as far as below

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect in this form."""
        conditions = {}
        if self.form == "none":
            conditions["level"] = "form"
        if self.form not in ("truncate", "clamp", "mask", "decoupled"):
            conditions["cap"] = "form truncate, clamp, mask or decoupled"
        if self.form not in ("clip", "decoupled"):
            conditions |= dict.fromkeys(("clip", "clip_high"), "form clip or decoupled")
        return conditions

    def __post_init__(self) -> None:
        if not self.cap >= 1:
            raise UserError(f"the correction's cap is {self.cap}, but it has to be at least 1, the ratio on-policy.")
        require_clip(self.clip)
        if self.clip_high is not None and not 0 < self.clip_high < math.inf:
            raise UserError(f"the correction's clip_high is {self.clip_high}, but must be above 0; 0.28 is DAPO's")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.form == "none" else frozenset({"log_behavior"})

    def terms(self, log_policy_BT: Tensor, advantage_B: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns [B, T] terms at sampled positions, whose sum is the loss of all rows, and columns [B] for metrics.

        `cut` is the share of a row's tokens at which a bound was active (by sequence: whether it was for the row),
        `off_policy` the row's log(mu / pi), which is an estimate of KL(mu || pi).
        """
        advantage_B1, mask_BT = advantage_B.detach()[:, None], batch.mask_BT
        if self.form == "none":
            return -advantage_B1 * log_policy_BT, {}
        log_rho_BT = log_ratio_to_behavior(log_policy_BT, batch)
        weight_BT = mask_BT.to(log_rho_BT.dtype)
        share_BT = weight_BT / weight_BT.sum(1, keepdim=True).clamp(min=1)  # of its row, each token
        off_policy_B = -log_rho_BT.detach().sum(1)
        if self.level == "sequence":  # one term for the row, in equal parts on its tokens
            log_rho_BT, weight_BT = log_rho_BT.sum(1, keepdim=True), share_BT
        elif self.level == "mean":
            log_rho_BT = (log_rho_BT * share_BT).sum(1, keepdim=True)
        if self.form == "clip":
            terms_BT, cut_BT = clipped(log_rho_BT, advantage_B1, self.clip, self.clip_high)
            terms_BT = terms_BT * weight_BT
        elif self.form == "decoupled":
            log_shift_BT = (1 - behavior_share(batch, log_rho_BT.dtype)) * log_rho_BT.detach()  # log(prox / mu)
            terms_BT, cut_BT = clipped(log_rho_BT - log_shift_BT, advantage_B1, self.clip, self.clip_high)
            terms_BT = log_shift_BT.clamp(max=math.log(self.cap)).exp() * terms_BT * weight_BT
        elif self.form == "mask":
            cut_BT = log_rho_BT.abs() > math.log(self.cap)
            terms_BT = -log_rho_BT.detach().masked_fill(cut_BT, -math.inf).exp() * advantage_B1 * log_policy_BT
        else:
            bounded_BT, cut_BT = log_rho_BT.clamp(max=math.log(self.cap)), log_rho_BT > math.log(self.cap)
            if self.form == "truncate":
                terms_BT = -bounded_BT.detach().exp() * advantage_B1 * log_policy_BT
            else:
                terms_BT = -bounded_BT.exp() * advantage_B1 * weight_BT
        return terms_BT, {"cut": (cut_BT * share_BT).sum(1), "off_policy": off_policy_B}


def clipped(log_rho: Tensor, advantage: Tensor, clip: float, clip_high: float | None = None) -> tuple[Tensor, Tensor]:
    """Returns max(-rho A, -clip(rho, 1 - clip, 1 + clip_high) A), and where its second term is larger: rho has no
    gradient there, so that it is pushed no further up than 1 + clip_high (None: 1 + clip), nor down than 1 - clip.
    """
    rho = log_rho.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    clipped_rho = rho.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    loss, clipped_loss = -rho * advantage, -clipped_rho * advantage
    return torch.maximum(loss, clipped_loss), clipped_loss > loss


def behavior_share(batch: Batch, dtype: torch.dtype) -> Tensor:
    """Returns [B, 1]: the share of the behaviour in the proximal policy, 1 / d for rows that are d updates old, 0 for
    rows of the present weights, 1 where the age is not known.
    """
    if batch.lag_B is None:
        return torch.ones(batch.rows, 1, dtype=dtype, device=batch.reward_B.device)
    lag_B1 = batch.lag_B[:, None]
    return torch.where(lag_B1 == 0, 0.0, 1 / lag_B1.clamp(min=1).to(dtype))


def log_ratio_to_behavior(log_policy_BT: Tensor, batch: Batch) -> Tensor:
    """Returns [B, T]: log pi - log mu at sampled positions, 0 elsewhere."""
    return torch.where(batch.mask_BT, log_policy_BT - log_behavior(batch), 0.0)


def sequence_log_ratio(log_policy_BT: Tensor, batch: Batch) -> Tensor | None:
    """Returns [B]: log(pi / mu) of whole answers, NaN for rows of unknown behaviour; None where none is known."""
    behavior_BT = batch.some_behavior_BT if batch.log_behavior_BT is None else batch.log_behavior_BT
    if behavior_BT is None:
        return None
    return torch.where(batch.mask_BT, log_policy_BT - behavior_BT, 0.0).sum(1)


def log_behavior(batch: Batch) -> Tensor:
    """Returns the batch's log_behavior_BT. Raises `ValueError` when it has none."""
    if batch.log_behavior_BT is None:
        raise ValueError("this objective needs log_behavior of every row, but the batch lacks it")
    return batch.log_behavior_BT


def require_clip(clip: float) -> None:
    """Raises `UserError` unless 0 < clip < 1."""
    if not 0 < clip < 1:
        raise UserError(f"the clip of a ratio is {clip}, but it has to be above 0 and below 1; 0.2 is the usual one.")
