"""Weights that are trained in float32 and computed with in a lower precision, in one process.

Invariant: the model's modules hold copies in that precision, which equal the rounded weights whenever `refresh` has
been called; a backward pass adds each copy's gradient to its weight's in float32 and leaves none with the copy. These
are the numbers that a single rank of FSDP2 gives (`policy.fsdp`), with a few launches for what it does parameter by
parameter, and without a process group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

_CASTS_PER_CALL = 16  # gradients that are cast by one call, and wait for each other


class LowPrecision:
    """The trained float32 weights of a model whose modules compute in `compute` from now on."""

    def __init__(self, model: torch.nn.Module, compute: torch.dtype) -> None:
        self._weight_of: dict[Parameter, Parameter] = {}  # by its copy
        copy_of: dict[Parameter, Parameter] = {}  # a tied weight has one
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is None or not weight.requires_grad or weight.dtype == compute:
                    continue
                if weight not in copy_of:
                    copy = copy_of[weight] = Parameter(weight.detach().to(compute))
                    self._weight_of[copy] = weight
                    copy.register_post_accumulate_grad_hook(self._queue_gradient)
                module._parameters[name] = copy_of[weight]
        parameters = model.named_parameters(remove_duplicate=False)
        self._weight_of_name = {name: self._weight_of[p] for name, p in parameters if p in self._weight_of}
        self._rounded_versions = self._versions()
        self._pending_copies: list[Parameter] = []  # copies whose gradients have not been cast yet

    def weight(self, parameter: Parameter) -> Parameter:
        """Returns what is trained: the float32 weight of a copy, or the parameter itself."""
        return self._weight_of.get(parameter, parameter)

    def replace_copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors of the model by name, with the weights in the place of their copies, detached."""
        weights = self._weight_of_name
        return {name: weights[name].detach() if name in weights else t for name, t in tensors.items()}

    def refresh(self) -> None:
        """Round the weights again if they have changed, which their versions tell (`Tensor._version`)."""
        versions = self._versions()
        if versions != self._rounded_versions:
            with torch.no_grad():
                torch._foreach_copy_(list(self._weight_of), list(self._weight_of.values()))
            self._rounded_versions = versions

    def _versions(self) -> list[int]:
        return [weight._version for weight in self._weight_of.values()]

    def _queue_gradient(self, copy: Parameter) -> None:
        """Queue a copy that has got its gradient in a backward pass, to be cast with others."""
        if not self._pending_copies:
            Variable._execution_engine.queue_callback(self._cast)
        self._pending_copies.append(copy)
        if len(self._pending_copies) == _CASTS_PER_CALL:
            self._cast()

    @torch.no_grad()
    def _cast(self) -> None:
        copies, self._pending_copies = self._pending_copies, []
        first_gradients: tuple[list[Tensor], list[Tensor]] = ([], [])
        for copy in copies:
            weight, gradient = self._weight_of[copy], copy.grad
            assert gradient is not None
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
                first_gradients[0].append(weight.grad)
                first_gradients[1].append(gradient)
            else:
                weight.grad += gradient
            copy.grad = None
        if first_gradients[0]:
            torch._foreach_copy_(*first_gradients)
