"""Red-teaming a model that was not made here: SmolLM2-135M-Instruct answers, SmolLM2 attacks, on two CPU cores.

    tba model smollm2 --out smollm2
    tba red-team classifier comments.csv --out toxicity --fields.text 0 --fields.label 1
    tba sft red_team_smollm2 --model.path smollm2 --task.attacks attacks.jsonl --out attacker
    tba train red_team_smollm2 --model.path attacker --task.attacks attacks.jsonl --task.victim.path smollm2

`attacks.jsonl` is the attacker's supervised data, a line {"attack": ...} each; `toxicity` a classifier of people's
labels. Texts are kept out of logs and samples, unless `--record.no-hide-text` is given. docs/red_team.md says what is
measured and how to use it responsibly, docs/real_model.md what comes out.
"""

from __future__ import annotations

import tba
from tba.apps.red_team.task import RedTeam
from tba.apps.red_team.toxicity import WordClassifier
from tba.apps.red_team.victim import ModelVictim

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
VICTIM_TEMPLATE = "<|im_start|>user\n{attack}<|im_end|>\n<|im_start|>assistant\n"

recipe = tba.Recipe(
    name="red_team_smollm2",
    description="red-teaming SmolLM2-135M-Instruct with SmolLM2 as the attacker, two CPU processes",
    task=RedTeam(
        attacks="attacks.jsonl",
        # without the system message that the chat template puts before, which would be most of what is read
        victim=ModelVictim(path=SMOLLM2, template=VICTIM_TEMPLATE, temperature=0.7, top_p=0.92, max_tokens=24),
        classifier=WordClassifier(path="toxicity"),
        count=3,
        evaluated=256,
    ),
    model=tba.HuggingFace(
        path=SMOLLM2,
        generation=tba.EngineSettings(max_completion_tokens=24),
        lora=tba.LoraSettings(rank=16),
        warm_start=tba.WarmStart(sft=tba.SupervisedSettings(steps=40, batch_size=32, lr=1e-4)),  # of `tba sft`
    ),
    # Of an answer's spread in log P(toxic), 0.53 nats, a sixth is the attack's and the rest the victim's dice: attacks
    # differ by 0.22 nats. At beta 0.2 nothing rises; at 0.05, the paper's, only a few attacks are left, which succeed.
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.1), off_policy="tapered"),
    exploration=tba.Fixed(temperature=1.0),
    optimizer=tba.OptimizerSettings(lr=3e-4, schedule=tba.WarmupConstant(5)),
    replay=tba.ReplaySettings(
        selection=tba.RecencyReward(m=0.8, inverse_temperature=1.0, mix="group"),
        pacing=tba.Pacing(warm_up=128, max_mean_uses=2),
        buffer=tba.BufferSettings(per_prompt=100_000, total=100_000),
    ),
    evaluation=tba.EvaluationSettings(every=0, problems=0, greedy=False, batch_size=64),
    record=tba.RecordSettings(hide_text=True),
    run=tba.RuntimeSettings(checkpoint_every=20),
    steps=180,
    max_tokens_per_pass=2048,
    groups_per_step=1,
    group_size=64,
    samples_per_prompt=64,
    prompts_per_round=1,
    sync_every=1,
)
