"""Trajectory Balance with one setting changed at a time (the paper's Figure 7, except for the sizes).

The settings are K at a constant batch of 140, S at a constant round, m, k, beta from 0.4 to 0.001, the batch, and a
constant learning rate instead of warm-up, plateau and decay. `base` is the point that all of them share.
"""

from __future__ import annotations

from dataclasses import replace

from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.schedules import Constant, WarmupConstant
from tba_lab.studies._base import TARGET, base, stale, with_objective
from tba_lab.study import Plot, Study, Variant

ROWS = 140  # in a batch, and sampled in a round
M = 0.95
_base = stale(base, 2, M)


def _with_samples(n: int) -> Recipe:
    """Returns the fields for S = n, at least K: fewer would leave groups ragged, since a prompt hardly comes twice."""
    return replace(_base, samples_per_prompt=n, prompts_per_round=ROWS // n)


def _families() -> dict[str, dict[str, Recipe]]:
    """Returns family -> variant -> recipe."""
    return {
        "K": {
            f"K{n}": replace(_with_samples(max(n, 20)), group_size=n, groups_per_step=ROWS // n) for n in (4, 10, 28)
        },
        "S": {f"S{n}": _with_samples(n) for n in (28, 35, 70)},
        "m": {f"m{m:g}": stale(base, 2, m) for m in (0.0, 0.25, 0.5, 0.8, 1.0)},
        "k": {f"k{k}": stale(base, k, M) for k in (1, 4, 10, 16)},
        "beta": {
            f"beta{b:g}": with_objective(_base, TrajectoryBalance(Constant(b), off_policy="none"))
            for b in (0.4, 0.2, 0.1, 0.02, 0.01, 0.004, 0.002, 0.001)
        },
        "batch": {f"B{n}": replace(_base, groups_per_step=n) for n in (2, 4, 14)},
        "rate": {"constant": replace(_base, optimizer=replace(_base.optimizer, schedule=WarmupConstant(20)))},
    }


variants = {"base": Variant(_base, "base")}
variants |= {name: Variant(r, family) for family, found in _families().items() for name, r in found.items()}


def _with_base(x: str, family: str, label: str) -> Plot:
    return Plot(x, label=label, families=("base", family), single_line=True)


study = Study(
    name="ablations",
    description="Trajectory Balance on the quickstart's sums, one setting changed at a time.",
    recipe=_base,
    variants=variants,
    target=TARGET,
    baseline="base",
    plots=(
        _with_base("group_size", "K", "answers in a group (K), batch constant"),
        _with_base("samples_per_prompt", "S", "samples of a prompt (S), round constant"),
        _with_base("replay.selection.m", "m", "share of recent groups (m)"),
        _with_base("sync_every", "k", "updates per sync (k)"),
        _with_base("objective.beta.value", "beta", "beta"),
        _with_base("groups_per_step", "batch", "prompts in a batch (B)"),
    ),
)
