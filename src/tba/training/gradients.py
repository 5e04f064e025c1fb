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

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tba.batch import Batch, distinct_rows, largest_group, micro_batches
from tba.protocols import Objective, Policy, PolicyOutput

See: TypeAlias = Callable[[PolicyOutput, Batch], None]  # is shown each row once, with what the policy gave for it


def _nobody(output: PolicyOutput, batch: Batch) -> None:
    """What is shown to nobody."""


def backward(
    policy: Policy,
    objective: Objective,
    batch: Batch,
    step: int,
    max_tokens: int,
    see: See = _nobody,
    ranks: int = 1,
) -> tuple[float, dict[str, float]]:
    """Add the gradient of the loss at optimizer step `step` (from 1) to the policy's parameters.

    `max_tokens` (as `micro_batches` counts them) bounds one pass, on each of the policy's `ranks`. Returns the loss and
    the objective's metrics, which by groups are averaged over micro-batches by their rows. Stops short of a backward
    pass when the loss is not finite: the gradient is then incomplete and has to be dropped. `see` is shown whole
    groups.
    """
    parts = list(micro_batches(batch, max_tokens, share_prompt=policy.share_prompt))
    if len(parts) <= ranks:
        return _whole(policy, objective, batch, step, see)
    passes = [torch.cat(parts[i : i + ranks]) for i in range(0, len(parts), ranks)]
    if objective.by_group and largest_group(batch, policy.share_prompt) <= max_tokens:
        return _by_groups(policy, objective, batch, step, passes, see)
    return _by_slices(policy, objective, batch, step, passes, see)


def _whole(policy: Policy, objective: Objective, batch: Batch, step: int, see: See) -> tuple[float, dict[str, float]]:
    output = _evaluate(policy, batch)
    see(output, batch)
    loss, metrics = objective(output, batch, step)
    value = loss.item()
    if math.isfinite(value):
        loss.backward()
    return value, {"log_ratio": _log_ratio(output, batch), **metrics}


def _by_groups(
    policy: Policy, objective: Objective, batch: Batch, step: int, parts: Sequence[Tensor], see: See
) -> tuple[float, dict[str, float]]:
    total, averages = 0.0, defaultdict[str, float](float)
    for rows_N in parts:
        part = batch.select(rows_N)
        share = part.rows / batch.rows
        output = _evaluate(policy, part)
        see(output, part)
        loss, metrics = objective(output, part, step)
        total += share * loss.item()
        for name, metric in {"log_ratio": _log_ratio(output, part), **metrics}.items():
            averages[name] += share * metric
        if not math.isfinite(total):
            break
        (share * loss).backward()
    return total, dict(averages)


def _by_slices(
    policy: Policy, objective: Objective, batch: Batch, step: int, parts: Sequence[Tensor], see: See
) -> tuple[float, dict[str, float]]:
    slices = [Slice.of(batch, rows_N) for rows_N in parts]
    leaves = _evaluate_without_gradient(policy, batch, slices)
    see(leaves, batch)
    loss, metrics = objective(leaves, batch, step)
    value = loss.item()
    metrics = {"log_ratio": _log_ratio(leaves, batch), **metrics}
    if not math.isfinite(value):
        return value, metrics
    loss.backward()
    done_G = torch.zeros(batch.groups, dtype=torch.bool, device=batch.group_B.device)
    for part in slices:
        pairs = part.derivatives(_evaluate(policy, part.batch), leaves, done_G)
        if pairs:
            outputs, derivatives = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, derivatives)
        done_G[part.group_index] = True
    return value, metrics


@dataclass(frozen=True)
class Slice:
    """One micro-batch and its place in the whole batch."""

    batch: Batch
    row_index: Tensor  # [N] into the B rows
    group_index: Tensor  # into the G groups

    @classmethod
    def of(cls, batch: Batch, rows_N: Tensor) -> Slice:
        rows_N = rows_N.to(batch.group_B.device)
        return cls(batch.select(rows_N), rows_N, torch.unique(batch.group_B[rows_N]))

    @property
    def place_BT(self) -> tuple[Tensor, slice]:
        """Where its rows lie in a tensor of shape [B, T]."""
        return self.row_index, slice(0, self.batch.completion_BT.shape[1])

    def derivatives(self, output: PolicyOutput, leaves: PolicyOutput, done_G: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(what the policy gave, the loss's derivative with respect to it), for each output that the loss uses.

        log Z belongs to a group, and a group may be split: its derivative goes with the first slice that has it.
        """
        pairs = []
        for made, leaf in ((output.log_policy_BT, leaves.log_policy_BT), (output.value_BT, leaves.value_BT)):
            if made is not None and leaf is not None and leaf.grad is not None:
                pairs.append((made, leaf.grad[self.place_BT]))
        if output.log_z_G is not None and leaves.log_z_G is not None and leaves.log_z_G.grad is not None:
            derivative = leaves.log_z_G.grad[self.group_index].masked_fill(done_G[self.group_index], 0.0)
            pairs.append((output.log_z_G, derivative))
        return pairs


def _evaluate(policy: Policy, batch: Batch) -> PolicyOutput:
    """`policy.evaluate(batch)`, in which each distinct answer of a group is run once."""
    rows_D, place_B = distinct_rows(batch)
    if len(rows_D) == batch.rows:
        return policy.evaluate(batch)
    output = policy.evaluate(batch.select(rows_D))
    value_BT = None if output.value_BT is None else output.value_BT.index_select(0, place_B)
    return PolicyOutput(output.log_policy_BT.index_select(0, place_B), value_BT, output.log_z_G)


def _evaluate_without_gradient(policy: Policy, batch: Batch, slices: Sequence[Slice]) -> PolicyOutput:
    """The output for the whole batch, put together from its slices, as leaves that take a gradient."""
    with torch.no_grad():
        outputs = [_evaluate(policy, part.batch) for part in slices]
    rows = [part.place_BT for part in slices]
    shape_BT = tuple(batch.completion_BT.shape)
    log_policy_BT = put_together([o.log_policy_BT for o in outputs], rows, shape_BT)
    assert log_policy_BT is not None
    return PolicyOutput(
        log_policy_BT,
        put_together([o.value_BT for o in outputs], rows, shape_BT),
        put_together([o.log_z_G for o in outputs], [part.group_index for part in slices], (batch.groups,)),
    )


def put_together(made: Sequence[Tensor | None], places: Sequence[Any], shape: tuple[int, ...]) -> Tensor | None:
    """A leaf of `shape` with every tensor in its place; None when there are none."""
    whole: Tensor | None = None
    for tensor, place in zip(made, places, strict=True):
        if tensor is None:
            return None
        whole = tensor.new_zeros(shape) if whole is None else whole
        whole[place] = tensor
    return None if whole is None else whole.requires_grad_()


def _log_ratio(output: PolicyOutput, batch: Batch) -> float:
    """Mean over rows of log pi - log pi_ref, for objectives that do not report it themselves."""
    return ((output.log_policy_BT.detach() - batch.log_reference_BT).sum() / batch.rows).item()
