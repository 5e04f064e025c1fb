"""Guessing a number from 1 to 100 in few guesses: episodes of many turns, on two CPU cores.

The base, made on first use in eight minutes, has learnt from a player whose guess is the middle of the range at a
quarter of its turns and else its lowest number. That takes 12.9 guesses on average, halving each time 5.8. A guess
costs 0.05 of the reward (`environments/guess_number.py`). `reward/turns` in the metrics is the mean number of
guesses; in an evaluation a number is right that was found in at most 7.
"""

from __future__ import annotations

import tba
from tba.environments.guess_number import GUESSES, GuessNumber, timid

recipe = tba.Recipe(
    name="guess_number",
    description="a number from 1 to 100 in few guesses, from a small base that is timid, two CPU processes, minutes",
    task=tba.EnvironmentTask(GuessNumber, "guess_number", turns=GUESSES, worlds=20_000, held_out=500, player=timid),
    model=tba.HuggingFace(
        device="cpu",
        generation=tba.EngineSettings(slots=140, max_completion_tokens=300),
        warm_start=tba.WarmStart(
            scratch=tba.ScratchModel(max_positions=320),
            tokenizer="characters",
            sft=tba.SupervisedSettings(steps=2500, batch_size=32, lr=2e-3),
        ),
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.003)),
    optimizer=tba.OptimizerSettings(lr=2e-4, schedule=tba.WarmupStableDecay(10, 120, 70)),
    replay=tba.ReplaySettings(
        selection=tba.RecencyReward(m=0.95),
        pacing=tba.Pacing(warm_up=140, max_mean_uses=1.0),
        buffer=tba.BufferSettings(deduplicate=False),
    ),
    evaluation=tba.EvaluationSettings(
        every=50, problems=500, problems_during=250, threshold=1 - 6.5 / GUESSES, greedy=False, logged_problems=500
    ),
    steps=200,
    groups_per_step=7,
    group_size=20,
    samples_per_prompt=20,
    prompts_per_round=7,
    sync_every=2,
)
