"""Your own file of problems, a model of the Hub, and a reward that is a plain function.

    tba train examples/my_file.py --task.train problems.jsonl

A line is one problem, as text or chat messages; its other fields reach the reward:

    {"messages": [{"role": "user", "content": "Name a fruit that begins with a."}], "letter": "a"}
"""

from pathlib import Path

from tba.engines.transformers import EngineSettings
from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.rewards.functions import FunctionReward
from tba.schedules import Constant, WarmupConstant
from tba.search.exploration import Fixed
from tba.tasks.jsonl import Jsonl
from tba.training.optimizer import OptimizerSettings


def begins_with_its_letter(prompt: str, completion: str, letter: str) -> float:
    """How an answer is marked. Leave `marked_by` out to mark exact answers by the field `answer`."""
    return float(completion.strip().lower().startswith(letter))


recipe = Recipe(
    name="my_file",
    description="problems of a file, marked by a function",
    task=Jsonl(train=Path("problems.jsonl"), marked_by=FunctionReward(begins_with_its_letter)),
    model=HuggingFace(
        path="Qwen/Qwen2.5-0.5B-Instruct",  # --model.path: another name of the Hub, or a folder
        generation=EngineSettings(slots=64, max_completion_tokens=64),
    ),
    objective=TrajectoryBalance(beta=Constant(0.05)),
    exploration=Fixed(temperature=1.0),
    optimizer=OptimizerSettings(lr=1e-6, schedule=WarmupConstant(10)),
    replay=ReplaySettings(pacing=Pacing(warm_up=64)),
    evaluation=EvaluationSettings(problems=200),
    steps=200,
    groups_per_step=4,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=4,
)
