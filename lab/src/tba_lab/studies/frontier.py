"""Reward against the distance to the reference that it takes (the paper's Figure 4), over beta.

All objectives pull towards the same reference: Trajectory Balance and TBA' by their residual, RLOO and PPO in the
reward, GRPO and Dr. GRPO in the loss, Online DPO by its logistic, whose beta has another unit.
"""

from __future__ import annotations

from tba_lab.studies._base import TARGET, base, objectives, stale, with_objective
from tba_lab.study import Plot, Study, Variant

BETAS = (0.4, 0.2, 0.1, 0.05, 0.02, 0.01)
COMPARED = ("tb", "tb-robust", "tba-prime", "rloo", "grpo", "dr-grpo", "ppo", "online-dpo")

study = Study(
    name="frontier",
    description="Held-out reward over KL to the reference, each objective over beta; k = 2.",
    recipe=base,
    variants={
        f"{name}-{beta:g}": Variant(stale(with_objective(base, objectives(beta)[name]), 2, m=0.95), name)
        for name in COMPARED
        for beta in BETAS
    },
    target=TARGET,
    plots=(
        Plot("objective.beta.value", label="beta"),
        Plot("objective.beta.value", y="kl", label="beta"),
    ),
)
