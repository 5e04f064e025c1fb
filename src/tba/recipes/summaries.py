"""SmolLM2-135M-Instruct learns to summarise posts by a reward model of human marks, on two CPU cores.

    tba model smollm2 --out smollm2
    tba reward-model marks.jsonl --score-field human_litepyramid_recall --model MINILM --frozen --out marks
    tba train summaries --model.path smollm2 --task.path posts.jsonl --task.reward-model marks --task.gold judge

Posts of at most 1,100 characters, summaries of one sentence. The reward is what a model of people's marks says of the
summary (REALSumm; of news), less a price for a length other than the base's own: those marks are mostly of length. The
judge was trained on something else. lab/real_model.md says how both are made, and what comes out.

The form of the objective is the default. On stale data the paper's (`--objective.off-policy none`) was not worse on
SmolLM2, and the rule that decides between them has not run yet (docs/objectives.md).
"""

from __future__ import annotations

from dataclasses import replace

import tba
from tba.apps.preference.tldr import Tldr
from tba.recipes.instruct import recipe as instruct

assert isinstance(instruct.model, tba.HuggingFace)
recipe = replace(
    instruct,
    name="summaries",
    description="SmolLM2-135M-Instruct learns to summarise posts by a reward model, two CPU processes",
    task=Tldr(
        path="posts.jsonl",
        reward_model="marks",
        gold="judge",
        ask='Post: {post}\n\nSummarize this post in one sentence. Begin with "The author".',
        words=25,  # as many as the base writes
        per_length=3.0,  # at 1 they became a fifth longer: of two summaries the longer one has the better marks
        without_eos=-3.0,
        longest=1100,
        held_out=0.15,
    ),
    model=replace(instruct.model, generation=tba.EngineSettings(max_completion_tokens=64)),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    optimizer=tba.OptimizerSettings(lr=2e-4, schedule=tba.WarmupStableDecay(5, 75, 40, final=0.1)),
    evaluation=tba.EvaluationSettings(
        every=0, problems=100, problems_during=100, greedy=False, batch_size=64, logged_problems=1000
    ),
    prompts=tba.PromptSettings(max_tokens=320),
    steps=120,
    groups_per_step=4,
    prompts_per_round=8,
)
