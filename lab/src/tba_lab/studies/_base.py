"""What the studies on the quickstart's sums have in common: the recipe, and the objectives with comparable settings.

Invariant: every objective gets the same model, data, batch, optimizer and pull to the reference; all differences are in
`objectives` below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace
from tba.objectives.correction import Correction
from tba.objectives.grpo import Grpo, dr_grpo
from tba.objectives.online_dpo import OnlineDpo
from tba.objectives.policy_gradient import Reinforce, proximal_rloo
from tba.objectives.ppo import Ppo
from tba.objectives.raft import Raft
from tba.objectives.subtrajectory_balance import SubtrajectoryBalance
from tba.objectives.tba_prime import TbaPrime
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.recipe import Recipe
from tba.recipes.quickstart import recipe as quickstart
from tba.record.recorder import RecordSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.schedules import Constant, WarmupStableDecay
from tba.tasks.arithmetic import Arithmetic
from tba_lab.study import Variant
from tba_lab.tb_forms import CorrectedBalance, lowered

TARGET = 0.80  # sampled accuracy; the base begins at about a third
BETA = 0.05  # the quickstart's, in units of reward; one optimum for all with the pull in the reward (docs/method.md)

assert isinstance(quickstart.task, Arithmetic)
assert isinstance(quickstart.model, HuggingFace)
task, model = replace(quickstart.task, eval_problems=5000), quickstart.model

# The quickstart in fewer steps, in the shape that it had when these studies began (7 prompts x 20 answers, a rate of
# 3e-5, no averaged weights), evaluated on 5,000 problems before and after, on 500 every 50 steps: one answer each.
base = replace(
    quickstart,
    task=task,
    objective=TrajectoryBalance(Constant(BETA), off_policy="none"),  # the paper's form
    steps=200,
    groups_per_step=7,
    group_size=20,
    samples_per_prompt=20,
    prompts_per_round=7,
    optimizer=replace(quickstart.optimizer, lr=3e-5, schedule=WarmupStableDecay(20, 130, 50), weight_average=False),
    evaluation=EvaluationSettings(every=50, problems=5000, problems_during=500, greedy=False, pass_k=0, batch_size=500),
    record=RecordSettings(tensorboard=False, samples_per_batch=0),
    replay=replace(quickstart.replay, pacing=Pacing(warm_up=280)),  # what is made before the clock starts is a gift
)

CORRECTIONS = {
    "none": Correction(),
    "token": Correction("truncate", "token"),
    "sequence": Correction("truncate", "sequence"),
}


def objectives(beta: float = BETA) -> dict[str, Objective]:
    """Returns the objectives with the pull `beta` in units of reward. Online DPO has it in its own unit; RAFT has none.

    `tb`: the paper's form. `tb-weighted`: with weights. `tb-asymmetric`: the default. `tb-robust`: the default
    before noise was measured. `tb-corrected`: an earlier form, with
    weights that log Z does not have.
    """
    b = Constant(beta)
    return {
        "tb": TrajectoryBalance(b, off_policy="none"),
        "tb-weighted": TrajectoryBalance(b, off_policy="exact"),
        "tb-robust": lowered(b),
        "tb-asymmetric": TrajectoryBalance(b),
        "tb-corrected": CorrectedBalance(b, Correction("truncate", "sequence", cap=1.0)),
        "tba-prime": TbaPrime(b),
        "rloo": Reinforce(b),
        "grpo": Grpo(b),
        "dr-grpo": dr_grpo(b),
        "ppo": Ppo(b),
        "online-dpo": OnlineDpo(b),
        "prox-rloo": proximal_rloo(b),
        "reinforce": Reinforce(b, baseline="none"),
        "raft": Raft(),
        "tb-learned-z": TrajectoryBalance(b, log_z="learned", off_policy="none"),
        "subtb": SubtrajectoryBalance(b),
    }


@dataclass(frozen=True)
class Rates:
    """The best learning rates of an objective among those that `tuning` tries."""

    on_policy: float
    stale: float  # at k = 10, half of the groups old


# Measured by `tuning` (lab/results.md). RLOO as it is here is Trajectory Balance, update by update.
RATES = {
    "tb": Rates(1e-4, 3e-5),
    "tb-weighted": Rates(1e-4, 1e-4),
    "tb-robust": Rates(1e-4, 1e-4),
    "tb-asymmetric": Rates(1e-4, 1e-4),
    "tb-corrected": Rates(1e-4, 1e-4),
    "tba-prime": Rates(1e-4, 1e-4),
    "rloo": Rates(1e-4, 3e-5),
    "grpo": Rates(1e-4, 1e-4),
    "dr-grpo": Rates(1e-4, 1e-4),
    "ppo": Rates(1e-4, 1e-4),
    "online-dpo": Rates(1e-4, 3e-5),
    "prox-rloo": Rates(1e-4, 1e-4),
    "reinforce": Rates(1e-4, 1e-4),
    "raft": Rates(1e-4, 1e-4),
    "tb-learned-z": Rates(1e-4, 1e-4),
    "subtb": Rates(1e-4, 1e-4),
}


def with_objective(recipe: Recipe, objective: Objective) -> Recipe:
    return replace(recipe, objective=objective)


def with_replay(recipe: Recipe, m: float, inverse_temperature: float = 0.0) -> Recipe:
    """Returns the recipe with another share of recent groups and another reward priority for the others."""
    return replace(recipe, replay=replace(recipe.replay, selection=RecencyReward(m, inverse_temperature)))


def more_answers(recipe: Recipe) -> Recipe:
    """Returns the recipe with 70 answers to each of two prompts in a round, so that a group of 20 is a choice."""
    return replace(recipe, samples_per_prompt=70, prompts_per_round=2)


def with_rate(recipe: Recipe, lr: float) -> Recipe:
    return replace(recipe, optimizer=replace(recipe.optimizer, lr=lr))


def asynchronous(recipe: Recipe, k: int, m: float) -> Recipe:
    """Returns the recipe in processes: weights every k updates, and the share 1 - m of the groups from old data."""
    return replace(with_replay(recipe, m), sync_every=k)


def stale(recipe: Recipe, k: int, m: float, inverse_temperature: float = 0.0) -> Recipe:
    """Returns the recipe with the same staleness in one process that alternates: one round for each update.

    The age of the data then depends only on the settings, not on the machine, so that objectives are compared at equal
    staleness. The studies that run in processes measure what asynchrony costs or saves in time.
    """
    selection, pacing = RecencyReward(m, inverse_temperature), Pacing(warm_up=0, max_mean_uses=1.0)
    replay = replace(recipe.replay, selection=selection, pacing=pacing)
    return replace(recipe, runtime="inline", sync_every=k, replay=replay)


def by_staleness(recipe: Recipe, objectives_by_name: Mapping[str, Objective]) -> dict[str, Variant]:
    """Returns each objective on-policy (`NAME-sync`) and stale, half of the groups old (`NAME-k10`, `NAME-k64`)."""
    variants: dict[str, Variant] = {}
    for name, objective in objectives_by_name.items():
        objective_recipe = with_objective(recipe, objective)
        variants[f"{name}-sync"] = Variant(synchronous(objective_recipe), name)
        for k in (10, 64):
            variants[f"{name}-k{k}"] = Variant(stale(objective_recipe, k, m=0.5), name)
    return variants


def by_rate(recipe: Recipe, objectives_by_name: Mapping[str, Objective], rates: Sequence[float]) -> dict[str, Variant]:
    """Returns each objective stale, at k = 10, at other learning rates than the recipe's (`NAME-k10-RATE`)."""
    return {
        f"{name}-k10-{lr:g}": Variant(stale(with_rate(with_objective(recipe, objective), lr), 10, m=0.5), name)
        for name, objective in objectives_by_name.items()
        for lr in rates
    }


def synchronous(recipe: Recipe) -> Recipe:
    """Returns the recipe on-policy: one process alternates, and every batch is sampled from the weights it updates.

    Repeated answers are kept: without them a round has too few for its groups, and older data would fill these.
    """
    return replace(
        recipe,
        runtime="inline",
        sync_every=1,
        replay=ReplaySettings(
            selection=RecencyReward(m=1.0),
            pacing=Pacing(warm_up=0),
            buffer=replace(recipe.replay.buffer, deduplicate=False),
        ),
    )
