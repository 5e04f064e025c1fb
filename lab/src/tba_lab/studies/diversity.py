"""Different right answers and pass@k after RL on countdown, where a problem has dozens: Trajectory Balance and GRPO.

At the optimum of Trajectory Balance and RLOO, pi_ref exp(r / beta) / Z, the right answers to a problem keep their
shares relative to each other: RL need not cost diversity. (GRPO divides by the standard deviation of the rewards, so
that its beta has another unit for each problem.) Runs are on-policy, or with weights every 10 updates and half of the
groups old; at two betas; with the better of two learning rates in `diversity_tuning`.

RLOO penalises the behaviour policy, together with the reward: with the current policy penalised its update is
Trajectory Balance's, on any data. On-policy the two agree, and so does the corrected Trajectory Balance, so these run
only on stale data.
"""

from __future__ import annotations

from dataclasses import replace

from tba.evaluation.accuracy import EvaluationSettings
from tba.objectives.policy_gradient import Reinforce
from tba.protocols import Objective
from tba.recipe import Recipe
from tba.record.recorder import RecordSettings
from tba.schedules import Constant
from tba_lab.countdown import recipe as countdown
from tba_lab.studies._base import objectives, stale, synchronous, with_objective, with_rate
from tba_lab.study import Plot, Study, Variant

COMPARED = {"sync": ("tb", "grpo"), "k10": ("tb", "tb-corrected", "rloo", "grpo")}
BETAS = (0.05, 0.2)  # in units of reward
SAMPLES = 64  # answers to each problem

base = replace(
    countdown,
    evaluation=EvaluationSettings(every=40, problems=1000, problems_during=250, greedy=False, batch_size=250),
    record=RecordSettings(tensorboard=False, samples_per_batch=0),
)


def setting(recipe: Recipe, name: str) -> Recipe:
    """`sync`: on-policy. `k10`: weights every 10 updates, half of the groups from old data."""
    return synchronous(recipe) if name == "sync" else stale(recipe, 10, m=0.5)


def objective(name: str, beta: float) -> Objective:
    """Returns an objective of the other studies, except for RLOO's penalty."""
    return Reinforce(Constant(beta), penalised="behavior") if name == "rloo" else objectives(beta)[name]


RATES = {(how, name): 1e-4 for how, names in COMPARED.items() for name in names} | {("k10", "rloo"): 3e-5}

study = Study(
    name="diversity",
    description="Different right answers among 64 and pass@k on countdown, at two betas, on-policy and stale.",
    recipe=base,
    variants={
        f"{name}-{beta:g}-{how}": Variant(
            setting(with_rate(with_objective(base, objective(name, beta)), RATES[how, name]), how), f"{name}-{beta:g}"
        )
        for beta in BETAS
        for how, names in COMPARED.items()
        for name in names
    },
    diversity_samples=SAMPLES,
    columns=(
        *("pass@1/sampled", "pass@1/of64", "pass@4/of64", "pass@16/of64", "pass@64/of64"),
        *("distinct", "distinct_before", "differ", "differ_before", "kl", "reward", "fall"),
        *("seconds", "lag", "uses", "steps"),
    ),
    plots=(Plot("kl", y="distinct", label="KL to the reference, nats"),),
)
