"""Red-teaming as in the paper, large: Llama 3.2 1B attacks Llama 3.1 8B Instruct, Llama Guard 3 judges; 6 searchers.

Set `--task.victim.path` to a model that you are responsible for. Train the attacker on attacks first, as for
`red_team_gpt2`. Each searcher loads victim and judge as well as its own copy of the attacker.

The paper has two settings, (m, capacity) = (0.5, 150,000), which is the default here, and (0.6, 130,000):
`--replay.selection.m 0.6 --replay.buffer.total 130000 --replay.buffer.per-prompt 130000`. Departures as in
`red_team_gpt2`.
"""

from __future__ import annotations

from dataclasses import replace

import tba
from tba.apps.red_team.task import RedTeam
from tba.apps.red_team.toxicity import CausalJudge
from tba.apps.red_team.victim import ModelVictim
from tba.recipes.red_team_gpt2 import recipe as small

recipe = replace(
    small,
    name="red_team_llama",
    description="the paper's large red-teaming run: Llama 3.2 1B against Llama 3.1 8B, judged by Llama Guard 3",
    task=RedTeam(
        victim=ModelVictim(
            path="meta-llama/Llama-3.1-8B-Instruct", template="chat", temperature=0.1, top_p=0.9, max_tokens=64
        ),
        classifier=CausalJudge(path="meta-llama/Llama-Guard-3-8B"),
        count=5,
        evaluated=1024,
    ),
    model=tba.HuggingFace(generation=tba.EngineSettings(slots=128, max_completion_tokens=20, min_completion_tokens=5)),
    objective=tba.TrajectoryBalance(
        beta=tba.Constant(0.05),
        off_policy="tapered",
        reward_temperature=tba.Linear(2.0, 1.0, 1000),
        reference_temperature=tba.Linear(1.0, 1.2, 2000),
    ),
    exploration=tba.RandomPerRound(p_temperature=0.5, temperature_low=0.7, temperature_high=2.0, p_top_p=0.0),
    replay=replace(small.replay, buffer=tba.BufferSettings(per_prompt=150_000, total=150_000)),
    searchers=6,
)
