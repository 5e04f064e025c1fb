"""Measures how far the policy has moved from the behaviour policy of a batch, and how far the batch is from balance.

Invariant: no forward pass is made for it. The forward passes of the step pass their log-probabilities in, and the
metrics are a few sums, left on the policy's device. Behaviour is what was stored when sampling, after temperature and
top-p: a searcher that samples at another temperature than the objective's is off-policy at lag 0, as is one whose
engine computes differently.

Shape legend: B rows (one completion each), T completion positions, N tokens, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tba.batch import Batch, to_device
from tba.protocols import Measured, PolicyOutput

LARGEST = 20.0  # of a log-ratio in the quantiles: beyond it a ratio has no meaning
LOW, HIGH = 0.05, 0.95


@dataclass
class Staleness:
    """Staleness of one step: pass it every row once, in whole groups (`see`), then ask for its `metrics`."""

    _rows: list[Tensor] = field(default_factory=list)  # each [4, B]: off_policy, log_ratio, reward, group
    _known: list[Tensor] = field(default_factory=list)  # each bool [B], on the host: has behaviour log-probabilities
    _tokens: list[Tensor] = field(default_factory=list)  # each [N]: log(mu / pi)
    _apart: list[Tensor] = field(default_factory=list)  # each [3]: sums of what `_see_lags` says
    _counts: list[Tensor] = field(default_factory=list)  # each [3], on the host: over how many
    _groups: int = 0

    def see(self, output: PolicyOutput, batch: Batch) -> None:
        """Take in the policy's output for `batch`, which is on the host: what is known is seen there."""
        log_policy_BT = output.log_policy_BT.detach().float()
        device = log_policy_BT.device
        there = batch.to(device)
        off_policy_B = log_policy_BT.new_full((batch.rows,), math.nan)
        known_B = torch.zeros(batch.rows, dtype=torch.bool)
        behavior_BT, there_BT = _behavior(batch), _behavior(there)
        if behavior_BT is not None and there_BT is not None:
            known_B = ~torch.where(batch.mask_BT, behavior_BT, 0.0).isnan().any(1)
            off_policy_BT = torch.where(there.mask_BT, there_BT - log_policy_BT, 0.0)
            off_policy_B = off_policy_BT.sum(1)  # NaN without behaviour log-probabilities
            token_N = (batch.mask_BT & known_B[:, None]).flatten().nonzero()[:, 0]
            self._tokens.append(off_policy_BT.flatten().index_select(0, to_device(token_N, device)))
            self._see_lags(off_policy_BT, batch, known_B)
        self._known.append(known_B)
        log_ratio_B = torch.where(there.mask_BT, log_policy_BT - there.log_reference_BT, 0.0).sum(1)
        group_B = (there.group_B + self._groups).to(log_ratio_B.dtype)
        self._rows.append(torch.stack([off_policy_B, log_ratio_B, there.reward_B.to(log_ratio_B.dtype), group_B]))
        self._groups += batch.groups

    def _see_lags(self, off_policy_BT: Tensor, batch: Batch, known_B: Tensor) -> None:
        """Take in, of the rows that the policy sampled as it is now, |log(mu / pi)| by token and by row; of those that
        it sampled earlier, log(mu / pi), by token and update.
        """
        if batch.lag_B is None:
            return
        now_B, before_B = known_B & (batch.lag_B == 0), known_B & (batch.lag_B > 0)
        tokens_B = batch.mask_BT.sum(1)
        self._counts.append(torch.stack([tokens_B[now_B].sum(), now_B.sum(), (tokens_B * batch.lag_B)[before_B].sum()]))
        now_B, before_B = to_device(torch.stack([now_B, before_B]), off_policy_BT.device)
        apart_BT = torch.where(now_B[:, None], off_policy_BT, 0.0)
        row_B = off_policy_BT.sum(1)
        moved_B = torch.where(before_B, row_B, 0.0)
        self._apart.append(torch.stack([apart_BT.abs().sum(), apart_BT.sum(1).abs().sum(), moved_B.sum()]))

    def metrics(self, beta: float | Tensor | None = None) -> Measured:
        """Returns what is known, in nats and over the rows that have behaviour log-probabilities; `beta` in units of
        reward.

        off_policy: the mean of log(mu / pi) over rows, whole answers: an estimate of KL(mu || pi) for the mixture mu of
        versions that sampled the batch. off_policy_p05, off_policy_p95: its quantiles (nearest rank), within +-20.
        off_policy_token, off_policy_token_p05, off_policy_token_p95: the same over tokens.
        ess: (sum w)^2 / (n sum w^2), w = pi / mu of a whole answer (Kish 1965): the effective sample size as a share of
        the n rows, were they reweighted to be on-policy; 1 on-policy, 1 / n when one row has all the weight.
        behavior_share: the share of rows with behaviour log-probabilities.
        mismatch, mismatch_answer: the mean of |log(mu / pi)| over tokens, and over whole answers, of the rows that were
        sampled from the policy as it is (lag 0): what is left is how engine and trainer compute.
        fresh_share: the share of these rows; where there are none the two are not given.
        drift: the sum of log(mu / pi) over rows that earlier policies sampled, over that of tokens times lag: by how
        much an update has moved the distribution of a token.
        residual_spread: the standard deviation of r / beta - log(pi / pi_ref) within groups, pooled (K - 1 below).
        residual_relative: the same over that of r / beta: 1 where the policy is the reference, 0 in balance, above 1
        where it has gone further than the rewards account for.
        """
        if not self._rows:
            return {}
        off_policy_B, log_ratio_B, reward_B, group_B = torch.cat(self._rows, 1)
        known_N = torch.cat(self._known).nonzero()[:, 0]
        known_B = off_policy_B.index_select(0, to_device(known_N, off_policy_B.device))
        found: Measured = {"behavior_share": len(known_B) / len(off_policy_B)}
        if len(known_B):
            found |= _spread("off_policy", known_B) | {"ess": effective_share(-known_B)}
        if self._tokens and len(tokens_N := torch.cat(self._tokens)):
            found |= _spread("off_policy_token", tokens_N)
        if self._apart:
            tokens, rows, updates = torch.stack(self._counts).sum(0).tolist()
            per_token, per_answer, since = torch.stack(self._apart).sum(0)
            found["fresh_share"] = rows / len(off_policy_B)
            found |= {"mismatch": per_token / tokens, "mismatch_answer": per_answer / rows} if rows else {}
            found |= {"drift": since / updates} if updates else {}
        if beta is not None and len(group_B) > self._groups:
            groups = self._groups
            residual = spread_within_groups(reward_B - beta * log_ratio_B, group_B.long(), groups)
            reward = spread_within_groups(reward_B, group_B.long(), groups)
            found |= {"residual_spread": residual / beta}
            found |= {"residual_relative": torch.where(reward > 0, residual / reward, math.nan)}
        return found


