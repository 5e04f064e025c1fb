r"""GSM8K as in the paper (Table 2): RhoMath-1B, 7 prompts x 20 responses, beta 0.012 -> 0.004, m = 0.95, k = 2.

Departures from the paper, each with the field that undoes it:

- the gradient is clipped to norm 1                      `--optimizer.clip-norm None`
- the advantage form, (beta/2) L                         `--objective.form raw`
- stale answers weigh less, and a push (objectives.md)   `--objective.off-policy none`
- the trained weights and AdamW's state are float32      (stays)
- the prompt the SFT model was trained with              `--task.style tba`
- engines and the reference in bfloat16 on a GPU         `--model.dtype float32` (fp32 everywhere)

The paper's reading of answers (the last number anywhere) is the default here too; `--task.strict` wants `####`.

An instruct model of 0.5 B on one GPU of 40 GB or more, with its chat template and a rate for its size (weights and data
come from the Hub, by the extra `tba-rl[hub]`):

    tba train gsm8k --model.path Qwen/Qwen2.5-0.5B-Instruct --model.device cuda --task.style chat \
        --optimizer.lr 1e-6 --evaluation.every 100 --evaluation.problems 500

This never ran with these weights. Others report for this model and data: verl's PPO 53.1 % after 111 minutes and slime
50.2 % after 71 minutes on one GB10, and 52 % after 13 minutes on eight H100.

To train a small policy from scratch on your own machine, see lab/gsm8k.md.
"""

from __future__ import annotations

import tba
from tba.schedules import gsm8k_anneal
from tba.tasks.gsm8k import Gsm8k

recipe = tba.Recipe(
    name="gsm8k",
    description="the paper's math reasoning run: GSM8K from realtreetune/rho-1b-sft-GSM8K",
    task=Gsm8k(path="openai/gsm8k", style="vineppo"),
    model=tba.HuggingFace(
        path="realtreetune/rho-1b-sft-GSM8K",
        generation=tba.EngineSettings(slots=72, max_completion_tokens=512),
        warm_start=tba.WarmStart(  # what `tba sft gsm8k` makes: a small policy from nothing
            scratch=tba.ScratchModel(
                hidden_size=256, layers=6, heads=4, kv_heads=2, ff_size=704, max_positions=1024, tie_embeddings=False
            ),
            tokenizer="bpe",
            vocab_size=2048,
            sft=tba.SupervisedSettings(epochs=1.0, batch_size=16, lr=1e-3, weight_decay=0.01),
        ),
    ),
    objective=tba.TrajectoryBalance(beta=gsm8k_anneal()),
    exploration=tba.Fixed(temperature=0.7),
    optimizer=tba.OptimizerSettings(lr=1e-5, schedule=tba.WarmupStableDecay(50, 450, 500)),
    replay=tba.ReplaySettings(
        selection=tba.RecencyReward(m=0.95, inverse_temperature=0.0), pacing=tba.Pacing(warm_up=500)
    ),
    evaluation=tba.EvaluationSettings(every=0, problems=0, batch_size=64),
    prompts=tba.PromptSettings(max_tokens=512),
    steps=1000,
    groups_per_step=7,
    group_size=20,
    samples_per_prompt=24,
    prompts_per_round=3,
    sync_every=2,
    policy_temperature=0.7,
)
