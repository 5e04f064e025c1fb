"""Accuracy against staleness (the paper's Table 1): each objective on-policy and with weights every k updates.

In asynchronous runs half of the groups are drawn from all data, however old (m = 0.5); each is compared with the
on-policy run of the same objective. Each objective has its own rates, on-policy and stale (`RATES`, by `tuning`). Runs
have twice as many updates as in the other studies, because the final accuracy is compared, not the initial speed.
"""

from __future__ import annotations

from dataclasses import replace

from tba.schedules import WarmupStableDecay
from tba_lab.studies._base import RATES, TARGET, base, objectives, stale, synchronous, with_objective, with_rate
from tba_lab.study import Plot, Study, Variant

_longer = replace(
    base,
    steps=400,
    optimizer=replace(base.optimizer, schedule=WarmupStableDecay(20, 280, 100)),
    evaluation=replace(base.evaluation, every=100),
)
variants: dict[str, Variant] = {}
for _name in RATES:
    _recipe = with_objective(_longer, objectives()[_name])
    variants[f"{_name}-sync"] = Variant(synchronous(with_rate(_recipe, RATES[_name].on_policy)), _name)
    for _k in (1, 2, 4, 10, 16):
        variants[f"{_name}-k{_k}"] = Variant(stale(with_rate(_recipe, RATES[_name].stale), _k, m=0.5), _name)

study = Study(
    name="staleness",
    description="Each objective on-policy, and with k updates between syncs and half of the groups from old data.",
    recipe=_longer,
    variants=variants,
    target=TARGET,
    baseline="{family}-sync",
    plots=(
        Plot("sync_every", label="updates per sync (k); at 1 also on-policy"),
        Plot("lag", label="mean lag"),
    ),
)
