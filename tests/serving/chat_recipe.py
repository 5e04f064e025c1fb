"""A small recipe of chats, for runs whose answers are agents' episodes; its model is given by `--model.path`."""

from collections.abc import Sequence
from dataclasses import dataclass

from tba.engines.transformers import EngineSettings
from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe
from tba.record.recorder import RecordSettings
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.rollout.exploration import Fixed
from tba.schedules import Constant
from tba.training.optimizer import OptimizerSettings
from tba.types import Completion, Judgement, Problem, Prompt


@dataclass(frozen=True)
class EvenTokens:
    """Rewards the share of even tokens."""

    def judge(self, answers: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        return [Judgement(float((completion.tokens % 2 == 0).mean())) for _, completion in answers]


@dataclass(frozen=True)
class Chats:
    """Questions of one message each."""

    name: str = "chats"

    def problems(self, split: str) -> list[Problem]:
        sums = range(40) if split == "train" else range(40, 44)
        return [Problem(({"role": "user", "content": f"What is {a} + 1?"},), {"answer": a + 1}) for a in sums]

    def reward(self) -> EvenTokens:
        return EvenTokens()


recipe = Recipe(
    name="chats",
    description="chats of agents",
    task=Chats(),
    model=HuggingFace(device="cpu", generation=EngineSettings(slots=8, max_completion_tokens=200)),
    objective=TrajectoryBalance(beta=Constant(0.05)),
    exploration=Fixed(),
    optimizer=OptimizerSettings(lr=1e-3),
    replay=ReplaySettings(pacing=Pacing(warm_up=4), buffer=BufferSettings(deduplicate=False)),
    evaluation=EvaluationSettings(every=0, problems=0),
    record=RecordSettings(tensorboard=False, samples_per_batch=0),
    steps=4,
    groups_per_step=2,
    group_size=2,
    samples_per_prompt=2,
    prompts_per_round=2,
    searchers=0,
)
