"""The enumerable toy as a recipe: what every runtime is held against."""

from tba.evaluation.accuracy import EvaluationSettings
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.record.recorder import RecordSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.rollout.exploration import Fixed
from tba.schedules import Constant, WarmupCosine
from tba.training.optimizer import OptimizerSettings
from toy.model import TabularModel
from toy.policy import TabularTask

task = TabularTask()
recipe = Recipe(
    name="toy",
    description="an enumerable toy",
    task=task,
    model=TabularModel(task),
    objective=TrajectoryBalance(beta=Constant(0.5), off_policy="exact"),
    exploration=Fixed(),
    optimizer=OptimizerSettings(lr=0.05, schedule=WarmupCosine(600)),
    replay=ReplaySettings(selection=RecencyReward(m=0.5, inverse_temperature=0.0), pacing=Pacing(warm_up=100)),
    evaluation=EvaluationSettings(every=0, problems=0),
    record=RecordSettings(tensorboard=False, samples_per_batch=0),
    steps=600,
    groups_per_step=2,
    group_size=16,
    samples_per_prompt=32,
    prompts_per_round=2,
    sync_every=5,
)
