"""Gold win rate against what it costs (the paper's Figure 4): KL and perplexity, over beta, on TL;DR.

Every objective is trained on the proxy's score, two updates off with half of the groups from old data, one round of
answers for each update. Where beta is small the proxy's score goes on rising and the gold model's wins do not: over-
optimisation. Online DPO's beta is in its logistic's unit, the others' in units of the proxy's score.

The data are files: `--task.path`, `--task.reward-model`, `--task.gold` and `--model.path` (docs/preference.md).
"""

from __future__ import annotations

from tba.evaluate.accuracy import SAMPLED
from tba.recipes.tldr_small import recipe
from tba.studies._base import objectives, stale, with_objective
from tba.study import Against, Study, Variant

COMPARED = ("tb", "online-dpo", "ppo", "rloo", "prox-rloo")
BETAS = (1.0, 0.3, 0.1, 0.03)

study = Study(
    name="summaries",
    description="Gold win rate over KL and perplexity, each objective over beta; trained on a proxy, two updates off.",
    recipe=recipe,
    variants={
        f"{name}-{beta:g}": Variant(stale(with_objective(recipe, objectives(beta)[name]), 2, 0.5, 1.0), name)
        for name in COMPARED
        for beta in BETAS
    },
    columns=(SAMPLED, "reward", "kl", "perplexity", "perplexity_with_prompt", "answer_tokens", "lag", "ess"),
    against=(
        Against("kl", label="KL to the reference, nats an answer"),
        Against("perplexity", label="perplexity under the reference, per token of an answer"),
        Against("kl", y="reward", label="KL to the reference, nats an answer"),
    ),
    divergence_prompts=200,
    divergence_samples=2,
)
