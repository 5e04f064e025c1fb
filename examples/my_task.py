"""Your own task, letters and all: problems, a reward as a plain function, and a small policy that is made on the way.

    tba train examples/my_task.py

ends, in a run of ours (docs/your_task.md says on what machine), with

    metric                       before                after  points  problems
    pass@1/greedy   78.4 % [74.6, 81.8]  98.6 % [97.1, 99.3]   +20.2       500
    pass@1/sampled  35.6 % [31.5, 39.9]  88.0 % [84.9, 90.6]   +52.4       500
"""

import random
from dataclasses import dataclass

import tba

# 1. How an answer is marked: a plain function of the two texts and of the problem's fields that it names.


def right(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)


# 2. Where problems come from. `eval` is held out: the two splits must never share a problem.


@dataclass(frozen=True)
class Sorting:
    """`lemon>` is to be answered by its letters in order, `elmno`."""

    length: int = 5  # --task.length on the command line
    careless: float = 0.7  # the share of demonstrations in which two neighbours are swapped
    name: str = "sorting"

    def __post_init__(self) -> None:
        if self.length < 2:
            raise tba.UserError(f"--task.length is {self.length}: give 2 letters or more")

    def problems(self, split: str) -> list[tba.Problem]:
        draw = random.Random(0)  # the same words each time
        words = {"".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=self.length)): None for _ in range(10_000)}
        problems = [self.problem(word, draw) for word in words]
        return problems[:500] if split == "eval" else problems[500:]

    def problem(self, word: str, draw: random.Random) -> tba.Problem:
        letters = sorted(word)
        answer = "".join(letters)
        if draw.random() < self.careless:
            i = draw.randrange(self.length - 1)
            letters[i], letters[i + 1] = letters[i + 1], letters[i]
        return tba.Problem(f"{word}>", {"answer": answer}, demonstration="".join(letters))

    def reward(self) -> tba.FunctionReward:
        return tba.FunctionReward(right)


# 3. What a run is made of. Without a path, the model is made from scratch: it learns the demonstrations above, mistakes
#    and all, and from then on only the reward. The first run makes it and keeps it; `tba sft examples/my_task.py --out
#    base` writes it to a folder. A model of your own: --model.path FOLDER_OR_HUB_NAME, and no warm start.

recipe = tba.Recipe(
    name="my_task",
    description="the letters of a word in order, by a small policy that has seen careless examples",
    task=Sorting(),
    model=tba.HuggingFace(
        warm_start=tba.WarmStart(
            scratch=tba.ScratchModel(max_positions=64),
            tokenizer="characters",  # those that occur in the problems and their demonstrations
            sft=tba.SupervisedSettings(steps=300, lr=2e-3),
        ),
        generation=tba.EngineSettings(slots=140, max_completion_tokens=8),
        device="cpu",  # leave it out to use a GPU
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),  # how far the policy may move for its reward
    optimizer=tba.OptimizerSettings(lr=1e-4, schedule=tba.WarmupStableDecay(10, 100, 90)),
    replay=tba.ReplaySettings(buffer=tba.BufferSettings(deduplicate=False)),  # answers are short: few differ
    evaluation=tba.EvaluationSettings(problems=500),
    steps=200,
    samples_per_prompt=20,
    prompts_per_round=7,
)
