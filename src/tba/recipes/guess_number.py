"""Guessing a number from 1 to 100 in several turns: from a careless player to nearly halving, on two cores.

The environment says which range is left after each guess (`tba.environments.guess_number`). The base, made on first
use, has learnt from a player that forgets the range at half of its guesses: it needs 10.9 guesses on average, where
halving needs 5.8. Only the guesses are trained; what the environment says is masked.

`turns` in the metrics and the report is the mean number of guesses. The accuracy is the share of numbers that are found
within seven guesses, as halving always does.
"""

from __future__ import annotations

from tba.engines.transformers import EngineSettings
from tba.environments.guess_number import GUESSES, Careless, GuessNumber
from tba.environments.task import EnvironmentTask
from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace, WarmStart
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.schedules import Constant, WarmupStableDecay
from tba.search.exploration import Fixed
from tba.training.optimizer import OptimizerSettings
from tba.training.supervised import SupervisedSettings
from tba.training.tiny_models import ScratchModel

recipe = Recipe(
    name="guess_number",
    description="guessing a number in several turns, from a careless player's base, two CPU processes, minutes",
    task=EnvironmentTask(GuessNumber, "guess_number", turns=GUESSES, worlds=4000, held_out=500, player=Careless()),
    model=HuggingFace(
        device="cpu",
        generation=EngineSettings(slots=128, max_completion_tokens=220),
        warm_start=WarmStart(
            scratch=ScratchModel(hidden_size=64, layers=2, heads=4, ff_size=192, max_positions=240),
            tokenizer="characters",
            sft=SupervisedSettings(steps=400, batch_size=64, lr=3e-3),
        ),
    ),
    objective=TrajectoryBalance(beta=Constant(0.008)),
    exploration=Fixed(temperature=1.0),
    optimizer=OptimizerSettings(lr=1e-3, schedule=WarmupStableDecay(10, 120, 70)),
    replay=ReplaySettings(
        selection=RecencyReward(m=0.95), pacing=Pacing(warm_up=300), buffer=BufferSettings(distinct=False)
    ),
    evaluation=EvaluationSettings(every=50, problems=500, problems_during=200, threshold=0.7),
    steps=200,
    groups_per_step=8,
    group_size=16,
    samples_per_prompt=16,
    prompts_per_round=8,
    sync_every=2,
)
