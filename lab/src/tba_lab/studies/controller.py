"""The controller of staleness against none, and against pacing, at a rate where stale Trajectory Balance goes wrong.

At 1e-4 the policy moves three times as far per update as in the quickstart. `turns`: k = 10 and half of the groups old,
in one process that alternates, so that staleness depends on k and m alone. `processes`: the quickstart as it is, where
staleness also depends on the searcher's speed; `paced` limits the trainer to one use of each trajectory.
"""

from __future__ import annotations

from dataclasses import replace

from tba.recipe import Recipe
from tba.training.staleness_controller import Control
from tba_lab.studies._base import TARGET, base, stale, with_rate
from tba_lab.study import Plot, Study, Variant

RATE = 1e-4
CONTROLS = {
    "off": Control(),
    "ess": Control("ess", lower_bound=0.5, upper_bound=0.9, every=5),
    "off-policy": Control("off_policy", lower_bound=0.2, upper_bound=1.0, every=5),
    "lag": Control("lag", lower_bound=2.0, upper_bound=6.0, every=5),
}


def _paced(recipe: Recipe) -> Recipe:
    pacing = replace(recipe.replay.pacing, samples_per_insert=1.0, saved_batches=2.0)
    return replace(recipe, replay=replace(recipe.replay, pacing=pacing))


_fast = with_rate(base, RATE)
_turns = stale(_fast, 10, m=0.5)
variants = {f"turns-{name}": Variant(replace(_turns, control=c), "turns") for name, c in CONTROLS.items()}
variants |= {f"processes-{name}": Variant(replace(_fast, control=c), "processes") for name, c in CONTROLS.items()}
variants |= {
    "processes-paced": Variant(_paced(_fast), "processes"),
    "processes-paced-ess": Variant(replace(_paced(_fast), control=CONTROLS["ess"]), "processes"),
}

study = Study(
    name="controller",
    description="A controller of k and m that keeps a signal of staleness in range, against none and against pacing.",
    recipe=_fast,
    variants=variants,
    target=TARGET,
    baseline="{family}-off",
    divergence_prompts=0,
    plots=(Plot("lag", label="mean lag"), Plot("ess", label="effective sample size")),
)
