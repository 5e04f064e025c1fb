"""A model that everybody knows, SmolLM2-135M-Instruct, learns to do what it is told, on two CPU cores.

    tba model smollm2 --out smollm2
    tba train instruct --model.path smollm2

Questions about everyday topics come with one to three instructions that a function can check (`tasks/instruct.py`).
Without `--model.path` the weights are the Hub's. Needs the extras `tba-rl[instruct,lora]`, and `gguf` for the first
command; docs/real_model.md says what comes out.

The form of the objective is the default. On stale data the paper's (`--objective.off-policy none`) was not worse on
SmolLM2, and the rule that decides between them has not run yet (docs/objectives.md).
"""

from __future__ import annotations

import tba
from tba.tasks.instruct import Instruct

recipe = tba.Recipe(
    name="instruct",
    description="SmolLM2-135M-Instruct learns to fulfil instructions that a function can check, two CPU processes",
    task=Instruct(),
    model=tba.HuggingFace(
        path="HuggingFaceTB/SmolLM2-135M-Instruct",
        generation=tba.EngineSettings(max_completion_tokens=64),
        lora=tba.LoraSettings(rank=16),
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.02)),
    policy_temperature=0.7,  # at 1 this base writes partly nonsense
    exploration=tba.Fixed(temperature=0.7),
    optimizer=tba.OptimizerSettings(lr=4e-4, schedule=tba.WarmupStableDecay(10, 75, 35, final=0.1)),
    replay=tba.ReplaySettings(
        selection=tba.RecencyReward(m=0.95),
        pacing=tba.Pacing(warm_up=32, max_mean_uses=2.0),
        buffer=tba.BufferSettings(deduplicate=False),  # short answers repeat
    ),
    evaluation=tba.EvaluationSettings(
        every=30, problems=100, problems_during=100, greedy=False, batch_size=64, logged_problems=1000
    ),
    prompts=tba.PromptSettings(max_tokens=192),
    run=tba.RuntimeSettings(checkpoint_every=20),  # 20 steps take two to three minutes
    steps=120,
    max_tokens_per_pass=1024,  # a group of eight at a time: less memory, at the same speed
    groups_per_step=8,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=8,
    sync_every=1,
)
