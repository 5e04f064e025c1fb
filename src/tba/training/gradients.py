"""The gradient of an objective over a batch, in as few passes as memory allows.

Invariant: it is the same gradient whichever way it was taken. Three ways:

- *whole*: one forward and one backward pass (over all ranks at the same time, where there are several);
- *by groups*: one of each per micro-batch of whole groups, weighted by their rows; exact for an objective that is a
  mean over rows of terms that need only their own group (`Objective.by_group`);
- *by slices*: for any objective, and for groups larger than a pass. The log-probabilities and heads of the whole batch
  are computed without gradient, the objective is differentiated with respect to these leaves, and each micro-batch
  backpropagates its slice of that derivative (the chain rule, cut in two). One forward pass more.

Rows of a group that are the same answer are evaluated once, and what they give is used for each: with short answers
most of a batch may be repeats.

The objective must not be random, and the policy has to give the same output for a row in whichever micro-batch it is.

Shape legend: B rows, T completion positions, G groups, N rows of one micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tba.batch import Batch, distinct_rows, largest_group, micro_batches, to_device
from tba.protocols import Measured, Objective, Policy, PolicyOutput

Observer: TypeAlias = Callable[[PolicyOutput, Batch], None]  # is called with each row's output once


def _ignore_output(output: PolicyOutput, batch: Batch) -> None:
    """Do nothing with an output: the default observer."""


def backward(
    policy: Policy,
    objective: Objective,
    batch: Batch,
    step: int,
    max_tokens: int,
    observe: Observer = _ignore_output,
    ranks: int = 1,
) -> tuple[Tensor, Measured]:
    """Add the gradient of the loss at optimizer step `step` (from 1) to the policy's parameters.

    `max_tokens` (as `micro_batches` counts them) bounds one pass, on each of the policy's `ranks`. Returns the loss and
    the objective's metrics, which by groups are averaged over micro-batches by their rows. They are left on the
    policy's device, which is not waited for: with a loss that is not finite the gradient has to be dropped. The batch
    is one on the host. `observe` is called with whole groups.
    """
    parts = list(micro_batches(batch, max_tokens, share_prompt=policy.share_prompt))
    if len(parts) <= ranks:
        return _backward_whole(policy, objective, batch, step, observe)
    passes = [torch.cat(parts[i : i + ranks]) for i in range(0, len(parts), ranks)]
    if objective.by_group and largest_group(batch, policy.share_prompt) <= max_tokens:
        return _backward_by_groups(policy, objective, batch, step, passes, observe)
    return _backward_by_slices(policy, objective, batch, step, passes, observe)


def _backward_whole(
    policy: Policy, objective: Objective, batch: Batch, step: int, observe: Observer
) -> tuple[Tensor, Measured]:
    output = _evaluate(policy, batch)
    observe(output, batch)
    loss, metrics = _compute_loss(objective, output, batch, step)
    loss.backward()
    return loss.detach(), metrics | _mean_entropy(_entropy_sums(output), batch)


def _backward_by_groups(
    policy: Policy, objective: Objective, batch: Batch, step: int, parts: Sequence[Tensor], observe: Observer
) -> tuple[Tensor, Measured]:
    total_loss, metric_means, entropy_sums = (
        torch.zeros((), dtype=torch.float32),
        defaultdict[str, float | Tensor](float),
        list[Tensor](),
    )
    for rows_N in parts:
        part = batch.select(rows_N)
        share = part.rows / batch.rows
        output = _evaluate(policy, part)
        observe(output, part)
        loss, metrics = _compute_loss(objective, output, part, step)
        (share * loss).backward()
        total_loss = total_loss.to(loss.device) + share * loss.detach()
        entropy_sums += _entropy_sums(output)
        for name, metric in metrics.items():
            metric_means[name] += share * metric
    return total_loss, dict(metric_means) | _mean_entropy(entropy_sums, batch)


def _backward_by_slices(
    policy: Policy, objective: Objective, batch: Batch, step: int, parts: Sequence[Tensor], observe: Observer
) -> tuple[Tensor, Measured]:
    slices = [Slice.of(batch, rows_N) for rows_N in parts]
    leaves = _evaluate_without_gradient(policy, batch, slices)
    observe(leaves, batch)
    loss, metrics = _compute_loss(objective, leaves, batch, step)
    loss.backward()
    done_G, entropy_sums = torch.zeros(batch.groups, dtype=torch.bool), list[Tensor]()
    for part in slices:
        output = _evaluate(policy, part.batch)
        pairs = part.derivatives(output, leaves, done_G)
        if pairs:
            outputs, derivatives = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, derivatives)
        entropy_sums += _entropy_sums(output)
        done_G[part.group_index] = True
    return loss.detach(), metrics | _mean_entropy(entropy_sums, batch)


def _entropy_sums(output: PolicyOutput) -> list[Tensor]:
    """Returns the sum of entropies over a pass's tokens, in a list that is empty if the policy gives none."""
    return [] if output.entropy_B is None else [output.entropy_B().sum()]


def _mean_entropy(sums: Sequence[Tensor], batch: Batch) -> Measured:
    """Returns the mean entropy over the batch's tokens, from the sums over its passes."""
    return {"entropy": torch.stack(list(sums)).sum() / int(batch.mask_BT.sum())} if sums else {}


