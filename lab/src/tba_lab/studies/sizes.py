"""Three sizes of the policy, each with the same bad habit first: Trajectory Balance asynchronous, in the paper's form
and in the default one, and RLOO on-policy.

The middle one is the shipped base; the others are made once by their warm starts and cached. The smallest needs four
times as many supervised updates before it adds at all.
"""

from __future__ import annotations

from dataclasses import replace

from tba.recipe import Recipe
from tba_lab.studies._base import TARGET, asynchronous, base, model, objectives, synchronous, with_objective
from tba_lab.study import Plot, Study, Variant

# hidden size, inner size, layers; updates in which it learns to add, before it forgets carries
SIZES = {"0.2M": (64, 256, 3, 4000), "0.45M": (96, 384, 3, 1000), "1.6M": (160, 640, 4, 1000)}


def _of_size(recipe: Recipe, hidden_size: int, inner_size: int, layers: int, lessons: int) -> Recipe:
    start = model.warm_start
    assert start is not None
    scratch = replace(start.scratch, hidden_size=hidden_size, ff_size=inner_size, layers=layers)
    lessons_before = tuple(replace(b, settings=replace(b.settings, steps=lessons)) for b in start.before)
    return replace(recipe, model=replace(model, warm_start=replace(start, scratch=scratch, before=lessons_before)))


variants: dict[str, Variant] = {}
for _size, _shape in SIZES.items():
    _sized = _of_size(base, *_shape)
    for _name in ("tb", "tb-robust"):
        _asynchronous = asynchronous(with_objective(_sized, objectives()[_name]), 2, m=0.95)
        variants[f"{_name}-{_size}"] = Variant(_asynchronous, _name)
    variants[f"rloo-sync-{_size}"] = Variant(synchronous(with_objective(_sized, objectives()["rloo"])), "rloo-sync")

study = Study(
    name="sizes",
    description="Three sizes of the policy: two forms of Trajectory Balance asynchronous, RLOO on-policy.",
    recipe=base,
    variants=variants,
    target=TARGET,
    plots=(
        Plot("model.warm_start.scratch.hidden_size", label="hidden size"),
        Plot("model.warm_start.scratch.hidden_size", y="seconds_to_target", label="hidden size"),
    ),
)
