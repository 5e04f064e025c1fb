"""A study of the enumerable toy in one process: two variants that learn and one whose loss is not finite."""

from dataclasses import replace

from tba.evaluation.accuracy import EvaluationSettings
from tba_lab.study import Study, Variant
from toy.recipe import recipe as toy

quick = replace(
    toy,
    runtime="inline",
    steps=6,
    evaluation=EvaluationSettings(every=2, problems=2, threshold=0.5),
    groups_per_step=2,
    group_size=4,
    samples_per_prompt=8,
)
study = Study(
    name="toy-study",
    description="How often weights are sent, on the toy.",
    recipe=quick,
    variants={
        "often": Variant(replace(quick, sync_every=1), family="tb"),
        "rarely": ("--sync-every", "3"),
        "broken": ("--optimizer.lr", "1e300", "--optimizer.clip-norm", "None"),
    },
    seeds=(0, 1),
    baseline="often",
    target=0.5,
    divergence_prompts=2,
    divergence_samples=3,
    diversity_prompts=2,
    diversity_samples=4,
)
