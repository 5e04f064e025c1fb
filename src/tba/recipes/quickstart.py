"""The first run: three-digit sums, starting from a policy that forgets carries, on two cores in minutes.

The base (shipped, 0.45 M parameters) was trained on right sums first and then on demonstrations that forget 55 % of the
carries: it has picked up a bad habit, and solves about a third of the problems. The reward is exact: 1 for the right
digits, else 0. Trajectory Balance with Asynchrony then breaks the habit, with one searcher process and one trainer
process, neither waiting for the other.

`tba sft quickstart --out DIR` makes the base again (the same weights on the same machine).
"""

from __future__ import annotations

from pathlib import Path

import tba

BASE = Path(__file__).parent / "quickstart_base"  # the shipped base, a folder in the Hugging Face layout

recipe = tba.Recipe(
    name="quickstart",
    description="three-digit sums, last digit first (345+678=3201), a small shipped base, two CPU processes, a minute",
    task=tba.Arithmetic(digits=3, forgotten_carries=0.55),
    model=tba.HuggingFace(
        device="cpu",
        generation=tba.EngineSettings(slots=160, max_completion_tokens=6),
        warm_start=tba.WarmStart(
            scratch=tba.ScratchModel(
                hidden_size=96, layers=3, heads=4, ff_size=384, max_positions=32, tie_embeddings=False
            ),
            tokenizer="characters",
            before=(
                tba.Lesson(
                    tba.SupervisedSettings(steps=1000, batch_size=128, lr=2e-3, pool=1), {"forgotten_carries": 0.0}
                ),
            ),
            sft=tba.SupervisedSettings(steps=300, batch_size=128, lr=1e-3, pool=1),
            shipped=BASE,
        ),
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    exploration=tba.Fixed(temperature=1.0),
    optimizer=tba.OptimizerSettings(lr=1e-4, schedule=tba.WarmupStableDecay(20, 260, 120), weight_average=True),
    replay=tba.ReplaySettings(
        selection=tba.RecencyReward(m=0.95),
        pacing=tba.Pacing(warm_up=544),  # four rounds
        buffer=tba.BufferSettings(deduplicate=False),  # an answer has four digits: few are distinct
    ),
    evaluation=tba.EvaluationSettings(every=50, problems=2000, problems_during=500, pass_k=4, batch_size=160),
    steps=400,
    groups_per_step=17,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=17,
    sync_every=2,
)
