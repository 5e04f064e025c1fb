"""Guessing a number from 1 to 100 in few guesses: episodes of many turns, on two CPU cores.

The base, made on first use in eight minutes, has learnt from a player whose guess is the middle of the range at a
quarter of its turns and else its lowest number. That takes 12.9 guesses on average, halving each time 5.8. A guess
costs 0.05 of the reward (`environments/guess_number.py`). `reward/turns` in the metrics is the mean number of
guesses; in an evaluation a number is right that was found in at most 7.
"""

from __future__ import annotations

from tba.engines.transformers import EngineSettings
from tba.environments.guess_number import GUESSES, GuessNumber, timid
from tba.environments.task import EnvironmentTask
from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace
from tba.models.warm_start import WarmStart
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.schedules import Constant, WarmupStableDecay
from tba.training.optimizer import OptimizerSettings
from tba.training.supervised import SupervisedSettings
from tba.training.tiny_models import ScratchModel

recipe = Recipe(
    name="guess_number",
    description="a number from 1 to 100 in few guesses, from a small base that is timid, two CPU processes, minutes",
    task=EnvironmentTask(GuessNumber, "guess_number", turns=GUESSES, worlds=20_000, held_out=500, player=timid),
    model=HuggingFace(
        device="cpu",
        generation=EngineSettings(slots=140, max_completion_tokens=300),
        warm_start=WarmStart(
            scratch=ScratchModel(max_positions=320),
            tokenizer="characters",
            sft=SupervisedSettings(steps=2500, batch_size=32, lr=2e-3),
        ),
    ),
    objective=TrajectoryBalance(beta=Constant(0.003)),
    optimizer=OptimizerSettings(lr=2e-4, schedule=WarmupStableDecay(10, 120, 70)),
    replay=ReplaySettings(
        selection=RecencyReward(m=0.95),
        pacing=Pacing(warm_up=140, max_mean_uses=1.0),
        buffer=BufferSettings(distinct=False),
    ),
    evaluation=EvaluationSettings(
        every=50, problems=500, problems_during=250, threshold=1 - 6.5 / GUESSES, greedy=False, shown=500
    ),
    steps=200,
    groups_per_step=7,
    group_size=20,
    samples_per_prompt=20,
    prompts_per_round=7,
    sync_every=2,
)
