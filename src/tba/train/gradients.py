"""The gradient of an objective over a batch, in as few passes as memory allows.

Invariant: it is the same gradient whichever way it was taken. Three ways:

- *whole*: one forward and one backward pass;
- *by groups*: one of each per micro-batch of whole groups, weighted by their rows; exact for an objective that is a
  mean over rows of terms that need only their own group (`Objective.by_group`);
- *by slices*: for any objective, and for groups larger than a pass. The log-probabilities and heads of the whole batch
  are computed without gradient, the objective is differentiated with respect to these leaves, and each micro-batch
  backpropagates its slice of that derivative (the chain rule, cut in two). One forward pass more.

The objective must not be random, and the policy has to give the same output for a row in whichever micro-batch it is.

Shape legend: B rows, T completion positions, G groups, N rows of one micro-batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from tba.batch import Batch, micro_batches
from tba.protocols import Objective, Policy, PolicyOutput


def backward(
    policy: Policy, objective: Objective, batch: Batch, step: int, max_tokens: int
) -> tuple[float, dict[str, float]]:
    """Add the gradient of the loss at optimizer step `step` (from 1) to the policy's parameters.

    `max_tokens` (each prompt once, plus its completions) bounds one pass. Returns the loss and the objective's
    metrics, which by groups are averaged over micro-batches by their rows. Stops short of a backward pass when the
    loss is not finite: the gradient is then incomplete and has to be dropped.
    """
    tokens_G = batch.prompt_length_G.scatter_add(0, batch.group_B, batch.length_B)
    if int(tokens_G.sum()) <= max_tokens:
        return _whole(policy, objective, batch, step)
    if objective.by_group and int(tokens_G.max()) <= max_tokens:
        return _by_groups(policy, objective, batch, step, list(micro_batches(batch, max_tokens)))
    return _by_slices(policy, objective, batch, step, list(micro_batches(batch, max_tokens)))


def _whole(policy: Policy, objective: Objective, batch: Batch, step: int) -> tuple[float, dict[str, float]]:
    output = policy.evaluate(batch)
    loss, metrics = objective(output, batch, step)
    value = float(loss)
    if math.isfinite(value):
        loss.backward()
    return value, {"log_ratio": _log_ratio(output, batch), **metrics}


def _by_groups(
    policy: Policy, objective: Objective, batch: Batch, step: int, parts: Sequence[Tensor]
) -> tuple[float, dict[str, float]]:
    total, averages = 0.0, defaultdict[str, float](float)
    for rows_N in parts:
        part = batch.select(rows_N)
        share = part.rows / batch.rows
        output = policy.evaluate(part)
        loss, metrics = objective(output, part, step)
        value = float(loss)
        total += share * value
        for name, metric in {"log_ratio": _log_ratio(output, part), **metrics}.items():
            averages[name] += share * metric
        if not math.isfinite(total):
            break
        (share * loss).backward()
    return total, dict(averages)


def _by_slices(
    policy: Policy, objective: Objective, batch: Batch, step: int, parts: Sequence[Tensor]
) -> tuple[float, dict[str, float]]:
    leaves = _evaluate_without_gradient(policy, batch, parts)
    with torch.enable_grad():
        loss, metrics = objective(leaves, batch, step)
    value = float(loss)
    metrics = {"log_ratio": _log_ratio(leaves, batch), **metrics}
    if not math.isfinite(value):
        return value, metrics
    loss.backward()
    done_G = torch.zeros(batch.groups, dtype=torch.bool, device=batch.group_B.device)
    for rows_N in parts:
        part = batch.select(rows_N)
        groups = torch.unique(batch.group_B[rows_N])
        pairs = _slices(policy.evaluate(part), leaves, rows_N, groups, done_G)
        if pairs:
            outputs, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, gradients)
        done_G[groups] = True
    return value, metrics


def _evaluate_without_gradient(policy: Policy, batch: Batch, parts: Sequence[Tensor]) -> PolicyOutput:
    """The output for the whole batch, put together from its micro-batches, as leaves that take a gradient."""
    log_policy_BT = torch.zeros_like(batch.log_reference_BT)
    value_BT: Tensor | None = None
    log_z_G: Tensor | None = None
    with torch.no_grad():
        for rows_N in parts:
            part = batch.select(rows_N)
            width = part.completion_BT.shape[1]
            output = policy.evaluate(part)
            log_policy_BT[rows_N, :width] = output.log_policy_BT.to(log_policy_BT.dtype)
            if output.value_BT is not None:
                value_BT = torch.zeros_like(log_policy_BT) if value_BT is None else value_BT
                value_BT[rows_N, :width] = output.value_BT.to(value_BT.dtype)
            if output.log_z_G is not None:
                log_z_G = log_policy_BT.new_zeros(batch.groups) if log_z_G is None else log_z_G
                log_z_G[torch.unique(batch.group_B[rows_N])] = output.log_z_G.to(log_z_G.dtype)
    for leaf in (log_policy_BT, value_BT, log_z_G):
        if leaf is not None:
            leaf.requires_grad_()
    return PolicyOutput(log_policy_BT, value_BT, log_z_G)


def _slices(
    output: PolicyOutput, leaves: PolicyOutput, rows_N: Tensor, groups: Tensor, done_G: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """(what the policy gave for one micro-batch, its slice of the loss's derivative) of each output in use.

    log Z belongs to a group and a group may be split: its derivative goes with the first micro-batch that has it.
    """
    width = output.log_policy_BT.shape[1]
    pairs = []
    for made_NT, leaf_BT in ((output.log_policy_BT, leaves.log_policy_BT), (output.value_BT, leaves.value_BT)):
        if made_NT is not None and leaf_BT is not None and leaf_BT.grad is not None:
            pairs.append((made_NT, leaf_BT.grad[rows_N, :width].to(made_NT.dtype)))
    if output.log_z_G is not None and leaves.log_z_G is not None and leaves.log_z_G.grad is not None:
        slice_G = leaves.log_z_G.grad[groups].masked_fill(done_G[groups], 0.0)
        pairs.append((output.log_z_G, slice_G.to(output.log_z_G.dtype)))
    return pairs


def _log_ratio(output: PolicyOutput, batch: Batch) -> float:
    """Mean over rows of log pi - log pi_ref, for objectives that do not report it themselves."""
    return float((output.log_policy_BT.detach() - batch.log_reference_BT).sum() / batch.rows)
