"""The data of preference tuning: their age, the share m of recent groups, and how the other groups are drawn.

- `OBJECTIVE-sync`, `-k2`, `-k16`: on-policy, and 2 and 16 updates between syncs with half of the groups old
- `m-0.4`, `m-0.5`, `m-0.6`: the paper's three, softmax of the reward in the other half, 10 updates off-policy
- `uniform`, `reward`, `recency` x 1 and 2: how groups are drawn with one or two searchers. Two are simulated by one
  that makes twice as many rounds: the same data per update, in one process that alternates.

In the second and third, a round is 32 answers to one post instead of 8 to each of four: as much text, but a group of 8
is a choice.

The data are files, as in `summaries`.
"""

from __future__ import annotations

from dataclasses import replace

from tba.evaluation.estimators import SAMPLED
from tba.recipe import Recipe
from tba_lab.studies._base import synchronous
from tba_lab.studies.summaries import COMPARED, base, off_policy, trained_by
from tba_lab.study import Plot, Study, Variant

BETA = 0.5
SELECTIONS = {"uniform": (0.0, 0.0), "reward": (0.0, 1.0), "recency": (1.0, 0.0)}  # m, inverse temperature


def more_answers(recipe: Recipe) -> Recipe:
    return replace(recipe, samples_per_prompt=32, prompts_per_round=1)


def searchers(recipe: Recipe, count: int) -> Recipe:
    """Returns the recipe with as many rounds as `count` searchers make, if one makes a round in two updates."""
    return replace(recipe, run=replace(recipe.run, inline_rounds_per_sync=count * recipe.sync_every // 2))


variants: dict[str, Variant] = {}
for _name in COMPARED:
    _recipe = trained_by(_name, BETA)
    variants[f"{_name}-sync"] = Variant(synchronous(_recipe), _name)
    for _k in (2, 16):
        variants[f"{_name}-k{_k}"] = Variant(off_policy(_recipe, _k, 0.5), _name)
for _m in (0.4, 0.5, 0.6):
    variants[f"m-{_m:g}"] = Variant(more_answers(off_policy(trained_by("tb", BETA), 10, _m)), "m")
for _name, (_m, _tau) in SELECTIONS.items():
    for _count in (1, 2):
        _recipe = more_answers(off_policy(trained_by("tb", BETA), 10, _m, _tau))
        variants[f"{_name}-{_count}"] = Variant(searchers(_recipe, _count), _name)

study = Study(
    name="summaries_data",
    description="Preference tuning on data of other ages: 2 and 16 updates off, m, selection by one and two searchers.",
    recipe=base,
    variants=variants,
    columns=(SAMPLED, "reward", "kl", "perplexity", "answer_tokens", "lag", "ess", "uses"),
    plots=(
        Plot("lag", label="mean lag", families=tuple(COMPARED)),
        Plot("kl", label="KL to the reference, nats an answer"),
    ),
    divergence_prompts=153,
    divergence_samples=4,
)
