"""Which form of Trajectory Balance stays stable on stale data: the first stage, many forms on sums.

k = 10 and half of the groups old, 200 updates at the quickstart's rate, at three times it and at ten times it.
On-policy every weight of these forms is 1, so that they are Trajectory Balance there; only what is not a weight
(`tb-...` of the optimizer, bounds) is run on-policy too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from tba.objectives.correction import Correction
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.schedules import Constant
from tba.training.optimizer import OptimizerSettings
from tba_lab.studies._base import BETA, TARGET, base, objectives, stale, with_objective
from tba_lab.study import Plot, Study, Variant
from tba_lab.tb_forms import CorrectedBalance, QuantileClip, WeightedBalance

RATES = (3e-5, 1e-4, 3e-4)
_OTHERS = ("tb-corrected", "grpo", "ppo", "tba-prime", "tb-learned-z", "reinforce", "raft")

_b = Constant(BETA)
_short = replace(base, evaluation=replace(base.evaluation, every=20, problems=2000, problems_during=500))


def _form(**fields: Any) -> Recipe:
    return with_objective(_short, WeightedBalance(_b, **fields))


def _with_optimizer(recipe: Recipe, **fields: Any) -> Recipe:
    return replace(recipe, optimizer=replace(recipe.optimizer, **fields))


def _quantile(recipe: Recipe, quantile: float) -> Recipe:
    settings = {f.name: getattr(recipe.optimizer, f.name) for f in dataclasses.fields(OptimizerSettings)}
    return replace(recipe, optimizer=QuantileClip(**settings, quantile=quantile))


def _corrected(correction: Correction) -> Recipe:
    return with_objective(_short, CorrectedBalance(_b, correction))


_tb = _form()
_known = objectives()
_forms: dict[str, Recipe] = {
    "tb": _tb,
    **{name: with_objective(_short, _known[name]) for name in _OTHERS},
    "w-ratio": _form(weight="ratio"),
    "w-ratio-norm": _form(weight="ratio", normalised=True),
    "w-ratio-8": _form(weight="ratio", cap=8.0),
    "w-mean-ratio": _form(weight="mean-ratio"),
    "w-root-ratio": _form(weight="root-ratio"),
    "w-taper": _form(weight="taper"),
    "w-untaper": _form(weight="untaper"),
    "w-band": _form(weight="band", floor=0.01),
    "bound-0.5": _form(bound=0.5),
    "huber-1": _form(huber=1.0),
    "ess-loss": _form(by_ess=True),
    "w-ratio-ess": _form(weight="ratio", by_ess=True),
    "log-ratio-5": _form(cap_log_ratio=5.0),
    "clip-median": _quantile(_tb, 0.5),
    "clip-tenth": _quantile(_tb, 0.1),
    "betas-0.95": _with_optimizer(_tb, betas=(0.9, 0.95)),
    "betas-0.99": _with_optimizer(_tb, betas=(0.9, 0.99)),
    "w-ratio-clip": _quantile(_form(weight="ratio"), 0.5),
    "w-ratio-0.95": _with_optimizer(_form(weight="ratio"), betas=(0.9, 0.95)),
    "tb-clip-token": _corrected(Correction("clip", "token")),
    "tb-clip-sequence": _corrected(Correction("clip", "sequence")),
    "tb-clamp-token-8": _corrected(Correction("clamp", "token")),
    "w-ratio-8-clip": _quantile(_form(weight="ratio", cap=8.0), 0.5),
    "w-ratio-8-norm": _form(weight="ratio", cap=8.0, normalised=True),
    "w-ratio-8-huber": _form(weight="ratio", cap=8.0, huber=1.0),
    "w-ratio-8-0.95": _with_optimizer(_form(weight="ratio", cap=8.0), betas=(0.9, 0.95)),
    "w-ratio-2": _form(weight="ratio", cap=2.0),
    **{
        f"shift-{a:g}": _form(weight="ratio", cap=8.0, normalised=True, shift=Constant(a))
        for a in (0.25, 0.5, 1.0, 2.0, 4.0)
    },
    "shift-2-cap-1": _form(weight="ratio", normalised=True, shift=Constant(2.0)),
    "shift-1-unnormalised": _form(weight="ratio", cap=8.0, shift=Constant(1.0)),
    "shift-2-plain": _form(shift=Constant(2.0)),
    "shift-1-mean-ratio": _form(weight="mean-ratio", cap=8.0, normalised=True, shift=Constant(1.0)),
    **{f"spread-{a:g}": _form(weight="ratio", cap=8.0, normalised=True, spread=a) for a in (0.5, 1.0, 2.0)},
    "shift-0.5-plain": _form(shift=Constant(0.5)),
    "learned-z-ratio": with_objective(_short, TrajectoryBalance(_b, log_z="learned")),
}
variants = {
    f"{name}-{lr:g}": Variant(stale(_with_optimizer(recipe, lr=lr), 10, m=0.5), name)
    for name, recipe in _forms.items()
    for lr in RATES
}

study = Study(
    name="stable",
    description="Forms of Trajectory Balance on stale data (k = 10, half of the groups old) at three rates.",
    recipe=_short,
    variants=variants,
    seeds=(100, 101, 102),
    target=TARGET,
    divergence_prompts=0,
    plots=(Plot("optimizer.lr", label="learning rate"),),
)
