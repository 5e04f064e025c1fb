"""What staleness costs on a task with many right answers: countdown, on-policy and stale, at its recipe's rate.

As `stability`, with 240 updates; how many different right answers are left is watched too. There are fewer problems
than the sums have, so each of 1,000 is answered eight times at the end, and each of 500 on the way.
"""

from __future__ import annotations

from dataclasses import replace

from tba.evaluation.accuracy import EvaluationSettings
from tba.record.recorder import RecordSettings
from tba.replay.pacing import Pacing
from tba.schedules import WarmupStableDecay
from tba_lab.countdown import recipe as countdown
from tba_lab.studies._base import by_rate, by_staleness, objectives
from tba_lab.studies.stability import FORMS
from tba_lab.study import Study

_base = replace(
    countdown,
    steps=240,
    optimizer=replace(countdown.optimizer, schedule=WarmupStableDecay(10, 170, 60)),
    evaluation=EvaluationSettings(
        every=20, problems=1000, problems_during=500, greedy=False, samples=8, pass_k=0, batch_size=500
    ),
    record=RecordSettings(tensorboard=False, samples_per_batch=0),
    replay=replace(countdown.replay, pacing=Pacing(warm_up=280)),
)
NAMES = ("tb", "tb-weighted", "tb-robust", "tb-asymmetric", "tba-prime", "grpo", "ppo", "reinforce", "raft")
_objectives = {name: objectives()[name] for name in NAMES}

study = Study(
    name="stability_countdown",
    description="Countdown, on-policy and stale (k = 10, 64; half of the groups old): success, falls, right answers.",
    recipe=_base,
    variants=by_staleness(_base, _objectives | FORMS) | by_rate(_base, _objectives, (3e-5, 3e-4)),
    seeds=(0, 1, 2, 3, 4),
    target=0.80,
    baseline="{family}-sync",
    margin=0.015,
    divergence_prompts=0,
    diversity_samples=32,
)
