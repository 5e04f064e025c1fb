"""A task with many right answers: five digits, a target, and any sums and differences that reach it.

The base (0.45 M parameters, made on the first run and cached) was trained on answers drawn evenly from all right ones,
and then on demonstrations of which one in seven is wrong. RL can then make it right more often in many ways or in few:
`tba-lab study diversity` measures which.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from tba.engines.transformers import EngineSettings
from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace, Lesson, WarmStart
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.schedules import Constant, WarmupStableDecay
from tba.search.exploration import Fixed
from tba.tasks.countdown import Countdown
from tba.training.optimizer import OptimizerSettings
from tba.training.supervised import SupervisedSettings
from tba.training.tiny_models import ScratchModel

_taught = SupervisedSettings(steps=300, batch_size=64, lr=2e-3, schedule="constant", pool=1)
_SCHEDULES: tuple[Literal["constant", "cosine"], ...] = ("constant", "constant", "constant", "cosine")
_right = tuple(
    Lesson(replace(_taught, schedule=schedule), {"wrong_operations": 0.0, "seed": seed})
    for seed, schedule in enumerate(_SCHEDULES, start=1)  # other demonstrations in each
)

recipe = Recipe(
    name="countdown",
    description="countdown with dozens of right answers to each problem, a small base, two CPU processes, minutes",
    task=Countdown(wrong_operations=0.15),
    model=HuggingFace(
        device="cpu",
        generation=EngineSettings(slots=160, max_completion_tokens=12),
        warm_start=WarmStart(
            scratch=ScratchModel(
                hidden_size=96, layers=3, heads=4, ff_size=384, max_positions=32, tie_embeddings=False
            ),
            tokenizer="characters",
            before=_right,
            sft=replace(_taught, steps=100, lr=5e-4, schedule="cosine"),
        ),
    ),
    objective=TrajectoryBalance(beta=Constant(0.05)),
    exploration=Fixed(temperature=1.0),
    optimizer=OptimizerSettings(lr=1e-4, schedule=WarmupStableDecay(10, 70, 40)),
    replay=ReplaySettings(
        selection=RecencyReward(m=0.95),
        pacing=Pacing(warm_up=280),
        buffer=BufferSettings(distinct=False),  # how often an answer comes up is what diversity is
    ),
    evaluation=EvaluationSettings(every=40, problems=1000, problems_during=250, greedy=False, chunk=250),
    steps=120,
    groups_per_step=7,
    group_size=20,
    samples_per_prompt=20,
    prompts_per_round=7,
    sync_every=2,
)
