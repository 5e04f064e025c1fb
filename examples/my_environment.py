"""An environment of several turns: a world that answers, and a small policy that learns to act in it.

    tba train examples/my_environment.py

The policy guesses a number from 1 to 16 and is told which range is left. Its base has learnt from a player that guesses
anywhere. docs/environments.md explains each part.
"""

import random

import tba

# 1. The world. One object lives through one episode: `reset`, then a `step` for each turn of the policy. It sees texts
#    and no tokens. Whatever it draws it draws from `seed`, so that a group's episodes all meet the same world.


class Sixteen:
    def reset(self, seed: int) -> str:
        self.number = random.Random(seed).randint(1, 16)
        self.low, self.high, self.guesses, self.found = 1, 16, 0, False
        return self.range()

    def step(self, text: str) -> str | None:  # what is said next; None: it is over
        self.guesses += 1
        guess = int(text) if text in {str(n) for n in range(1, 17)} else 0  # an answer is data: anything may come
        self.found = guess == self.number
        if self.low <= guess < self.number:
            self.low = guess + 1
        elif self.number < guess <= self.high:
            self.high = guess - 1
        return None if self.found else self.range()

    def get_reward(self) -> float:  # asked once, at the end
        return 1 - 0.1 * (self.guesses - 1) if self.found else 0.0

    def range(self) -> str:
        return f"{self.low}-{self.high}?"


# 2. A scripted player shows what turns look like: the model made below learns from its episodes. It is told all that
#    has been said so far. A model of your own needs none.


def anywhere(told: list[str], draw: random.Random) -> str:
    return str(draw.randint(1, 16))


# 3. The task: every seed is a problem. `turns` and `max_completion_tokens` (what the world says counts, too) bound an
#    episode. What the world says is read by the policy, and never trained.

recipe = tba.Recipe(
    name="my_environment",
    description="a number from 1 to 16 in few guesses, by a small policy that has seen random ones",
    task=tba.EnvironmentTask(Sixteen, name="sixteen", turns=10, worlds=500, held_out=100, player=anywhere),
    model=tba.HuggingFace(
        warm_start=tba.WarmStart(
            scratch=tba.ScratchModel(max_positions=128),
            tokenizer="characters",  # those that occur in the episodes
            sft=tba.SupervisedSettings(steps=300, lr=2e-3),
        ),
        generation=tba.EngineSettings(slots=64, max_completion_tokens=100),
        device="cpu",  # leave it out to use a GPU
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    optimizer=tba.OptimizerSettings(lr=1e-4, schedule=tba.WarmupStableDecay(10, 100, 90)),
    replay=tba.ReplaySettings(buffer=tba.BufferSettings(distinct=False)),  # an episode is short: few differ
    evaluation=tba.EvaluationSettings(problems=100, threshold=0.6),  # right: found in five guesses
    steps=200,
    samples_per_prompt=20,
    prompts_per_round=7,
)
