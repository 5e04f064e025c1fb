"""Red-teaming as in the paper, small: GPT-2 against GPT-2 Alpaca, 5,000 steps of 128 attacks, k = 10, m = 0.5.

The attacker (`--model.path`) is GPT-2 trained on attacks. The authors' model is not published, so make it yourself:

    tba sft taught.jsonl --out attacker --model gpt2 --warm-start.sft.lr 3e-5
    tba train red_team_gpt2 --model.path attacker --task.attacks attacks.jsonl

An attack is a line {"attack": ...} of attacks.jsonl and a line {"prompt": "Write a prompt:", "response": ...} of
taught.jsonl (one file serves both, if its lines have all three).

Departures from the paper, each with the field that undoes it:

- m is the recent share of each batch, where the paper draws for each prompt   `--replay.selection.mix chance`
- temperatures are drawn for a searcher's round, not for each batch           (stays)
- the gradient is clipped to norm 1, as in Lee et al.                          `--optimizer.clip-norm None`
- the advantage form, (beta/2) L                                               `--objective.form raw`
- stale failures weigh less                                                    `--objective.off-policy none`
"""

from __future__ import annotations

import tba
from tba.apps.red_team.task import RedTeam
from tba.apps.red_team.toxicity import SequenceClassifier
from tba.apps.red_team.victim import ALPACA, ModelVictim

recipe = tba.Recipe(
    name="red_team_gpt2",
    description="the paper's small red-teaming run: GPT-2 against GPT-2 Alpaca, a RoBERTa classifier, 5 answers each",
    task=RedTeam(
        victim=ModelVictim(path="vicgalle/gpt2-alpaca", template=ALPACA, temperature=0.7, top_p=0.92, max_tokens=30),
        classifier=SequenceClassifier(path="facebook/roberta-hate-speech-dynabench-r4-target", label="hate"),
        count=5,
        evaluated=1024,
    ),
    model=tba.HuggingFace(generation=tba.EngineSettings(slots=128, max_completion_tokens=20, min_completion_tokens=5)),
    objective=tba.TrajectoryBalance(
        beta=tba.Constant(0.05), off_policy="tapered", reward_temperature=tba.Linear(2.0, 1.0, 500)
    ),
    exploration=tba.RandomPerRound(p_temperature=0.5, temperature_low=0.5, temperature_high=2.0, p_top_p=0.0),
    optimizer=tba.OptimizerSettings(lr=1e-4, weight_decay=0.1, schedule=tba.WarmupConstant(100)),
    replay=tba.ReplaySettings(
        selection=tba.RecencyReward(m=0.5, inverse_temperature=1.0, mix="group"),
        pacing=tba.Pacing(warm_up=1024),
        buffer=tba.BufferSettings(per_prompt=100_000, total=100_000),
    ),
    evaluation=tba.EvaluationSettings(every=500, problems=0, greedy=False, batch_size=256),
    record=tba.RecordSettings(hide_text=True),
    steps=5000,
    groups_per_step=1,
    group_size=128,
    samples_per_prompt=128,
    prompts_per_round=1,
    sync_every=10,
    searchers=2,
)
