"""The learning rate of each objective, on-policy and stale: three rates on one seed that no other study uses.

Every objective gets the same rates, 3e-5, 1e-4 and 3e-4, once, in the two settings that the other studies compare. The
best of each is in `RATES` of `_base.py`, from where the other studies take it.
"""

from __future__ import annotations

from dataclasses import replace

from tba_lab.studies._base import TARGET, base, objectives, stale, synchronous, with_objective, with_rate
from tba_lab.study import Plot, Study, Variant

LEARNING_RATES = (3e-5, 1e-4, 3e-4)

_short = replace(base, evaluation=replace(base.evaluation, every=50, problems=1000, problems_during=250))

variants: dict[str, Variant] = {}
for _name, _objective in objectives().items():
    for _lr in LEARNING_RATES:
        _recipe = with_rate(with_objective(_short, _objective), _lr)
        variants[f"{_name}-sync-{_lr:g}"] = Variant(synchronous(_recipe), f"{_name}-sync")
        variants[f"{_name}-k10-{_lr:g}"] = Variant(stale(_recipe, 10, m=0.5), f"{_name}-k10")

study = Study(
    name="tuning",
    description="Three learning rates for each objective, on-policy and at k = 10 with half of the groups old.",
    recipe=_short,
    variants=variants,
    seeds=(100,),
    target=TARGET,
    divergence_prompts=0,
    plots=(Plot("optimizer.lr", label="learning rate"),),
)
