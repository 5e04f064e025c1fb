"""The learning rates of the study `red_team`: three for each variant, on one seed that it does not use."""

from __future__ import annotations

from tba.evaluation.estimators import SAMPLED
from tba_lab.studies._base import with_rate
from tba_lab.studies.red_team import RATES, base, synchronous
from tba_lab.study import Plot, Study, Variant

LEARNING_RATES = (3e-4, 1e-3, 3e-3)
STEPS = 200  # of those that wait

study = Study(
    name="red_team_tuning",
    description="Three learning rates for each variant of the study `red_team`, one seed.",
    recipe=base,
    variants={
        **{f"{name}-{lr:g}": Variant(synchronous(name, lr, STEPS), name) for name in RATES for lr in LEARNING_RATES},
        **{f"async-{lr:g}": Variant(with_rate(base, lr), "async") for lr in LEARNING_RATES},
    },
    metric=SAMPLED,
    target=0.6,
    seeds=(100,),
    divergence_prompts=0,
    plots=(Plot("optimizer.lr", label="learning rate"),),
)
