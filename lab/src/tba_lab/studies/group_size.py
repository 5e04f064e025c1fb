"""How many answers to a prompt are best, at equally many in an update: sums, countdown and SmolLM2 (`instruct`).

The default form, each group size K at five rates, on-policy (`sync`) and on the toys also at k = 10 with half of the
groups old. A round has the answers of one update, each used once, so that only the number of prompts differs: 160
answers are 80 prompts at K = 2 and 8 at K = 20. Rates are to be chosen on a seed that is not counted:
`lab/benchmarks/group_size.py` makes the runs in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tba.evaluation.accuracy import EvaluationSettings
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe, RuntimeSettings
from tba.recipes.instruct import recipe as instruct
from tba.record.recorder import RecordSettings
from tba.schedules import Constant, WarmupStableDecay
from tba.tasks.instruct import Instruct
from tba_lab.studies._base import BETA, with_rate
from tba_lab.studies._base import stale as aged
from tba_lab.studies._base import synchronous as on_policy
from tba_lab.studies.stability import study as stability
from tba_lab.studies.stability_countdown import study as stability_countdown
from tba_lab.study import Plot, Study, Variant

STALE = 10  # updates between two versions of the weights


@dataclass(frozen=True)
class Comparison:
    """Group sizes of one recipe at equally many answers in an update."""

    recipe: Recipe
    answers: int  # of an update, and of a round
    sizes: tuple[int, ...]
    rates: tuple[float, ...]  # the middle three are tried first
    ages: tuple[str, ...]

    def variant(self, size: int, age: str, rate: float) -> Recipe:
        prompts = self.answers // size
        sized_recipe = replace(
            with_rate(self.recipe, rate),
            group_size=size,
            samples_per_prompt=size,
            groups_per_step=prompts,
            prompts_per_round=prompts,
        )
        return on_policy(sized_recipe) if age == "sync" else aged(sized_recipe, STALE, m=0.5)


def _toy(recipe: Recipe) -> Recipe:
    """Returns the recipe with the default form, evaluated less often than the studies of stability do it."""
    evaluation = replace(recipe.evaluation, every=40)
    return replace(recipe, objective=TrajectoryBalance(Constant(BETA)), evaluation=evaluation)


_AGES = ("sync", f"k{STALE}")
COMPARISONS: Mapping[str, Comparison] = {
    "sums": Comparison(_toy(stability.recipe), 160, (2, 4, 8, 16, 20), (2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4), _AGES),
    "countdown": Comparison(
        _toy(stability_countdown.recipe), 160, (2, 4, 8, 16, 20), (5e-5, 1e-4, 2e-4, 4e-4, 8e-4), _AGES
    ),
    "instruct": Comparison(
        replace(
            instruct,
            task=Instruct(eval_problems=500),
            steps=90,
            optimizer=replace(instruct.optimizer, schedule=WarmupStableDecay(5, 60, 25, final=0.1)),
            evaluation=EvaluationSettings(problems=500, greedy=False, batch_size=500, logged_problems=0),
            run=RuntimeSettings(checkpoint_every=0),
            record=RecordSettings(tensorboard=False, samples_per_batch=0),
        ),
        64,
        (2, 4, 8, 16),
        (2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3),
        ("sync",),
    ),
}


def name_of(task: str, size: int, age: str, rate: float) -> str:
    return f"{task}-K{size}-{age}-{rate:g}"


study = Study(
    name="group_size",
    description="Group sizes at equally many answers in an update, at five rates: sums, countdown and SmolLM2.",
    recipe=COMPARISONS["sums"].recipe,
    variants={
        name_of(task, size, age, rate): Variant(comparison.variant(size, age, rate), f"{task}-{age}-{rate:g}")
        for task, comparison in COMPARISONS.items()
        for age in comparison.ages
        for size in comparison.sizes
        for rate in comparison.rates
    },
    divergence_prompts=0,
    plots=(Plot("group_size", label="answers to a prompt (K)"),),
)
