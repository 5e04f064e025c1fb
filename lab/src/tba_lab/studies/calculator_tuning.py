"""The recipe `calculator` at other rates and shapes of its batch, on a seed that no other study uses.

In one process, as stale as the recipe's settings make it (k = 2, m = 0.95; one round an update), 500 updates as there.
"""

from __future__ import annotations

from dataclasses import replace

from tba.environments.calculator import COST
from tba.environments.task import EnvironmentTask
from tba.evaluation.accuracy import EvaluationSettings
from tba.recipe import Recipe
from tba.recipes.calculator import recipe as calculator
from tba.record.recorder import RecordSettings
from tba_lab.studies._base import stale, with_rate
from tba_lab.study import Study, Variant

assert isinstance(calculator.task, EnvironmentTask)
_base = replace(
    calculator,
    task=replace(calculator.task, held_out=2000),
    evaluation=EvaluationSettings(
        every=20, problems=2000, problems_during=500, threshold=1 - COST, greedy=False, pass_k=0, batch_size=500
    ),
    record=RecordSettings(tensorboard=False, samples_per_batch=0),
)


def _shaped(recipe: Recipe, prompts: int, answers: int) -> Recipe:
    return replace(
        recipe,
        groups_per_step=prompts,
        group_size=answers,
        prompts_per_round=prompts,
        samples_per_prompt=answers,
    )


study = Study(
    name="calculator_tuning",
    description="The recipe calculator at three rates and two shapes of the batch, one seed: which is best.",
    recipe=_base,
    variants={
        f"{prompts}x{answers}-{lr:g}": Variant(
            stale(with_rate(_shaped(_base, prompts, answers), lr), 2, m=0.95), f"{prompts}x{answers}"
        )
        for prompts, answers in ((7, 20), (17, 8))
        for lr in (2e-4, 4e-4, 8e-4)
    },
    seeds=(100,),
    target=0.80,
    divergence_prompts=0,
)
