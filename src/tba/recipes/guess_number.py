"""Guessing a number from 1 to 100 in several turns: from a careless player to nearly halving, on two cores.

The environment says which range is left after each guess (`environments/guess_number.py`). The base, made on first use
in a few minutes, was taught by a player that guesses in the middle half of the range, and then by one that forgets the
range at two of three guesses. Halving needs 5.8 guesses on average, guessing anywhere in the range 7.5. Only guesses
are trained; what the environment says is masked.

`reward/turns` in the metrics and the report is the mean number of guesses. The accuracy is the share of numbers
that are found within seven guesses, as halving always does.
"""

from __future__ import annotations

from tba.engines.transformers import EngineSettings
from tba.environments.guess_number import GUESSES, Careless, GuessNumber
from tba.environments.task import EnvironmentTask
from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace, Lesson, WarmStart
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
    description="guessing a number in several turns, from a careless player's base, two CPU processes, minutes",
    task=EnvironmentTask(GuessNumber, "guess_number", turns=GUESSES, worlds=10_000, held_out=500, player=Careless()),
    model=HuggingFace(
        device="cpu",
        generation=EngineSettings(slots=140, max_completion_tokens=250),
        warm_start=WarmStart(
            scratch=ScratchModel(max_positions=280),
            tokenizer="characters",
            before=(Lesson(SupervisedSettings(steps=800, batch_size=64, lr=2e-3), {"player": Careless(anywhere=0.0)}),),
            sft=SupervisedSettings(steps=250, batch_size=64, lr=1e-3),
        ),
    ),
    objective=TrajectoryBalance(beta=Constant(0.01)),
    optimizer=OptimizerSettings(lr=3e-4, schedule=WarmupStableDecay(20, 280, 100)),
    replay=ReplaySettings(
        selection=RecencyReward(m=0.95), pacing=Pacing(warm_up=280), buffer=BufferSettings(distinct=False)
    ),
    evaluation=EvaluationSettings(every=50, problems=500, problems_during=200, threshold=0.7),
    steps=400,
    groups_per_step=7,
    group_size=20,
    samples_per_prompt=20,
    prompts_per_round=7,
    sync_every=2,
)
