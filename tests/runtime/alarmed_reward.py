"""The toy with a reward that limits its own time by `signal.alarm`, as grading libraries do: it gives 0 to every answer
where it cannot.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tba
from tba.settings import find
from tba.types import Problem, Split
from toy.policy import TabularTask


def alarmed(completion: str) -> float:
    try:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(10)
        signal.alarm(0)
    except Exception:  # noqa: BLE001 - as such libraries do
        return 0.0
    return 1.0 + len(completion) / 10


@dataclass(frozen=True)
class Task:
    name: str = "tabular"

    def problems(self, split: Split) -> Sequence[Problem]:
        return TabularTask().problems(split)

    def reward(self) -> tba.FunctionReward:
        return tba.FunctionReward(alarmed)


recipe = replace(find(str(Path(__file__).parents[1] / "toy" / "recipe.py")), task=Task())
