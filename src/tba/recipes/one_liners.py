"""Learning from running code: functions of one line, from a small base that forgets their conditions, on two cores.

    # sum of squares, even
    def f(a): return sum(x*x for x in a if x%2==0)

The base, made on first use in a few minutes, was trained on demonstrations that forget 70 % of the conditions (`if`).
The reward is 1 for an answer that passes all tests, which runs it in a sandbox (`tba.CodeReward`); the kinds of
function of the evaluation were in no prompt. docs/code_rewards.md says what the sandbox stops and what it does not.
"""

from __future__ import annotations

import tba
from tba.tasks.one_liners import OneLiners

recipe = tba.Recipe(
    name="one_liners",
    description="functions of one line that are run on tests, from a small base that errs, two CPU processes",
    task=OneLiners(),
    model=tba.HuggingFace(
        device="cpu",
        generation=tba.EngineSettings(slots=160, max_completion_tokens=24),
        warm_start=tba.WarmStart(
            scratch=tba.ScratchModel(hidden_size=96, layers=3, heads=4, ff_size=384, max_positions=64),
            tokenizer="bpe",
            vocab_size=320,
            sft=tba.SupervisedSettings(epochs=30.0, batch_size=64, lr=2e-3),
        ),
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    exploration=tba.Fixed(temperature=1.0),
    optimizer=tba.OptimizerSettings(lr=2e-4, schedule=tba.WarmupStableDecay(20, 200, 80)),
    replay=tba.ReplaySettings(
        selection=tba.RecencyReward(m=0.95),
        pacing=tba.Pacing(warm_up=544),
        buffer=tba.BufferSettings(deduplicate=False),  # short answers repeat
    ),
    evaluation=tba.EvaluationSettings(every=50, problems=300, problems_during=300, batch_size=160),
    steps=300,
    groups_per_step=17,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=17,
    sync_every=2,
)
