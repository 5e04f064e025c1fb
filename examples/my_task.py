"""Your own task in ten minutes: problems, a reward as a plain function, a recipe.

    tba train examples/my_task.py

This one asks for twice a number, `345+345=`, and wants the digits least significant first: `096` for 690.
"""

from dataclasses import dataclass

import tba
from tba.recipes.quickstart import BASE

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

    def problems(self, split: str) -> list[tba.Problem]:
        numbers = [n for n in range(100, self.largest + 1) if (n % 10 == 7) == (split == "eval")]
        return [tba.Problem(f"{n}+{n}=", {"answer": str(2 * n)[::-1]}) for n in numbers]

    def reward(self) -> tba.WeightedFunctions:
        return tba.WeightedFunctions(((right, 0.5), (right_digits, 0.5)))  # 1 when the answer is right


# 3. What a run is made of. Any Hugging Face model will do; here the quickstart's, which can add, but carelessly.

recipe = tba.Recipe(
    name="my_task",
    description="twice a number, by a small policy that adds carelessly",
    task=Doubling(),
    model=tba.HuggingFace(
        path=str(BASE),
        generation=tba.EngineSettings(slots=140, max_completion_tokens=6),
        device="cpu",  # leave it out to use a GPU
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),  # how far the policy may move for its reward
    exploration=tba.Fixed(temperature=1.0),
    optimizer=tba.OptimizerSettings(lr=1e-4, schedule=tba.WarmupStableDecay(10, 100, 90)),
    replay=tba.ReplaySettings(pacing=tba.Pacing(warm_up=280), buffer=tba.BufferSettings(distinct=False)),
    evaluation=tba.EvaluationSettings(problems=0),
    steps=200,
    samples_per_prompt=20,
    prompts_per_round=7,
)
