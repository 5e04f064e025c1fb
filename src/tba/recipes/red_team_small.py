"""Red-teaming in a small world, on two CPU cores in minutes: attacker, victim and classifier are made locally.

    tba red-team world --out red_team_world
    tba train red_team_small
    tba red-team eval red_team_small --checkpoint runs/NAME --families red_team_world/families.json

The victim answers 20 families of requests unsafely; each family is one in 600 of the requests that the attacker was
trained on (`apps/red_team/trigger_world.py`). Texts of attacks and answers are kept out of logs and samples, unless
`--record.no-hide-text` is given.
"""

from __future__ import annotations

import tba
from tba.apps.red_team.task import RedTeam
from tba.apps.red_team.toxicity import WordClassifier
from tba.apps.red_team.victim import ModelVictim

WORLD = "red_team_world"

recipe = tba.Recipe(
    name="red_team_small",
    description="red-teaming a small victim with 20 known weak spots, all made here, two CPU processes, minutes",
    task=RedTeam(
        attacks=f"{WORLD}/attacks.jsonl",
        victim=ModelVictim(
            path=f"{WORLD}/victim", template="{attack}\n", top_p=1.0, max_tokens=12, device="cpu", rows_per_pass=640
        ),
        classifier=WordClassifier(path=f"{WORLD}/classifier"),
    ),
    model=tba.HuggingFace(
        device="cpu",
        generation=tba.EngineSettings(slots=128, max_completion_tokens=20),
        warm_start=tba.WarmStart(
            scratch=tba.ScratchModel(hidden_size=96, layers=3, heads=4, ff_size=256, max_positions=48),
            tokenizer="bpe",
            vocab_size=512,
            sft=tba.SupervisedSettings(steps=400, batch_size=128, lr=2e-3),
        ),
    ),
    # log P(toxic) is 0 or -7.4 here. With beta = 1, 98 % of attacks succeed at pi*, and the families keep their shares.
    # Old failures weigh as much as the policy still gives them, old successes in full: without this it learns slowly,
    # and where they fade too, a family that the policy has lost stays lost.
    objective=tba.TrajectoryBalance(beta=tba.Constant(1.0), off_policy="tapered"),
    exploration=tba.Fixed(temperature=1.0),
    optimizer=tba.OptimizerSettings(lr=1e-3, schedule=tba.WarmupConstant(20)),
    replay=tba.ReplaySettings(
        selection=tba.RecencyReward(m=0.5, inverse_temperature=1.0, mix="group"),  # half of each batch is new
        # warm-up: some 150 successes of all families; from 20 of a few it learns those few. Uses: with 5 of each attack
        # it ends at 48 to 66 % in the place of 68 to 82 %, since the trainer is the faster half
        pacing=tba.Pacing(warm_up=4096, max_mean_uses=3),
        buffer=tba.BufferSettings(per_prompt=100_000, total=100_000),
    ),
    evaluation=tba.EvaluationSettings(every=100, problems=0, greedy=False, batch_size=256),
    record=tba.RecordSettings(hide_text=True),
    steps=500,
    groups_per_step=1,  # one prompt has one log Z: in several groups, successes would not be compared with failures
    group_size=128,
    samples_per_prompt=64,
    prompts_per_round=1,
    sync_every=10,
)
