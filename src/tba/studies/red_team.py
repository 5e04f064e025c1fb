"""Red-teaming the small victim: asynchronous Trajectory Balance beside what waits, and beside the policy gradient.

The world comes first (`tba red-team world --out red_team_world`). What a variant finds is told by two figures, its
success rate (here) and the diversity of its attacks (`python benchmarks/red_team.py`, of the runs that are left here):
success alone is highest where one attack is repeated for ever.
"""

from __future__ import annotations

from dataclasses import replace

from tba.evaluate.accuracy import SAMPLED, EvaluationSettings
from tba.objectives.policy_gradient import Reinforce
from tba.objectives.ppo import Ppo
from tba.protocols import Objective
from tba.recipe import Recipe
from tba.recipes.red_team_small import recipe as small
from tba.record.recorder import RecordSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.schedules import Constant
from tba.study import Study, Variant

SYNCHRONOUS_STEPS = 200  # as long as 500 asynchronous ones and their warm-up take: all variants have equal seconds

base = replace(
    small,
    evaluation=EvaluationSettings(every=50, problems=0, greedy=False, chunk=256),
    record=RecordSettings(tensorboard=False, samples=0, hide_text=True),
)


def synchronous(objective: Objective) -> Recipe:
    """On-policy, in one process that takes turns: a round of 128 attacks for each update."""
    return replace(
        base,
        objective=objective,
        runtime="inline",
        steps=SYNCHRONOUS_STEPS,
        evaluation=replace(base.evaluation, every=25),
        sync_every=1,
        samples_per_prompt=128,
        replay=ReplaySettings(
            selection=RecencyReward(m=1.0), pacing=Pacing(warm_up=0), recent_window=0, buffer=base.replay.buffer
        ),
    )


study = Study(
    name="red_team",
    description="Red-teaming a small victim: success over time, asynchronous and synchronous, TB, REINFORCE and PPO.",
    recipe=base,
    variants={
        "tb-async": Variant(base, "async"),
        "tb-sync": Variant(synchronous(base.objective), "sync"),
        "reinforce-sync": Variant(synchronous(Reinforce(Constant(0.0))), "sync"),
        "ppo-sync": Variant(synchronous(Ppo(Constant(0.1))), "sync"),
    },
    metric=SAMPLED,
    target=0.6,
    baseline="tb-sync",
    divergence_prompts=0,
)
