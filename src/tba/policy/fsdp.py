"""A model's parameters over several ranks, by torch's FSDP2: each rank holds some rows of every one of them.

Invariant: with gradients summed over ranks (not averaged), what each rank backpropagates is a part of one derivative,
and the sum is the gradient that one process would have. Every rank makes the same passes in the same order; one that
has no rows to evaluate evaluates some all the same and backpropagates zeros.

A layer's parameters are gathered for its forward and again for its backward. Computing in a lower precision casts what
is gathered: the rows that a rank holds, and the sums of gradients, keep their precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tba.policy.loading import WeightFiles, fill_weights
from tba.sharding import Sharding


class ShardedModel:
    """A model whose parameters are shards from now on. What runs it, runs inside `run`, on all ranks alike."""

    def __init__(self, model: PreTrainedModel, sharding: Sharding) -> None:
        self._wrapper = _Wrapper(model)
        compute = None if sharding.compute == torch.float32 else sharding.compute
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        for module in (*layers, self._wrapper):
            fully_shard(module, mesh=sharding.mesh, mp_policy=precision)
        for module in self._wrapper.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # which gloo can do

    def fill(self, files: WeightFiles, device: str) -> None:
        """Read this rank's rows from the files, for a model that has no memory yet."""
        fill_weights(self._wrapper.model, self._wrapper, files, device)

    def run(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Returns what `act` returns, while the parameters that it reaches are gathered."""
        return self._wrapper(act, *arguments)

    def reshard(self) -> None:
        """Free parameters that are still gathered: after a forward without a backward, those outside all layers."""
        for module in self._wrapper.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class _Wrapper(torch.nn.Module):
    """The model and whatever runs it as one module: FSDP acts where its forward begins and ends."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, act: Callable[..., Any], *arguments: Any) -> Any:
        return tree_map_only(Tensor, Tensor.clone, act(*arguments))  # FSDP warns about views
