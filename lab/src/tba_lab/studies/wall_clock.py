"""Seconds to a target accuracy (the paper's Figure 1): asynchronous Trajectory Balance against synchronous baselines.

Every variant runs as its user would run it on two cores: asynchronous ones in two processes of one thread, synchronous
ones in one process that alternates. Each has its own best learning rate from `tuning`. `250` and `300` are the numbers
of updates, instead of 200, for which the asynchronous runs have time: their data are reused, and nobody waits. Other
programs on the machine spoil the figures of this study.
"""

from __future__ import annotations

from dataclasses import replace

from tba.objectives.vine_ppo import VinePpo
from tba.recipe import Recipe
from tba.rollout.vine import Vine
from tba.schedules import Constant, WarmupStableDecay
from tba_lab.studies._base import (
    BETA,
    RATES,
    TARGET,
    asynchronous,
    base,
    objectives,
    synchronous,
    with_objective,
    with_rate,
)
from tba_lab.study import Study, Variant

SYNCHRONOUS = ("tb", "grpo", "dr-grpo", "ppo")
ASYNCHRONOUS = (
    *("tb", "tb-corrected", "tb-robust", "tb-learned-z", "tba-prime", "ppo", "prox-rloo", "grpo", "dr-grpo"),
    *("online-dpo", "reinforce", "raft"),
)
LONGER = {250: WarmupStableDecay(20, 165, 65), 300: WarmupStableDecay(20, 200, 80)}  # updates: their schedule


def _often(recipe: Recipe) -> Recipe:
    """Returns the recipe with ten evaluations; an asynchronous searcher does not sample while it evaluates."""
    return replace(recipe, evaluation=replace(recipe.evaluation, every=recipe.steps // 10))


def _longer(steps: int) -> Recipe:
    return replace(base, steps=steps, optimizer=replace(base.optimizer, schedule=LONGER[steps]))


def _asynchronous(name: str, recipe: Recipe = base) -> Recipe:
    return asynchronous(with_rate(with_objective(_often(recipe), objectives()[name]), RATES[name].stale), 2, m=0.95)


def _vine_ppo() -> Recipe:
    """On-policy, every digit a step; its rate is PPO's."""
    objective, vine = VinePpo(Constant(BETA)), Vine(separator="", joined="")
    return synchronous(with_rate(replace(_often(base), objective=objective, vine=vine), RATES["ppo"].on_policy))


variants: dict[str, Variant] = {f"{name}-async": Variant(_asynchronous(name), "async") for name in ASYNCHRONOUS}
for _name in SYNCHRONOUS:
    _recipe = with_rate(with_objective(_often(base), objectives()[_name]), RATES[_name].on_policy)
    variants[f"{_name}-sync"] = Variant(synchronous(_recipe), "sync")
for _name in ("tb-corrected", "tba-prime"):
    for _steps in LONGER:
        variants[f"{_name}-async-{_steps}"] = Variant(_asynchronous(_name, _longer(_steps)), "async")
variants["vine-ppo-sync"] = Variant(_vine_ppo(), "sync")

study = Study(
    name="wall_clock",
    description="Seconds to 80 %: asynchronous runs in two processes and synchronous ones, each at its best rate.",
    recipe=base,
    variants=variants,
    target=TARGET,
    baseline="tb-corrected-async",
)
