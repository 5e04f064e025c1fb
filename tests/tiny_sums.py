"""A recipe that is whole and small: one-digit sums, a warm start of a few steps from nothing, four updates."""

from tba.engines.transformers import EngineSettings
from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace
from tba.models.warm_start import WarmStart
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.record.recorder import RecordSettings
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.rollout.exploration import Fixed
from tba.schedules import Constant
from tba.tasks.arithmetic import Arithmetic
from tba.training.optimizer import OptimizerSettings
from tba.training.supervised import SupervisedSettings
from tba.training.tiny_models import ScratchModel

recipe = Recipe(
    name="tiny_sums",
    description="one-digit sums",
    task=Arithmetic(digits=1, train_problems=60, eval_problems=8),
    model=HuggingFace(
        device="cpu",
        generation=EngineSettings(slots=16, max_completion_tokens=3),
        warm_start=WarmStart(
            scratch=ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=24, max_positions=16),
            tokenizer="characters",
            sft=SupervisedSettings(steps=60, batch_size=32, lr=1e-2),
        ),
    ),
    objective=TrajectoryBalance(beta=Constant(0.05)),
    exploration=Fixed(),
    optimizer=OptimizerSettings(lr=1e-3),
    replay=ReplaySettings(pacing=Pacing(warm_up=16), buffer=BufferSettings(deduplicate=False)),
    evaluation=EvaluationSettings(problems=0, pass_k=2),
    record=RecordSettings(samples_every=1),
    steps=4,
    groups_per_step=2,
    group_size=4,
    samples_per_prompt=4,
    prompts_per_round=4,
    runtime="inline",
)
