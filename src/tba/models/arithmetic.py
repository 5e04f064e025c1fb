"""Counts how much of what a processor can compute a run uses: the operations of its passes, against a product of
matrices.
"""

from __future__ import annotations

import math
import sys
import time
from functools import cache
from typing import Any

import torch

from tba.engines.rules import positions
from tba.models import memory
from tba.models.memory import Shape
from tba.policy.loading import plain_config
from tba.pretrained import UNREADABLE
from tba.protocols import ComputeCost, path_of

_TRIES = 5
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def arithmetic_of(path: str, rank: int, dtype: torch.dtype, device: torch.device) -> ComputeCost | None:
    """Returns what a token costs the model in a folder, with adapters of this rank, and the measured speed of `device`.

    Returns None for a model of unknown shape, for one with experts, of which a token meets only some, and where the
    speed cannot be measured: a run goes on without these figures.
    """
    try:
        config = plain_config(path)
        if any(getattr(config, name, None) for name in _EXPERTS):
            return None
        shape, rate = Shape.of(config), product_rate(dtype, device)
    except (*UNREADABLE, RuntimeError, StopIteration):
        return None
    return ComputeCost(shape.operations(1, 0), shape.operations(0, 1), forwards_per_update(rank), rate)


def forwards_per_update(rank: int) -> int:
    """Returns how many forwards a forward and its backward cost. rank: of adapters, 0 where all weights are trained.

    Weights and inputs have a gradient each, which costs as much as the forward; a frozen base has one.
    """
    return 2 if rank else 3


def shape_of(model: object) -> Shape | None:
    """Returns the shape of a prepared model; None where there is none, or its configuration cannot be read."""
    return _shape_at(path_of(model))


@cache
def _shape_at(path: str) -> Shape | None:
    try:
        return Shape.of(plain_config(path))
    except (*UNREADABLE, StopIteration):
        return None  # whoever loads it says why


@cache
def judge_bytes(path: str, kind: Any, tokens: int, itemsize: int = 4) -> int:
    """Returns `memory.scoring_model_bytes` of the model at a path, without loading it; 0 where its configuration cannot
    be read.
    """
    try:
        return memory.scoring_model_bytes(plain_config(path), kind, tokens, itemsize)
    except (*UNREADABLE, StopIteration):
        return 0  # whoever loads it says why


@cache
def positions_of(path: str) -> int | None:
    """Returns the tokens of prompt and answer together that the model in a folder has positions for; None: any number,
    or its configuration cannot be read.
    """
    try:
        position_count = positions(plain_config(path).get_text_config(), sys.maxsize)
    except (*UNREADABLE, StopIteration):
        return None
    return None if position_count == sys.maxsize else position_count


def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the operations a second of a large product of matrices: what the device does at best."""
    side = 1024 if device.type == "cpu" else 8192
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    best_seconds = math.inf
    for _ in range(_TRIES):
        start = time.perf_counter()
        float((a @ b)[0, 0])  # waits for it
        best_seconds = min(best_seconds, time.perf_counter() - start)
    return 2 * side**3 / best_seconds
