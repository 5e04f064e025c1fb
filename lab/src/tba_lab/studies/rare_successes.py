"""Which data to learn from where success is rare: uniform, by reward or recent only, x 1, 2 and 4 searchers.

Sums of five digits with at least four carries, and a base that forgets half of the carries, so that three answers in a
hundred are right. Each prompt gets 70 answers, some twenty of them different, and a group has eight, all different:
`uniform` and `reward` draw groups from all data and differ in how they choose among the answers to a prompt; `recency`
takes the newest. Runs take turns in one process, with a round of 140 answers for each update and each searcher, so that
only the settings decide how much data there is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tba.evaluation.accuracy import EvaluationSettings
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.schedules import Constant, WarmupStableDecay
from tba.tasks.arithmetic import Arithmetic
from tba.types import Problem, Split
from tba_lab.studies._base import BETA, base, model, more_answers, with_replay
from tba_lab.study import Plot, Study, Variant

DIGITS, LEAST = 5, 4  # digits of a number, carries of a sum
K = 2  # updates between two versions of the weights
SELECTIONS = {"uniform": (0.0, 0.0), "reward": (0.0, 3.0), "recency": (1.0, 0.0)}  # m, inverse temperature


@dataclass(frozen=True)
class Carrying(Arithmetic):
    """Sums with at least four carries."""

    @property
    def name(self) -> str:
        return "carrying"

    def problems(self, split: Split) -> list[Problem]:
        """Those of `Arithmetic` that have them, in its order."""
        return [p for p in super().problems(split) if _carries(*map(int, str(p.prompt)[:-1].split("+"))) >= LEAST]


def _carries(a: int, b: int) -> int:
    return sum(a % 10**place + b % 10**place >= 10**place for place in range(1, DIGITS + 1))


assert model.warm_start is not None
_base = more_answers(
    replace(
        base,
        task=Carrying(digits=DIGITS, forgotten_carries=0.55, eval_problems=5000),
        model=replace(
            model,
            generation=replace(model.generation, max_completion_tokens=DIGITS + 3),
            warm_start=replace(model.warm_start, shipped=None),
        ),
        objective=TrajectoryBalance(Constant(BETA)),
        groups_per_step=17,
        group_size=8,
        runtime="inline",
        sync_every=K,
        steps=240,
        optimizer=replace(base.optimizer, lr=1e-4, schedule=WarmupStableDecay(20, 160, 60)),
        evaluation=EvaluationSettings(
            every=20, problems=2000, problems_during=500, greedy=False, samples=2, pass_k=0, batch_size=500
        ),
        replay=ReplaySettings(pacing=Pacing(warm_up=280, max_mean_uses=2.0), buffer=BufferSettings(deduplicate=True)),
    )
)


def scaled(recipe: Recipe, searchers: int) -> Recipe:
    """Returns the recipe with the rounds that so many searchers make in the time of K updates."""
    return replace(recipe, run=replace(recipe.run, inline_rounds_per_sync=K * searchers))


study = Study(
    name="rare_successes",
    description="Rare successes: uniform, reward-prioritised and recent data with 1, 2 and 4 searchers' answers.",
    recipe=_base,
    variants={
        f"{name}-{searchers}": Variant(scaled(with_replay(_base, m, tau), searchers), name)
        for name, (m, tau) in SELECTIONS.items()
        for searchers in (1, 2, 4)
    },
    seeds=(0, 1, 2, 3, 4),
    target=0.5,
    baseline="uniform-1",
    divergence_prompts=0,
    plots=(Plot("run.inline_rounds_per_sync", label="rounds of 140 answers per sync (k = 2)"),),
)
