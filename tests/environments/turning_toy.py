"""The enumerable toy in three turns: after each of the policy's symbols the world says one of its own.

    python -m tba train tests/environments/turning_toy.py

An answer is a string over four symbols, as in the plain toy, of which every other one is an observation: 85 plays for
each of two prompts, among 1,365 strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tba.environments.task import EnvironmentReward
from tba.evaluation.accuracy import EvaluationSettings
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Environment
from tba.recipe import Recipe
from tba.record.recorder import RecordSettings
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.rollout.exploration import Fixed
from tba.schedules import Constant, WarmupCosine
from tba.training.optimizer import OptimizerSettings
from tba.types import Problem, Split
from toy.model import TabularModel
from toy.policy import EOS, TabularPolicy, TabularTask

SYMBOLS = "ABCD"


class Turning:
    """Says a symbol that the seed and all that was said decide; so is the reward decided, in (0, 1)."""

    def reset(self, seed: int) -> None:
        self.seed, self.said, self.turns = seed, "", 0

    def step(self, text: str) -> str | None:
        self.said += text
        self.turns += 1
        if text == "$" or self.turns == 3:
            return None
        answer = SYMBOLS[int(self._drawn(0) * 4)]
        self.said += answer
        return answer

    def get_reward(self) -> float:
        return self._drawn(1)

    def _drawn(self, what: int) -> float:
        return float(np.random.default_rng([self.seed, what, *self.said.encode()]).random())


@dataclass(frozen=True)
class TurningTask(TabularTask):
    """Two prompts, each with a world of its own; `shown` random plays of each as demonstrations."""

    length: int = 5
    turns: int = 3
    shown: int = 0

    @property
    def environment(self) -> Callable[[], Environment]:
        return Turning

    def problems(self, split: Split) -> list[Problem]:
        plain = [Problem(str(p.prompt), {}, None, seed) for seed, p in enumerate(super().problems(split))]
        rng = np.random.default_rng(7)
        played = [Problem(p.prompt, {}, self._played(rng), p.seed) for _ in range(self.shown) for p in plain]
        return played or plain

    def reward(self) -> EnvironmentReward:
        return EnvironmentReward()

    def _played(self, rng: np.random.Generator) -> tuple[str, ...]:
        """An agent that knows nothing: every symbol and the end are equally likely."""
        turns = [("$" + SYMBOLS)[int(i)] for i in rng.integers(5, size=3)]
        return tuple(turns[: turns.index("$") + 1] if "$" in turns else turns)


@dataclass(frozen=True)
class Play:
    """All tokens of an episode, which of them are the policy's, and what it is worth."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    reward: float


def plays(make: Callable[[], Environment], seed: int, turns: tuple[int, ...] = ()) -> Iterator[Play]:
    """Every episode of a world that begins with these turns."""
    environment = make()
    environment.reset(seed=seed)
    tokens: list[int] = []
    mask: list[bool] = []
    over = False
    for turn in turns:
        answer = environment.step("$" if turn == EOS else SYMBOLS[turn - 1])
        over = answer is None
        heard = [] if answer is None else [1 + SYMBOLS.index(letter) for letter in answer]
        tokens += [turn, *heard]
        mask += [True, *[False] * len(heard)]
    if over:
        yield Play(tuple(tokens), tuple(mask), environment.get_reward())
        return
    for turn in range(5):
        yield from plays(make, seed, (*turns, turn))


def log_probability(policy: TabularPolicy, question: int, play: Play) -> Tensor:
    """log pi(play), float64: the sum over the policy's own tokens."""
    log_NV = (policy.logits_QNV.detach()[question].to(torch.float64) / policy.temperature).log_softmax(-1)
    nodes = [policy.task.outcome(play.tokens[:t]) for t in range(len(play.tokens))]
    return sum(
        (log_NV[node, token] for node, token, own in zip(nodes, play.tokens, play.mask, strict=True) if own),
        log_NV.new_zeros(()),
    )


def distance_to_ideal(
    policy: TabularPolicy, make: Callable[[], Environment], seeds: dict[int, int], beta: float
) -> float:
    """The largest total variation, over questions with the seed of each one's world, between the policy's probability
    of each play and pi* = pi_ref exp(r / beta) / Z.
    """
    reference, worst = TabularPolicy(policy.task, dtype=torch.float64), 0.0
    for question, seed in seeds.items():
        found = list(plays(make, seed))
        p = torch.stack([log_probability(policy, question, play) for play in found]).exp()
        at_first = torch.stack([log_probability(reference, question, play) for play in found])
        star = (at_first + torch.tensor([play.reward for play in found]) / beta).softmax(0)
        assert abs(float(p.sum()) - 1) < 1e-6
        worst = max(worst, float((p - star).abs().sum() / 2))
    return worst


task = TurningTask()
recipe = Recipe(
    name="turning_toy",
    description="an enumerable toy in three turns",
    task=task,
    model=TabularModel(task),
    objective=TrajectoryBalance(beta=Constant(0.25), off_policy="exact"),
    exploration=Fixed(temperature=1e6),
    optimizer=OptimizerSettings(lr=0.1, schedule=WarmupCosine(250)),
    replay=ReplaySettings(
        selection=RecencyReward(m=0.5, inverse_temperature=0.0),
        pacing=Pacing(warm_up=100, max_mean_uses=16.0),
        buffer=BufferSettings(deduplicate=False),
    ),
    evaluation=EvaluationSettings(every=0, problems=0),
    record=RecordSettings(tensorboard=False, samples_per_batch=0),
    steps=250,
    groups_per_step=4,
    group_size=32,
    samples_per_prompt=32,
    prompts_per_round=2,
    sync_every=20,
)
