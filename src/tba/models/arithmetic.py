"""How much of what a processor can compute a run uses: the operations of its passes, against a product of matrices."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from transformers import AutoConfig

from tba.foreign import SAFE, UNREADABLE
from tba.models.huggingface import HuggingFace
from tba.models.memory import Shape

_TRIES = 5
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Arithmetic:
    """What one token costs a policy, in floating-point operations of a forward, and what its device does at best."""

    read: float  # of a token that the layers read
    scored: float  # of a token that goes through the head
    passes: int  # forwards that an update of a token costs
    rate: float  # operations a second

    @classmethod
    def of(cls, model: object, device: torch.device) -> Arithmetic | None:
        """Returns that of a prepared model, measured on `device` now.

        None for a model of unknown shape or with experts, of which a token meets some, and where it cannot be measured:
        a run goes on without.
        """
        if not isinstance(model, HuggingFace):
            return None
        try:
            config = AutoConfig.from_pretrained(model.path, **SAFE)
            if any(getattr(config, name, None) for name in _EXPERTS):
                return None
            shape, rate = Shape.of(config), product_rate(model.compute, device)
        except (*UNREADABLE, RuntimeError, StopIteration):
            return None
        return cls(shape.operations(1, 0), shape.operations(0, 1), passes(model), rate)

    def share(self, read: float, scored: float, seconds: float) -> float:
        """Returns the share of the best rate, 0 to 1, at which forwards over so many tokens took so long."""
        return (self.read * read + self.scored * scored) / seconds / self.rate if seconds > 0 else 0.0


def passes(model: HuggingFace) -> int:
    """Returns how many forwards a forward and its backward cost.

    Weights and inputs have a gradient each, which costs as much as the forward; a frozen base has one.
    """
    return 2 if model.lora.rank else 3


def shape_of(model: object) -> Shape | None:
    """Returns the shape of a prepared model; None where there is none, or its configuration cannot be read."""
    if not isinstance(model, HuggingFace):
        return None
    try:
        return Shape.of(AutoConfig.from_pretrained(model.path, **SAFE))
    except UNREADABLE:
        return None  # whoever loads it says why


def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the operations a second of a large product of matrices: what the device does at best."""
    side = 1024 if device.type == "cpu" else 8192
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    best = math.inf
    for _ in range(_TRIES):
        began = time.perf_counter()
        float((a @ b)[0, 0])  # waits for it
        best = min(best, time.perf_counter() - began)
    return 2 * side**3 / best
