"""The quickstart with a slow grader: 200 ms for each answer, 16 at once per searcher. A recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tba.evaluation.accuracy import EvaluationSettings
from tba.protocols import Reward
from tba.recipes.quickstart import recipe as quickstart
from tba.tasks.arithmetic import Arithmetic
from tba_lab.delayed import Delayed


@dataclass(frozen=True)
class SlowlyJudged(Arithmetic):
    """Arithmetic behind a judge that takes its time, as a model or a sandbox would."""

    seconds: float = 0.2
    concurrency: int = 16

    def reward(self) -> Reward:
        return Delayed(super().reward(), self.seconds, self.concurrency)


recipe = replace(
    quickstart,
    name="slow_judge",
    description="the quickstart with a judge that takes 200 ms per answer",
    task=SlowlyJudged(digits=3, forgotten_carries=0.55),
    evaluation=EvaluationSettings(every=20, problems=192, greedy=False, chunk=192),
)
