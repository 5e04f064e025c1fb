"""Python problems whose answers are run on tests: MBPP with a chat model of 0.5 to 1.5 B parameters. It never ran here.

    tba check mbpp --task.path mbpp --model.path Qwen2.5-0.5B-Instruct      # folders; without, they come from the Hub

An answer's code is its last block between fences, and runs in a sandbox (`tba.CodeReward`, docs/code_rewards.md). The
reward is the share of the three asserts that pass, of which the prompt shows one; evaluations count the answers that
pass all. The settings are those of the package's other recipes of this size; nobody has tuned them. Needs the extra
`tba-rl[hub]` for the Hub.

The form of the objective is the default. On stale data the paper's (`--objective.off-policy none`) was not worse on
SmolLM2, and the rule that decides between them has not run yet (docs/objectives.md).
"""

from __future__ import annotations

import tba
from tba.tasks.mbpp import Mbpp

recipe = tba.Recipe(
    name="mbpp",
    description="MBPP's Python problems, run on their tests: Qwen2.5-0.5B-Instruct; never run by the authors",
    task=Mbpp(code=tba.CodeReward(score="share")),
    model=tba.HuggingFace(
        path="Qwen/Qwen2.5-0.5B-Instruct",
        generation=tba.EngineSettings(slots=128, max_completion_tokens=512),
        gradient_checkpointing=True,
    ),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.01)),
    exploration=tba.Fixed(temperature=1.0),
    optimizer=tba.OptimizerSettings(lr=2e-6, schedule=tba.WarmupStableDecay(10, 230, 60)),
    replay=tba.ReplaySettings(selection=tba.RecencyReward(m=0.95), pacing=tba.Pacing(warm_up=256, max_mean_uses=2.0)),
    evaluation=tba.EvaluationSettings(every=50, problems=0, problems_during=200, batch_size=64),
    prompts=tba.PromptSettings(max_tokens=512),
    steps=300,
    groups_per_step=16,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=16,
    sync_every=2,
)
