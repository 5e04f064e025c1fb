"""Decides in which precision a model is held and computed with: one decision for searchers and trainer.

Invariant: the trainer computes, the reference scores and the engine samples in one precision, which is also that of the
published weights: at version 0 the three have the same weights to the bit, and every log-ratio to the reference is 0.
What is trained (weights or adapters), its gradients and its moments are float32 in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

PrecisionName = Literal["auto", "float32", "bfloat16", "4-bit"]


@dataclass(frozen=True)
class Precision:
    """Holds the types that follow from the device, the setting and whether there are adapters."""

    compute: torch.dtype  # of every forward and backward pass, of engine and reference, and of published weights
    weights: torch.dtype  # of what the trainer loads: the trained weights, or the frozen base of adapters
    tf32: bool  # whether products of float32 matrices, where any are left, may be rounded to TF32
    four_bit: bool = False  # whether the matrices of the frozen base are held in 4 bits (QLoRA, Dettmers et al. 2023)


def choose_precision(name: PrecisionName, device: str, adapters: bool, has_bfloat16: bool = True) -> Precision:
    """Returns the precision on that kind of device (`cpu`, `cuda`, `mps`). auto: bfloat16 on CUDA, else float32. 4-bit
    computes in bfloat16. has_bfloat16: a GPU computes in it; else auto and 4-bit compute in float32.
    """
    is_low = name == "bfloat16" or (device == "cuda" and name == "auto" and has_bfloat16)
    is_low |= name == "4-bit" and has_bfloat16
    compute = torch.bfloat16 if is_low else torch.float32
    return Precision(
        compute, weights=compute if adapters else torch.float32, tf32=device == "cuda", four_bit=name == "4-bit"
    )
