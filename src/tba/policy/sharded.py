"""A model's parameters over several ranks, by torch's FSDP2: each rank holds some rows of every one of them.

Invariant: with gradients summed over ranks (not averaged), what each rank backpropagates is a part of one derivative,
and the sum is the gradient that one process would have. Every rank makes the same passes in the same order; one that
has no rows to evaluate evaluates some all the same and backpropagates zeros.

A layer's parameters are gathered for its forward and again for its backward. Computing in a lower precision casts what
is gathered: the rows that a rank holds, and the sums of gradients, keep their precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tba.batch import Batch
from tba.protocols import PolicyOutput
from tba.sharding import Sharding


class ShardedEvaluation:
    """`evaluate` of a policy over `model`, whose parameters are shards from now on."""

    def __init__(self, model: PreTrainedModel, evaluate: Callable[[Batch], PolicyOutput], sharding: Sharding) -> None:
        self._whole = _Whole(model, evaluate)
        compute = None if sharding.compute == torch.float32 else sharding.compute
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        for module in (*layers, self._whole):
            fully_shard(module, mesh=sharding.mesh, mp_policy=precision)
        for module in self._whole.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # which gloo can do

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Runs the policy's own `evaluate`, while its parameters are gathered."""
        log_policy_BT, value_BT, log_z_G = self._whole(batch)
        return PolicyOutput(log_policy_BT, value_BT, log_z_G)

    def let_go(self) -> None:
        """Free what is still gathered: after a forward without a backward, the parameters outside all layers."""
        for module in self._whole.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class _Whole(torch.nn.Module):
    """The model and the policy's evaluation as one module: FSDP acts where its forward begins and ends."""

    def __init__(self, model: PreTrainedModel, evaluate: Callable[[Batch], PolicyOutput]) -> None:
        super().__init__()
        self.model = model
        self._evaluate = evaluate

    def forward(self, batch: Batch) -> tuple[Tensor | None, ...]:
        output = self._evaluate(batch)
        given = (output.log_policy_BT, output.value_BT, output.log_z_G)
        return tuple(None if tensor is None else tensor.clone() for tensor in given)  # FSDP warns about views
