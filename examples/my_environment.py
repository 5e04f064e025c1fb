"""An environment of several turns: a world that answers, and a small policy that learns to act in it.

    tba train examples/my_environment.py

The policy guesses a letter from a to p and is told which range is left. Its base has learnt from a player that heeds
the range half of the time. docs/environments.md explains each part.
"""

import random

import tba

# 1. The world. One object lives through one episode: `reset`, then a `step` for each turn of the policy. It sees texts
#    and no tokens. Whatever it draws it draws from `seed`, so that a group's episodes all meet the same world.


LETTERS = "abcdefghijklmnop"


class Letter:
    def reset(self, seed: int) -> str:
        self.letter = random.Random(seed).choice(LETTERS)
        self.low, self.high, self.guesses, self.is_found = LETTERS[0], LETTERS[-1], 0, False
        return self.range()

    def step(self, text: str) -> str | None:  # what is said next; None: it is over
        self.guesses += 1
        guess = text if text in set(LETTERS) else ""  # an answer is data: anything may come
        self.is_found = guess == self.letter
        if self.low <= guess < self.letter:
            self.low = chr(ord(guess) + 1)
        elif self.letter < guess <= self.high:
            self.high = chr(ord(guess) - 1)
        return None if self.is_found else self.range()

    def get_reward(self) -> float:  # asked once, at the end
        return 1 - 0.1 * (self.guesses - 1) if self.is_found else 0.0

    def range(self) -> str:
        return f"{self.low}-{self.high}?"


# 2. A scripted player shows what turns look like: the model made below learns from its episodes. It is told all that
#    has been said so far. A model of your own needs none.


def careless(questions: list[str], draw: random.Random) -> str:
    low, high = (questions[-1][0], questions[-1][2]) if draw.random() < 0.5 else ("a", "p")
    return draw.choice([letter for letter in LETTERS if low <= letter <= high])


# 3. The task: every seed is a problem. `turns` and `max_completion_tokens` (what the world says counts, too) bound an
#    episode. What the world says is read by the policy, and never trained.

recipe = tba.Recipe(
    name="my_environment",
    description="a letter from a to p in few guesses, by a small policy that has seen careless ones",
    task=tba.EnvironmentTask(
        Letter,
        name="letter",
        turns=10,
        worlds=2000,
        held_out=100,
        player=careless,
        limits=tba.EpisodeLimits(processes=0),  # it answers at once and cannot hang; leave it out for one that may
    ),
    model=tba.HuggingFace(
        warm_start=tba.WarmStart(
            scratch=tba.ScratchModel(max_positions=128),
            tokenizer="characters",  # those that occur in the episodes
            sft=tba.SupervisedSettings(steps=500, lr=2e-3),
        ),
        generation=tba.EngineSettings(slots=64, max_completion_tokens=80),
        device="cpu",  # leave it out to use a GPU
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    optimizer=tba.OptimizerSettings(lr=1e-3, schedule=tba.WarmupStableDecay(10, 100, 90)),
    replay=tba.ReplaySettings(buffer=tba.BufferSettings(deduplicate=False)),  # an episode is short: few differ
    evaluation=tba.EvaluationSettings(problems=100, threshold=0.6),  # right: found in five guesses
    steps=200,
    samples_per_prompt=20,
    prompts_per_round=7,
)
