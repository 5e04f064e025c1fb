"""A recipe of a real pretrained model small enough for a test: stories of a girl, or of a boy."""

from __future__ import annotations

from pathlib import Path

from tba.engines.transformers import EngineSettings
from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.rewards.functions import FunctionReward
from tba.rollout.exploration import Fixed
from tba.schedules import Constant
from tba.tasks.jsonl import Jsonl
from tba.training.optimizer import OptimizerSettings

STORIES = Path(__file__).parents[1] / "fixtures" / "stories260K"


def tells_of_a_girl(prompt: str, completion: str) -> float:
    """Half for each of two words about her."""
    return min(2, sum(word in ("girl", "she", "her", "She", "Her") for word in completion.split())) / 2


recipe = Recipe(
    name="stories",
    description="stories260K tells more of girls",
    task=Jsonl(train=Path("openings.jsonl"), eval_fraction=0.3, marked_by=FunctionReward(tells_of_a_girl)),
    model=HuggingFace(
        path=str(STORIES / "stories260K.gguf"),
        device="cpu",
        generation=EngineSettings(slots=64, max_completion_tokens=24),
    ),
    objective=TrajectoryBalance(beta=Constant(0.05)),
    exploration=Fixed(temperature=1.0),
    optimizer=OptimizerSettings(lr=1e-3),
    replay=ReplaySettings(pacing=Pacing(warm_up=32)),
    evaluation=EvaluationSettings(problems=0, greedy=False, samples=8, threshold=1.0),
    steps=20,
    groups_per_step=4,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=4,
    sync_every=2,
)
