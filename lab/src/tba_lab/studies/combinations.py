"""The default form joined with other remedies for stale data, on sums: clipping by answer, a pull to the weights that
sampled, steps scaled by the effective sample size. (A decayed rate is in all of them; averaged weights: `averaged`.)

As `stability`: half of the groups old, 400 updates, k = 10 at the common rate and at three times it, k = 64.
"""

from __future__ import annotations

from tba.protocols import Objective
from tba.schedules import Constant
from tba_lab.studies._base import BETA, TARGET, stale, with_objective, with_rate
from tba_lab.studies.stability import RATE
from tba_lab.studies.stability import study as stability
from tba_lab.study import Study, Variant
from tba_lab.tb_forms import RemediedBalance

_beta = Constant(BETA)
_forms: dict[str, Objective] = {
    "alone": RemediedBalance(_beta),
    "clip": RemediedBalance(_beta, clip=0.2),
    "trust": RemediedBalance(_beta, trust=BETA),
    "ess": RemediedBalance(_beta, by_ess=True),
}
_cells = (("k10", 10, RATE), ("k64", 64, RATE), (f"k10-{3 * RATE:g}", 10, 3 * RATE))

study = Study(
    name="combinations",
    description="The default form with clipping, a trust region, steps by ESS; stale, at two rates: ends and falls.",
    recipe=stability.recipe,
    variants={
        f"{name}-{cell}": Variant(stale(with_rate(with_objective(stability.recipe, form), lr), k, m=0.5), name)
        for name, form in _forms.items()
        for cell, k, lr in _cells
    },
    seeds=(0, 1, 2),
    target=TARGET,
    baseline="alone-k10",
    margin=0.015,
    divergence_prompts=0,
)
