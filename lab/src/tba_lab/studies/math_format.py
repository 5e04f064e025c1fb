r"""TBA', Dr. GRPO and GRPO, 2 and 10 updates off-policy, on problems in MATH's format: accuracy and stability.

The problems are sums in the format of MATH and graded like it (`boxed_sums`); the base (0.46 M parameters, made on the
first run and cached) forgets carries, as the quickstart's does. Groups are recent only and used once, and TBA' has
resets of its reference, as in the paper's MATH run. `largest fall` measures instability: how far a run fell below its
best.
"""

from __future__ import annotations

from dataclasses import replace

from tba.engines.transformers import EngineSettings
from tba.recipe import Recipe
from tba_lab.boxed_sums import BoxedSums
from tba_lab.studies._base import RATES, TARGET, model, objectives, stale, with_objective, with_rate
from tba_lab.studies._base import base as sums
from tba_lab.study import Plot, Study, Variant

COMPARED = ("tba-prime", "dr-grpo", "grpo")
UPDATES = (2, 10)  # between syncs
RESET = 50  # updates between two resets of TBA's reference

assert model.warm_start is not None
base = replace(
    sums,
    task=BoxedSums(eval_problems=2000, forgotten_carries=0.55),
    model=replace(
        model,
        generation=EngineSettings(slots=160, max_completion_tokens=24),
        warm_start=replace(model.warm_start, scratch=replace(model.warm_start.scratch, max_positions=64), shipped=None),
    ),
    evaluation=replace(sums.evaluation, every=20, problems=2000, problems_during=500),
)


def _variant(name: str, k: int) -> Recipe:
    recipe = stale(with_rate(with_objective(base, objectives()[name]), RATES[name].stale), k, m=1.0)
    return replace(recipe, reference_reset=RESET) if name == "tba-prime" else recipe


study = Study(
    name="math_format",
    description="TBA', Dr. GRPO and GRPO, 2 and 10 updates off-policy, on sums in the format of MATH.",
    recipe=base,
    variants={f"{name}-k{k}": Variant(_variant(name, k), name) for name in COMPARED for k in UPDATES},
    target=TARGET,
    baseline="dr-grpo-k2",
    plots=(Plot("sync_every", label="updates per sync (k)"), Plot("sync_every", y="fall", label="k")),
)
