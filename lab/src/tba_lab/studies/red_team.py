"""Red-teaming the small victim: asynchronous Trajectory Balance against synchronous variants and policy gradients.

`tb-sync`, `reinforce-sync` and `ppo-sync` are on-policy; REINFORCE has a leave-one-out baseline and no pull to the
reference, PPO one of 0.1. `ancestor-sync` is what the paper started from (Lee et al.
2024, arXiv 2405.18540): log Z learned, half of each batch fresh and half from a memory without repeats that lets the
lowest reward go.
Each has more seconds than the asynchronous run, and the rate that `red_team_tuning` found best for it.

Make the world first (`tba red-team world --out red_team_world`). Two figures describe what a variant finds: its success
rate (measured here) and the diversity of its attacks (`python lab/benchmarks/red_team.py`, on the runs of this study).
Success alone is highest for one attack repeated forever.
"""

from __future__ import annotations

from dataclasses import replace

from tba.apps.red_team.near import NearDuplicates
from tba.evaluation.accuracy import EvaluationSettings
from tba.evaluation.estimators import SAMPLED
from tba.objectives.policy_gradient import Reinforce
from tba.objectives.ppo import Ppo
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.recipe import Recipe
from tba.recipes.red_team_small import recipe as small
from tba.record.recorder import RecordSettings
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.schedules import Constant
from tba_lab.study import Study, Variant

SYNCHRONOUS_STEPS = 300  # longer than 500 asynchronous ones and their warm-up take

# By success on seed 100, then by diversity; `base` has its own.
RATES = {"tb": 3e-3, "ancestor": 3e-3, "reinforce": 1e-3, "ppo": 1e-3}

base = replace(
    small,
    evaluation=EvaluationSettings(every=50, problems=0, greedy=False, batch_size=256),
    record=RecordSettings(tensorboard=False, samples_per_batch=0, hide_text=True),
)


def synchronous(name: str, lr: float, steps: int = SYNCHRONOUS_STEPS) -> Recipe:
    """Returns a recipe in one process that alternates: a round of attacks for each update of 128."""
    objective, replay = _baseline(name)
    fresh_attacks = round(128 * replay.selection.m) if isinstance(replay.selection, RecencyReward) else 128
    return replace(
        base,
        objective=objective,
        optimizer=replace(base.optimizer, lr=lr),
        runtime="inline",
        steps=steps,
        evaluation=replace(base.evaluation, every=25),
        sync_every=1,
        samples_per_prompt=fresh_attacks,
        replay=replay,
    )


def _baseline(name: str) -> tuple[Objective, ReplaySettings]:
    on_policy = ReplaySettings(
        selection=RecencyReward(m=1.0),
        pacing=Pacing(warm_up=0),
        buffer=replace(base.replay.buffer, deduplicate=False),  # or repeats make a round too small: old data fill it
    )
    lowest_out = BufferSettings(
        per_prompt=5000,
        total=5000,
        evict="lowest_reward",
        deduplicate=False,
        near_duplicates=NearDuplicates("edit", distance=0.05),  # a repeat; attacks of two families differ by more
        keep_recent=True,
    )
    half_old = replace(
        on_policy, selection=RecencyReward(m=0.5, inverse_temperature=1.0, mix="group"), buffer=lowest_out
    )
    baselines: dict[str, tuple[Objective, ReplaySettings]] = {
        "tb": (TrajectoryBalance(Constant(1.0), off_policy="none"), on_policy),
        "ancestor": (TrajectoryBalance(Constant(1.0), log_z="learned", off_policy="none"), half_old),
        "reinforce": (Reinforce(Constant(0.0)), on_policy),
        "ppo": (Ppo(Constant(0.1)), on_policy),
    }
    return baselines[name]


study = Study(
    name="red_team",
    description="Red-teaming a small victim: success over time, asynchronous and synchronous, TB, REINFORCE and PPO.",
    recipe=base,
    variants={
        "tb-async": Variant(base, "async"),
        **{f"{name}-sync": Variant(synchronous(name, lr), "sync") for name, lr in RATES.items()},
    },
    metric=SAMPLED,
    target=0.6,
    baseline="tb-sync",
    divergence_prompts=0,
)
