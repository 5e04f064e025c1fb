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

LARGEST_LOG_RATIO = 20.0  # of a log-ratio in the quantiles: beyond it a ratio has no meaning
LOW_QUANTILE, HIGH_QUANTILE = 0.05, 0.95


@dataclass
class Staleness:
    """Measures the staleness of one step: `add` every row once, in whole groups, then ask for its `metrics`."""

    _rows: list[Tensor] = field(default_factory=list)  # each [4, B]: off_policy, log_ratio, reward, group
    _has_behavior: list[Tensor] = field(default_factory=list)  # each bool [B], on the host
    _token_off_policy: list[Tensor] = field(default_factory=list)  # each [N]: log(mu / pi)
    _lag_sums: list[Tensor] = field(default_factory=list)  # each [3]: the sums of `_add_lags`
    _lag_counts: list[Tensor] = field(default_factory=list)  # each [3], on the host: over how many
    _group_count: int = 0

    def add(self, output: PolicyOutput, batch: Batch) -> None:
        """Add the policy's output for `batch`, which is on the host, so that no device is waited for."""
        log_policy_BT = output.log_policy_BT.detach().float()
        device = log_policy_BT.device
        device_batch = batch.to(device)
        off_policy_B = log_policy_BT.new_full((batch.rows,), math.nan)
        has_behavior_B = torch.zeros(batch.rows, dtype=torch.bool)
        behavior_BT, device_behavior_BT = _behavior(batch), _behavior(device_batch)
        if behavior_BT is not None and device_behavior_BT is not None:
            has_behavior_B = ~torch.where(batch.mask_BT, behavior_BT, 0.0).isnan().any(1)
            off_policy_BT = torch.where(device_batch.mask_BT, device_behavior_BT - log_policy_BT, 0.0)
            off_policy_B = off_policy_BT.sum(1)  # NaN without behaviour log-probabilities
            token_N = (batch.mask_BT & has_behavior_B[:, None]).flatten().nonzero()[:, 0]
            self._token_off_policy.append(off_policy_BT.flatten().index_select(0, to_device(token_N, device)))
            self._add_lags(off_policy_BT, batch, has_behavior_B)
        self._has_behavior.append(has_behavior_B)
        log_ratio_B = torch.where(device_batch.mask_BT, log_policy_BT - device_batch.log_reference_BT, 0.0).sum(1)
        group_B = (device_batch.group_B + self._group_count).to(log_ratio_B.dtype)
        reward_B = device_batch.reward_B.to(log_ratio_B.dtype)
        self._rows.append(torch.stack([off_policy_B, log_ratio_B, reward_B, group_B]))
        self._group_count += batch.groups

    def _add_lags(self, off_policy_BT: Tensor, batch: Batch, has_behavior_B: Tensor) -> None:
        """Add |log(mu / pi)| of rows that the present policy sampled, and log(mu / pi) of rows sampled earlier."""
        if batch.lag_B is None:
            return
        is_current_B, is_older_B = has_behavior_B & (batch.lag_B == 0), has_behavior_B & (batch.lag_B > 0)
        tokens_B = batch.mask_BT.sum(1)
        updates_B = tokens_B * batch.lag_B
        self._lag_counts.append(
            torch.stack([tokens_B[is_current_B].sum(), is_current_B.sum(), updates_B[is_older_B].sum()])
        )
        is_current_B, is_older_B = to_device(torch.stack([is_current_B, is_older_B]), off_policy_BT.device)
        current_BT = torch.where(is_current_B[:, None], off_policy_BT, 0.0)
        older_B = torch.where(is_older_B, off_policy_BT.sum(1), 0.0)
        self._lag_sums.append(torch.stack([current_BT.abs().sum(), current_BT.sum(1).abs().sum(), older_B.sum()]))

    def metrics(self, beta: float | Tensor | None = None) -> Measured:
        """Returns the metrics, in nats and over the rows that have behaviour log-probabilities; `beta` in units of
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
        behavior_row_N = torch.cat(self._has_behavior).nonzero()[:, 0]
        behavior_off_policy_B = off_policy_B.index_select(0, to_device(behavior_row_N, off_policy_B.device))
        metrics: Measured = {"behavior_share": len(behavior_off_policy_B) / len(off_policy_B)}
        if len(behavior_off_policy_B):
            metrics |= _summarize("off_policy", behavior_off_policy_B) | {
                "ess": effective_share(-behavior_off_policy_B)
            }
        if self._token_off_policy and len(tokens_N := torch.cat(self._token_off_policy)):
            metrics |= _summarize("off_policy_token", tokens_N)
        if self._lag_sums:
            tokens, rows, token_updates = torch.stack(self._lag_counts).sum(0).tolist()
            per_token, per_answer, drift_sum = torch.stack(self._lag_sums).sum(0)
            metrics["fresh_share"] = rows / len(off_policy_B)
            metrics |= {"mismatch": per_token / tokens, "mismatch_answer": per_answer / rows} if rows else {}
            metrics |= {"drift": drift_sum / token_updates} if token_updates else {}
        if beta is not None and len(group_B) > self._group_count:
            groups = self._group_count
            residual_spread = spread_within_groups(reward_B - beta * log_ratio_B, group_B.long(), groups)
            reward_spread = spread_within_groups(reward_B, group_B.long(), groups)
            metrics |= {"residual_spread": residual_spread / beta}
            metrics |= {"residual_relative": torch.where(reward_spread > 0, residual_spread / reward_spread, math.nan)}
        return metrics


def _behavior(batch: Batch) -> Tensor | None:
    """Returns the behaviour policy's log-probabilities [B, T], NaN in rows that have none; None without any."""
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


def nearest_rank_quantile(x_N: Tensor, share: float) -> Tensor:
    """Returns the nearest-rank quantile: the smallest value with at least `share` of all values at or below it."""
    return x_N.kthvalue(max(1, math.ceil(share * len(x_N) - 1e-9))).values


def _summarize(name: str, x_N: Tensor) -> Measured:
    bounded_N = x_N.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return {
        name: x_N.mean(),
        f"{name}_p05": nearest_rank_quantile(bounded_N, LOW_QUANTILE),
        f"{name}_p95": nearest_rank_quantile(bounded_N, HIGH_QUANTILE),
    }