def _behavior(batch: Batch) -> Tensor | None:
    """Returns what there is of the behaviour policy's log-probabilities [B, T], NaN in rows that have none."""
    return batch.some_behavior_BT if batch.log_behavior_BT is None else batch.log_behavior_BT


def effective_share(log_w: Tensor) -> Tensor:
    """Returns Kish's effective sample size of weights exp(log_w) [n], over n: in 1/n..1; no weight overflows."""
    log_w = log_w - log_w.max()
    return (2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp() / len(log_w)


def spread_within_groups(x_B: Tensor, group_B: Tensor, groups: int) -> Tensor:
    """Returns the pooled standard deviation within groups: sqrt(sum (x - mean of its group)^2 / (B - G))."""
    size_G = x_B.new_zeros(groups).index_add(0, group_B, torch.ones_like(x_B))
    mean_G = x_B.new_zeros(groups).index_add(0, group_B, x_B) / size_G
    return ((x_B - mean_G[group_B]).square().sum() / (len(x_B) - groups)).sqrt()


def quantile(x_N: Tensor, share: float) -> Tensor:
    """Returns the nearest-rank quantile of any number of values: the smallest with at least `share` of them at or
    below.
    """
    return x_N.kthvalue(max(1, math.ceil(share * len(x_N) - 1e-9))).values


def _spread(name: str, x_N: Tensor) -> Measured:
    bounded_N = x_N.clamp(-LARGEST, LARGEST)
    return {
        name: x_N.mean(),
        f"{name}_p05": quantile(bounded_N, LOW),
        f"{name}_p95": quantile(bounded_N, HIGH),
    }
