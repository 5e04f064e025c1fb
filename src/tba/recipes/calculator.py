"""Learning to use a tool: products that the policy cannot work out, and a calculator that it may ask, on two cores.

The base, made on first use in a minute or two, has learnt from a player that mostly guesses, and asks the calculator at
four problems in ten. The reward is 1 for the right answer less 0.05 for each question (`environments/calculator.py`).
What the calculator says is read by the policy and never trained. `reward/turns` in the metrics is the mean number of
turns, 2 where the calculator was asked.
"""

from __future__ import annotations

from tba.engines.transformers import EngineSettings
from tba.environments.calculator import COST, Calculator, overconfident
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
    name="calculator",
    description="products with a calculator to ask, from a small base that mostly guesses, two CPU processes, minutes",
    task=EnvironmentTask(Calculator, "calculator", turns=3, worlds=40_000, held_out=500, player=overconfident),
    model=HuggingFace(
        device="cpu",
        generation=EngineSettings(slots=140, max_completion_tokens=32),
        warm_start=WarmStart(
            scratch=ScratchModel(max_positions=48),
            tokenizer="characters",
            sft=SupervisedSettings(steps=2000, batch_size=64, lr=2e-3),
        ),
    ),
    objective=TrajectoryBalance(beta=Constant(0.05)),
    optimizer=OptimizerSettings(lr=2e-4, schedule=WarmupStableDecay(20, 380, 100)),
    replay=ReplaySettings(
        selection=RecencyReward(m=0.95), pacing=Pacing(warm_up=280), buffer=BufferSettings(distinct=False)
    ),
    evaluation=EvaluationSettings(every=50, problems=500, problems_during=250, threshold=1 - COST),
    steps=500,
    groups_per_step=7,
    group_size=20,
    samples_per_prompt=20,
    prompts_per_round=7,
    sync_every=2,
)
