r"""MATH as in the paper (Table 4, TBA'): Qwen2.5-7B, 32 prompts x 16 responses, beta 0.005, a reset every 50 updates.

Departures from the paper and its code, each with the field that undoes it:

- data are recent only and used once, with k updates between syncs; 10 steps off-policy: `--sync-every 10`
- the ratio is to the log-probabilities stored when sampling, not to a snapshot's, recomputed           (stays)
- kl and its mean are both of the current policy, where the code takes the mean of the snapshot         (stays)
- searchers compute the reference log-probabilities: the trainer holds one model, not three             (stays)
- the trained weights and AdamW's state are float32, 120 GB for 7B                 `--model.path` of a smaller one
- the prompt is one sentence of instruction after the problem; chat models: `--task.style chat`
- answers are graded by math-verify, where the paper's code compares strings and by sympy              (stays)
- evaluated on MATH-500, greedily, every 50 steps; on all 5,000 test problems: `--task.evaluate-on test`

The problems are not shipped: by default they come from the Hub (12,000 and 500, as in the paper); from a folder:
`--task.path DIR --task.train-on-rest`. Needs the extra `tba-rl[math]`, and `tba-rl[hub]` for the Hub.
"""

from __future__ import annotations

import tba
from tba.tasks.math import Math

recipe = tba.Recipe(
    name="math",
    description="the paper's MATH run, TBA' with resets of the reference: Qwen2.5-7B on MATH, MATH-500",
    task=Math(evaluate_on="math500"),
    model=tba.HuggingFace(
        path="Qwen/Qwen2.5-7B",
        generation=tba.EngineSettings(slots=128, max_completion_tokens=2048),  # of 3,072 with the prompt
        gradient_checkpointing=True,
        warm_start=tba.WarmStart(  # what `tba sft math` makes: a small policy from nothing
            scratch=tba.ScratchModel(
                hidden_size=256, layers=6, heads=4, kv_heads=2, ff_size=704, max_positions=3072, tie_embeddings=False
            ),
            tokenizer="bpe",
            vocab_size=2048,
            sft=tba.SupervisedSettings(epochs=1.0, batch_size=16, lr=1e-3, weight_decay=0.01),
        ),
    ),
    objective=tba.TbaPrime(beta=tba.Constant(0.005)),
    exploration=tba.Fixed(temperature=1.0),
    optimizer=tba.OptimizerSettings(
        lr=1e-6, schedule=tba.WarmupConstant(0), betas=(0.9, 0.99), weight_decay=0.01, clip_norm=1.0
    ),
    replay=tba.ReplaySettings(
        selection=tba.RecencyReward(m=1.0, inverse_temperature=0.0), pacing=tba.Pacing(warm_up=512, max_mean_uses=1.0)
    ),
    evaluation=tba.EvaluationSettings(every=50, problems=0, samples=0, batch_size=64),
    prompts=tba.PromptSettings(max_tokens=1024),
    steps=400,
    groups_per_step=32,
    group_size=16,
    samples_per_prompt=16,
    prompts_per_round=8,
    sync_every=2,
    reference_reset=50,
    policy_temperature=1.0,
)
