"""Which data to learn from in the small world of red-teaming: uniform, by reward or recent, x 1, 2 and 4 searchers.

Three attacks in a hundred succeed at first, and there is one prompt, so that a batch is one group of 128 out of all
attacks so far. Half of it is new, the other half drawn from all attacks, however old: uniformly (`uniform`) or by
reward (`reward`, as in the recipe); with `recency` all of it is new. Runs take turns in one process. A searcher makes
five rounds of 64 attacks for each ten updates: with one an attack is used three times on average, with four once.

Success is measured here, diversity by `python lab/benchmarks/red_team.py --study studies/red_team_selection`.
"""

from __future__ import annotations

from dataclasses import replace

from tba.evaluation.estimators import SAMPLED
from tba.recipe import Recipe
from tba.replay.pacing import Pacing
from tba.replay.selection import RecencyReward
from tba_lab.studies.red_team import base
from tba_lab.study import Plot, Study, Variant

SELECTIONS = {  # m, inverse temperature
    "uniform": (0.5, 0.0),
    "reward": (0.5, 1.0),  # the recipe's
    "recency": (1.0, 0.0),
}
ROUNDS = 5  # of 64 attacks, by one searcher in ten updates

_base = replace(base, runtime="inline", steps=300, evaluation=replace(base.evaluation, every=25))


def selected(name: str, searchers: int) -> Recipe:
    """Returns the recipe with this selection and the attacks that so many searchers make."""
    m, tau = SELECTIONS[name]
    replay = replace(
        _base.replay,
        selection=RecencyReward(m, tau, mix="group"),
        pacing=Pacing(warm_up=4096, max_mean_uses=float("inf")),
    )
    rounds = replace(_base.run, inline_rounds_per_sync=ROUNDS * searchers)
    return replace(_base, replay=replay, run=rounds)


study = Study(
    name="red_team_selection",
    description="Red-teaming: uniform, reward-prioritised and recent data with 1, 2 and 4 searchers' attacks.",
    recipe=_base,
    variants={
        f"{name}-{searchers}": Variant(selected(name, searchers), name)
        for name in SELECTIONS
        for searchers in (1, 2, 4)
    },
    seeds=(0, 1, 2, 3, 4),
    metric=SAMPLED,
    target=0.6,
    baseline="uniform-1",
    divergence_prompts=0,
    plots=(Plot("run.inline_rounds_per_sync", label="rounds of 64 attacks per sync (k = 10)"),),
)
