"""Off-policy correction against none, at k = 10 and half of the groups from old data.

Truncated importance weights by token and by sequence, relative to the log-probabilities stored when sampling, with
Trajectory Balance (which needs none) and with policy gradients; each is compared with the on-policy run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tba.objectives.grpo import Grpo
from tba.objectives.policy_gradient import Reinforce
from tba.schedules import Constant
from tba_lab.studies._base import BETA, CORRECTIONS, TARGET, base, stale, synchronous, with_objective
from tba_lab.study import Study, Variant
from tba_lab.tb_forms import CorrectedBalance

_beta = Constant(BETA)
PLAIN: dict[str, Any] = {  # without any correction
    "tb": CorrectedBalance(_beta),
    "reinforce": Reinforce(_beta, baseline="none"),
    "rloo": Reinforce(_beta),
    "grpo": Grpo(_beta, correction=CORRECTIONS["none"]),
}

variants: dict[str, Variant] = {}
for _name, _objective in PLAIN.items():
    variants[f"{_name}-sync"] = Variant(synchronous(with_objective(base, _objective)), _name)
    for _form, _correction in CORRECTIONS.items():
        _recipe = with_objective(base, replace(_objective, correction=_correction))
        variants[f"{_name}-{_form}"] = Variant(stale(_recipe, 10, m=0.5), _name)

study = Study(
    name="correction",
    description="Truncated importance weights against none at k = 10, half of the groups from old data.",
    recipe=base,
    variants=variants,
    target=TARGET,
    baseline="{family}-sync",
)
