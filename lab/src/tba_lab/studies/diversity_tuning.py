"""The learning rates of the study `diversity`: two rates for each objective, on one seed that it does not use."""

from __future__ import annotations

from tba_lab.studies._base import BETA, with_objective, with_rate
from tba_lab.studies.diversity import COMPARED, base, objective, setting
from tba_lab.study import Plot, Study, Variant

LEARNING_RATES = (3e-5, 1e-4)

study = Study(
    name="diversity_tuning",
    description="Two learning rates for each objective of the study `diversity`, on-policy and stale, one seed.",
    recipe=base,
    variants={
        f"{name}-{how}-{lr:g}": Variant(
            setting(with_rate(with_objective(base, objective(name, BETA)), lr), how), f"{name}-{how}"
        )
        for how, names in COMPARED.items()
        for name in names
        for lr in LEARNING_RATES
    },
    seeds=(100,),
    divergence_prompts=0,
    plots=(Plot("optimizer.lr", label="learning rate"),),
)
