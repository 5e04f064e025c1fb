"""Learning to use a tool: products that the policy cannot work out, and a calculator that it may ask, on two cores.

The base, made on first use in a minute or two, has learnt from a player that mostly guesses, and asks the calculator at
four problems in ten. The reward is 1 for the right answer less 0.05 for each question (`environments/calculator.py`).
What the calculator says is read by the policy and never trained. `reward/turns` in the metrics is the mean number of
turns, 2 where the calculator was asked.
"""

from __future__ import annotations

import tba
from tba.environments.calculator import COST, Calculator, overconfident

recipe = tba.Recipe(
    name="calculator",
    description="products with a calculator to ask, from a small base that mostly guesses, two CPU processes, minutes",
    task=tba.EnvironmentTask(Calculator, "calculator", turns=3, worlds=40_000, held_out=500, player=overconfident),
    model=tba.HuggingFace(
        device="cpu",
        generation=tba.EngineSettings(slots=140, max_completion_tokens=32),
        warm_start=tba.WarmStart(
            scratch=tba.ScratchModel(max_positions=48),
            tokenizer="characters",
            sft=tba.SupervisedSettings(steps=2000, batch_size=64, lr=2e-3),
        ),
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    optimizer=tba.OptimizerSettings(lr=2e-4, schedule=tba.WarmupStableDecay(20, 380, 100)),
    replay=tba.ReplaySettings(
        selection=tba.RecencyReward(m=0.95),
        pacing=tba.Pacing(warm_up=280),
        buffer=tba.BufferSettings(deduplicate=False),
    ),
    evaluation=tba.EvaluationSettings(every=50, problems=500, problems_during=250, threshold=1 - COST),
    steps=500,
    groups_per_step=7,
    group_size=20,
    samples_per_prompt=20,
    prompts_per_round=7,
    sync_every=2,
)