def _compute_loss(objective: Objective, output: PolicyOutput, batch: Batch, step: int) -> tuple[Tensor, Measured]:
    """Returns the loss and its metrics, on the device of the policy's output. log_ratio, the mean over rows of
    log pi - log pi_ref, is among them for objectives that do not report it.
    """
    device_batch = batch.to(output.log_policy_BT.device)
    loss, metrics = objective(output, device_batch, step)
    log_ratio = (output.log_policy_BT.detach() - device_batch.log_reference_BT).sum() / batch.rows
    return loss, {"log_ratio": log_ratio, **metrics}


@dataclass(frozen=True)
class Slice:
    """One micro-batch and its place in the whole batch."""

    batch: Batch
    row_index: Tensor  # [N] into the B rows
    group_index: Tensor  # into the G groups

    @classmethod
    def of(cls, batch: Batch, rows_N: Tensor) -> Slice:
        return cls(batch.select(rows_N), rows_N, torch.unique(batch.group_B[rows_N]))

    def place_BT(self, device: torch.device) -> tuple[Tensor, slice]:
        """Returns where the slice's rows lie in a tensor of shape [B, T] on a device."""
        return to_device(self.row_index, device), slice(0, self.batch.completion_BT.shape[1])

    def log_z_derivatives(self, derivative_G: Tensor, done_G: Tensor) -> Tensor:
        """Returns the derivative with respect to log Z of the slice's groups; 0 for those marked in `done_G`."""
        device = derivative_G.device
        is_done = to_device(done_G[self.group_index], device)
        return derivative_G[to_device(self.group_index, device)].masked_fill(is_done, 0.0)

    def derivatives(self, output: PolicyOutput, leaves: PolicyOutput, done_G: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns (the policy's output, the loss's derivative with respect to it) for each output that the loss uses.

        log Z belongs to a group, and a group may be split: its derivative goes with the first slice that has it.
        """
        pairs = []
        for tensor, leaf in zip(_row_outputs(output), _row_outputs(leaves), strict=True):
            if tensor is not None and leaf is not None and leaf.grad is not None:
                pairs.append((tensor, leaf.grad[self.place_BT(leaf.device)]))
        if output.log_z_G is not None and leaves.log_z_G is not None and leaves.log_z_G.grad is not None:
            pairs.append((output.log_z_G, self.log_z_derivatives(leaves.log_z_G.grad, done_G)))
        return pairs


def _row_outputs(output: PolicyOutput) -> tuple[Tensor | None, ...]:
    """Returns the outputs that belong to rows: [B, T], and what follows."""
    return output.log_policy_BT, output.value_BT, output.log_top_BTC


def _evaluate(policy: Policy, batch: Batch) -> PolicyOutput:
    """Returns `policy.evaluate(batch)`, in which each distinct answer of a group is run once."""
    rows_D, place_B = distinct_rows(batch)
    if len(rows_D) == batch.rows:
        return policy.evaluate(batch)
    output = policy.evaluate(batch.select(rows_D))
    place_B = to_device(place_B, output.log_policy_BT.device)
    log_policy_BT, value_BT, log_top_BTC = (
        None if tensor is None else tensor.index_select(0, place_B) for tensor in _row_outputs(output)
    )
    assert log_policy_BT is not None
    entropy_D = output.entropy_B

    def entropy_B() -> Tensor:
        assert entropy_D is not None
        return entropy_D().index_select(0, place_B)

    return PolicyOutput(
        log_policy_BT, value_BT, output.log_z_G, None if entropy_D is None else entropy_B, log_top_BTC=log_top_BTC
    )


def _evaluate_without_gradient(policy: Policy, batch: Batch, slices: Sequence[Slice]) -> PolicyOutput:
    """Returns the output for the whole batch, assembled from its slices, as leaves that take a gradient."""
    with torch.no_grad():
        outputs = [_evaluate(policy, part.batch) for part in slices]
    device = outputs[0].log_policy_BT.device
    row_places = [part.place_BT(device) for part in slices]
    group_places = [to_device(part.group_index, device) for part in slices]
    shape_BT = tuple(batch.completion_BT.shape)
    log_policy_BT = assemble([o.log_policy_BT for o in outputs], row_places, shape_BT)
    assert log_policy_BT is not None
    return PolicyOutput(
        log_policy_BT,
        assemble([o.value_BT for o in outputs], row_places, shape_BT),
        assemble([o.log_z_G for o in outputs], group_places, (batch.groups,)),
        log_top_BTC=assemble([o.log_top_BTC for o in outputs], row_places, shape_BT),
    )


def assemble(parts: Sequence[Tensor | None], places: Sequence[Any], shape: tuple[int, ...]) -> Tensor | None:
    """Returns a leaf of `shape`, and what else parts have, with every part in its place; None when there are none."""
    whole: Tensor | None = None
    for tensor, place in zip(parts, places, strict=True):
        if tensor is None:
            return None
        if whole is None:
            whole = tensor.new_zeros(shape + tensor.shape[len(shape) :])
        whole[place] = tensor
    return None if whole is None else whole.requires_grad_()
