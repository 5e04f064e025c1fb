"""Gold win rate against KL and perplexity, over beta, on TL;DR (the paper's Figure 4).

Every objective is trained on the proxy's score, two updates off-policy with half of the groups from old data, each
answer used twice on average. If beta is small, the proxy's score may keep rising while the gold model's win rate does
not: over-optimisation, which `pushed` looks for (hardly any pull, five times the rate). Online DPO's beta is in the
unit of its logistic, the others' in units of the proxy's score. Trajectory Balance has the truncated weights of
`tldr_small`.

The data are files: `--task.path`, `--task.reward-model`, `--task.gold` and `--model.path` (docs/preference.md).
"""

from __future__ import annotations

from dataclasses import replace

from tba.evaluation.estimators import SAMPLED
from tba.recipe import Recipe
from tba.recipes.tldr_small import recipe
from tba.replay.pacing import Pacing
from tba.schedules import WarmupLinear
from tba_lab.studies._base import objectives, stale, with_objective, with_rate
from tba_lab.study import Plot, Study, Variant

STEPS = 200
COMPARED = {"tb": "tb-corrected", "online-dpo": "online-dpo", "ppo": "ppo", "rloo": "rloo", "prox-rloo": "prox-rloo"}
BETAS = (2.0, 0.5, 0.1)
PUSHED_BETA, PUSHED_RATE = 0.02, 5e-4

base = replace(
    recipe,
    steps=STEPS,
    optimizer=replace(recipe.optimizer, schedule=WarmupLinear(STEPS, 10)),
    replay=replace(recipe.replay, buffer=replace(recipe.replay.buffer, deduplicate=False)),  # groups of 8 of 8 answers
)


def off_policy(recipe: Recipe, k: int, m: float, inverse_temperature: float = 1.0) -> Recipe:
    """k updates between syncs, the share 1 - m of the groups old, each answer used twice on average."""
    stale_recipe = stale(recipe, k, m, inverse_temperature)
    return replace(stale_recipe, replay=replace(stale_recipe.replay, pacing=Pacing(warm_up=0, max_mean_uses=2.0)))


def trained_by(name: str, beta: float) -> Recipe:
    """Returns `base` with one of the objectives in `COMPARED`."""
    return with_objective(base, objectives(beta)[COMPARED[name]])


frontier = {
    f"{name}-{beta:g}": Variant(off_policy(trained_by(name, beta), 2, 0.5), name) for name in COMPARED for beta in BETAS
}
pushed = {
    f"{name}-pushed": Variant(with_rate(off_policy(trained_by(name, PUSHED_BETA), 2, 0.5), PUSHED_RATE), name)
    for name in ("tb", "ppo")
}

study = Study(
    name="summaries",
    description="Gold win rate over KL and perplexity, each objective over beta; trained on a proxy, two updates off.",
    recipe=base,
    variants=frontier | pushed,
    columns=(SAMPLED, "reward", "kl", "perplexity", "perplexity_with_prompt", "answer_tokens", "lag", "ess"),
    plots=(
        Plot("kl", label="KL to the reference, nats an answer"),
        Plot("perplexity", label="perplexity under the reference, per token of an answer"),
        Plot("kl", y="reward", label="KL to the reference, nats an answer"),
    ),
    divergence_prompts=153,
    divergence_samples=4,
)
