"""Averaged weights against a rate that decays, on sums: where runs end, and how far they fall on the way.

The default form, stale at k = 10 and 64 (half of the groups old), 400 updates at the common rate and at three times it:
a constant rate after the warm-up; the same, its averages evaluated; a rate that decays over the last quarter; both.
"""

from __future__ import annotations

from dataclasses import replace

from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.schedules import Constant, RateShape, WarmupConstant, WarmupStableDecay
from tba_lab.studies._base import BETA, TARGET, stale
from tba_lab.studies.stability import study as stability
from tba_lab.study import Study, Variant

_base = replace(stability.recipe, objective=TrajectoryBalance(Constant(BETA)))
_shapes: dict[str, tuple[RateShape, bool]] = {
    "constant": (WarmupConstant(20), False),
    "averaged": (WarmupConstant(20), True),
    "decayed": (WarmupStableDecay(20, 280, 100), False),
    "both": (WarmupStableDecay(20, 280, 100), True),
}


def _with_optimizer(lr: float, schedule: RateShape, is_averaged: bool) -> Recipe:
    return replace(_base, optimizer=replace(_base.optimizer, lr=lr, schedule=schedule, weight_average=is_averaged))


study = Study(
    name="averaged",
    description="Averaged weights against a decayed rate, stale (k = 10, 64) at two rates: ends and falls.",
    recipe=_base,
    variants={
        f"{name}-k{k}-{lr:g}": Variant(stale(_with_optimizer(lr, *shape), k, m=0.5), f"{name}-{lr:g}")
        for name, shape in _shapes.items()
        for lr in (1e-4, 3e-4)
        for k in (10, 64)
    },
    seeds=(0, 1, 2, 3, 4),
    target=TARGET,
    baseline="decayed-k10-0.0001",
    margin=0.015,
    divergence_prompts=0,
)
