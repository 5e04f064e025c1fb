"""What staleness costs each objective on sums: where it ends, and how far it falls on the way.

On-policy, and stale at k = 10 and 64 with half of the groups from all data, however old; 400 updates at one common
rate (1e-4, three times the base's), at which nearly all objectives are best (`tuning`), and at three times it (k = 10).
Falls are of evaluations on 2,000 problems every 20 updates, ends of 10,000: a fall of 2 points is 2 standard errors of
a difference at 90 %.
"""

from __future__ import annotations

from dataclasses import replace

from tba.evaluation.accuracy import EvaluationSettings
from tba.protocols import Objective
from tba.schedules import Constant, WarmupStableDecay
from tba_lab.studies._base import (
    BETA,
    TARGET,
    base,
    by_rate,
    by_staleness,
    objectives,
    task,
)
from tba_lab.study import Plot, Study
from tba_lab.tb_forms import SpreadBalance, WeightedBalance

RATE = 1e-4
NAMES = (
    *(
        "tb",
        "tb-weighted",
        "tb-robust",
        "tb-asymmetric",
        "tb-learned-z",
        "tba-prime",
        "grpo",
        "dr-grpo",
        "ppo",
        "prox-rloo",
    ),
    *("online-dpo", "reinforce", "raft"),
)

FORMS: dict[str, Objective] = {  # that estimate log Z low: by standard deviations of the group's gaps
    "tb-weighted-low": WeightedBalance(
        Constant(BETA), "ratio", cap=8.0, normalised=True, spread=2.0, shift=Constant(2.0)
    ),
    "tb-weighted-floor": WeightedBalance(Constant(BETA), "ratio", cap=8.0, normalised=True, spread=2.0, lowest=1.0),
    "tb-weighted-std": WeightedBalance(Constant(BETA), "ratio", cap=8.0, normalised=True, spread=2.0, by_spread=0.1),
    **{
        f"tb-low-{a:g}": WeightedBalance(
            Constant(BETA), "ratio", cap=8.0, normalised=True, spread=2.0, shift=Constant(a), fading=True
        )
        for a in (1.0, 2.0)
    },
    **{f"tb-spread-{a:g}": SpreadBalance(Constant(BETA), spread=a) for a in (0.0, 0.5, 1.0)},
}

_objectives = {name: objectives()[name] for name in NAMES} | FORMS
_longer = replace(
    base,
    task=replace(task, eval_problems=10_000),
    steps=400,
    optimizer=replace(base.optimizer, lr=RATE, schedule=WarmupStableDecay(20, 280, 100)),
    evaluation=EvaluationSettings(
        every=20, problems=10_000, problems_during=2000, greedy=False, pass_k=0, batch_size=500
    ),
)
study = Study(
    name="stability",
    description="Each objective on-policy and stale (k = 10, 64; half of the groups old) at one rate: ends and falls.",
    recipe=_longer,
    variants=by_staleness(_longer, _objectives) | by_rate(_longer, _objectives, (3 * RATE,)),
    seeds=(0, 1, 2, 3, 4),
    target=TARGET,
    baseline="{family}-sync",
    margin=0.015,
    divergence_prompts=500,
    plots=(Plot("sync_every", label="updates per sync (k); at 1 also on-policy"),),
)
