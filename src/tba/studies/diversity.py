"""Different right answers and pass@k after RL on countdown, where a problem has dozens: Trajectory Balance beside GRPO.

At the optimum that all three objectives pull to, pi_ref exp(r / beta) / Z, the right answers to a problem keep the
shares that they had among themselves: RL need not cost diversity. Each is run on-policy and with weights every 10
updates and half of the groups old, at two strengths of that pull, and with the learning rate that was the better of two
in `diversity_tuning`.
"""

from __future__ import annotations

from dataclasses import replace

from tba.evaluate.accuracy import EvaluationSettings
from tba.recipe import Recipe
from tba.recipes.countdown import recipe as countdown
from tba.record.recorder import RecordSettings
from tba.studies._base import objectives, stale, synchronous, with_objective, with_rate
from tba.study import Against, Study, Variant

COMPARED = ("tb", "rloo", "grpo")
BETAS = (0.05, 0.2)  # in units of reward
SAMPLES = 64  # answers to each problem

base = replace(
    countdown,
    evaluation=EvaluationSettings(every=40, problems=1000, problems_during=250, greedy=False, chunk=250),
    record=RecordSettings(tensorboard=False, samples=0),
)


def setting(recipe: Recipe, name: str) -> Recipe:
    """`sync`: on-policy. `k10`: weights every 10 updates, half of the groups from old data."""
    return synchronous(recipe) if name == "sync" else stale(recipe, 10, m=0.5)


RATES = {("sync", name): 1e-4 for name in COMPARED} | {("k10", name): 1e-4 for name in COMPARED}

study = Study(
    name="diversity",
    description=f"Different right answers among {SAMPLES} and pass@k on countdown, at two betas, on-policy and stale.",
    recipe=base,
    variants={
        f"{name}-{beta:g}-{how}": Variant(
            setting(with_rate(with_objective(base, objectives(beta)[name]), RATES[how, name]), how), f"{name}-{beta:g}"
        )
        for name in COMPARED
        for beta in BETAS
        for how in ("sync", "k10")
    },
    diversity_samples=SAMPLES,
    columns=(
        *("pass@1/sampled", "pass@1/of64", "pass@4/of64", "pass@16/of64", "pass@64/of64"),
        *("distinct", "distinct_before", "differ", "differ_before", "kl", "reward", "fall"),
        *("seconds", "lag", "uses", "steps"),
    ),
    against=(Against("kl", y="distinct", label="KL to the reference, nats"),),
)
