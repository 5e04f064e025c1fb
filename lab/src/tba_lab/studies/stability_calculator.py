"""What staleness costs on a task with a tool: the recipe `calculator`, on-policy and stale, at 2e-4.

As `stability`, with 300 updates. Of 2,000 held-out problems 1,000 are answered once every 20 updates, all of them twice
before and after.
"""

from __future__ import annotations

from dataclasses import replace

from tba.environments.calculator import COST
from tba.environments.task import EnvironmentTask
from tba.evaluation.accuracy import EvaluationSettings
from tba.recipes.calculator import recipe as calculator
from tba.record.recorder import RecordSettings
from tba.replay.pacing import Pacing
from tba.schedules import WarmupStableDecay
from tba_lab.studies._base import by_rate, by_staleness, objectives
from tba_lab.studies.stability import FORMS
from tba_lab.study import Study

assert isinstance(calculator.task, EnvironmentTask)
_base = replace(
    calculator,
    task=replace(calculator.task, held_out=2000),
    steps=300,
    optimizer=replace(calculator.optimizer, schedule=WarmupStableDecay(20, 200, 80)),
    evaluation=EvaluationSettings(
        every=20,
        problems=2000,
        problems_during=1000,
        threshold=1 - COST,
        greedy=False,
        samples=2,
        pass_k=0,
        batch_size=500,
    ),
    record=RecordSettings(tensorboard=False, samples_per_batch=0),
    replay=replace(calculator.replay, pacing=Pacing(warm_up=280)),
)
NAMES = ("tb", "tb-weighted", "tb-robust", "tb-asymmetric", "tba-prime", "grpo", "ppo", "reinforce", "raft")
_objectives = {name: objectives()[name] for name in NAMES} | {"tb-spread-1": FORMS["tb-spread-1"]}

study = Study(
    name="stability_calculator",
    description="A calculator to ask, on-policy and stale (k = 10, 64; half of the groups old): success and falls.",
    recipe=_base,
    variants=by_staleness(_base, _objectives) | by_rate(_base, _objectives, (6e-5, 6e-4)),
    seeds=(0, 1, 2, 3, 4),
    target=0.80,
    baseline="{family}-sync",
    margin=0.015,
    divergence_prompts=0,
)
