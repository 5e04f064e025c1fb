"""TL;DR as in the paper (Table 3): Pythia-410M, 8 prompts x 20 responses, beta 1 -> 0.05 with its cut, m = 0.5, k = 10.

The sizes are fields: for 1B or 2.8B give `--model.path mnoukhov/pythia1b-sft-tldr` and
`--task.reward-model mnoukhov/pythia1b-rm-tldr6.9b` (pythia2.8b alike; that one needs `--model.gradient-checkpointing`).
The gold model is `cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr`; it evaluates and is never trained on.

Departures from the paper, each with the field that undoes it:

- the gradient is clipped to norm 1                              `--optimizer.clip-norm None`
- the advantage form, (beta/2) L                                 `--objective.form raw`
- stale answers weigh less, and a push (docs/objectives.md)      `--objective.off-policy none`
- evaluated at temperature 0 where the paper has 0.01            (stays)
- reward models in float32, on the searchers' device             (stays)

With your own posts: `--task.path posts.jsonl --task.reward-model DIR`, where `tba reward-model` made DIR.
"""

from __future__ import annotations

import tba
from tba.apps.preference.tldr import Tldr
from tba.schedules import tldr_anneal

STEPS = 256

recipe = tba.Recipe(
    name="tldr",
    description="the paper's preference tuning run: TL;DR summaries from pythia410m-sft-tldr, a 6.9B gold model",
    task=Tldr(
        reward_model="mnoukhov/pythia410m-rm-tldr6.9b", gold="cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
    ),
    model=tba.HuggingFace(
        path="mnoukhov/pythia410m-sft-tldr", generation=tba.EngineSettings(slots=160, max_completion_tokens=128)
    ),
    objective=tba.TrajectoryBalance(beta=tldr_anneal(STEPS)),
    exploration=tba.Fixed(temperature=0.7),
    optimizer=tba.OptimizerSettings(lr=3e-6, schedule=tba.WarmupLinear(STEPS, 0)),
    replay=tba.ReplaySettings(
        selection=tba.RecencyReward(m=0.5, inverse_temperature=1.0), pacing=tba.Pacing(warm_up=10_000)
    ),
    evaluation=tba.EvaluationSettings(every=0, problems=0, samples=0, batch_size=64),
    prompts=tba.PromptSettings(max_tokens=512),
    steps=STEPS,
    groups_per_step=8,
    group_size=20,
    samples_per_prompt=20,
    prompts_per_round=8,
    sync_every=10,
    policy_temperature=0.7,
)
