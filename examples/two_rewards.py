"""Two rewards: a weighted sum, whose parts are seen one by one.

    tba train examples/two_rewards.py

ends, in a run of ours (docs/your_task.md says on what machine), with

    metric                       before                  after  points  problems
    pass@1/greedy   22.2 % [14.9, 31.8]  100.0 % [95.9, 100.0]   +77.8        90
    pass@1/sampled  24.4 % [16.7, 34.2]    85.6 % [76.8, 91.4]   +61.1        90
"""

from dataclasses import dataclass

import tba
from tba.recipes.quickstart import BASE

# Twice a number, `345+345=`, is wanted with the digits least significant first: `096` for 690. Each function's mean is
# in metrics, curves and the live view, as reward/right and reward/right_digits.


def right(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)


def right_digits(prompt: str, completion: str, answer: str) -> float:
    """The share of digits in their right place: something to climb while nothing is quite right yet."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / max(len(completion), len(answer))


@dataclass(frozen=True)
class Doubling:
    largest: int = 999  # --task.largest on the command line
    name: str = "doubling"

    def problems(self, split: str) -> list[tba.Problem]:
        numbers = [n for n in range(100, self.largest + 1) if (n % 10 == 7) == (split == "eval")]
        return [tba.Problem(f"{n}+{n}=", {"answer": str(2 * n)[::-1]}) for n in numbers]

    def reward(self) -> tba.WeightedFunctions:
        return tba.WeightedFunctions(((right, 0.5), (right_digits, 0.5)))  # 1 when the answer is right


recipe = tba.Recipe(
    name="two_rewards",
    description="twice a number, by a small policy that adds carelessly",
    task=Doubling(),
    model=tba.HuggingFace(
        path=str(BASE),  # the quickstart's, which writes digits only
        generation=tba.EngineSettings(slots=140, max_completion_tokens=6),
        device="cpu",  # leave it out to use a GPU
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    optimizer=tba.OptimizerSettings(lr=1e-4, schedule=tba.WarmupStableDecay(10, 100, 90)),
    replay=tba.ReplaySettings(buffer=tba.BufferSettings(deduplicate=False)),  # answers are short: few differ
    evaluation=tba.EvaluationSettings(problems=0),
    steps=200,
    samples_per_prompt=20,
    prompts_per_round=7,
)
