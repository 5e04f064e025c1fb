"""Your own task in ten minutes: problems, a reward as a plain function, a recipe.

    tba train examples/my_task.py

This one asks for twice a number, `345+345=`, and wants the digits least significant first: `096` for 690.
"""

from dataclasses import dataclass
from pathlib import Path

from tba.engines.transformers import EngineSettings
from tba.evaluate.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.recipes import quickstart
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.rewards.functions import WeightedFunctions
from tba.schedules import Constant, WarmupStableDecay
from tba.search.exploration import Fixed
from tba.train.optimizer import OptimizerSettings
from tba.types import Problem, Split

# 1. How an answer is marked: plain functions of the two texts and the fields they name. Here `answer`, given below.


def right(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)


def right_digits(prompt: str, completion: str, answer: str) -> float:
    """The share of digits in their right place: something to climb while nothing is quite right yet."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / max(len(completion), len(answer))


# 2. Where problems come from. `eval` is held out: the two splits must never share a problem.


@dataclass(frozen=True)
class Doubling:
    largest: int = 999  # --task.largest on the command line
    name: str = "doubling"

    def problems(self, split: Split) -> list[Problem]:
        numbers = [n for n in range(100, self.largest + 1) if (n % 10 == 7) == (split == "eval")]
        return [Problem(f"{n}+{n}=", {"answer": str(2 * n)[::-1]}) for n in numbers]

    def reward(self) -> WeightedFunctions:
        return WeightedFunctions(((right, 0.5), (right_digits, 0.5)))  # 1 when the answer is right


# 3. What a run is made of. Any Hugging Face model will do; here the quickstart's, which can add, but carelessly.

recipe = Recipe(
    name="my_task",
    description="twice a number, by a small policy that adds carelessly",
    task=Doubling(),
    model=HuggingFace(
        path=str(Path(quickstart.__file__).parent / "quickstart_base"),
        generation=EngineSettings(slots=140, max_completion_tokens=6),
        device="cpu",  # leave it out to use a GPU
    ),
    objective=TrajectoryBalance(beta=Constant(0.05)),  # how far the policy may move for its reward
    exploration=Fixed(temperature=1.0),
    optimizer=OptimizerSettings(lr=1e-4, schedule=WarmupStableDecay(10, 100, 90)),
    replay=ReplaySettings(pacing=Pacing(warm_up=280), buffer=BufferSettings(distinct=False)),
    evaluation=EvaluationSettings(problems=0),
    steps=200,
    samples_per_prompt=20,
    prompts_per_round=7,
)
