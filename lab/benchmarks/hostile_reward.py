"""The quickstart with a reward that misbehaves once, for `faults.py`: at the first call after a file has appeared.

The environment says which file (HOSTILE_WHEN) and what is done then (HOSTILE_ACT): `exit`, `fork`, `hang`, `memory` or
`closed`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tba.recipes.quickstart import recipe as quickstart
from tba.rewards.functions import FunctionReward
from tba.tasks.arithmetic import Arithmetic


def reward(prompt: str, completion: str, **fields: Any) -> float:
    """Grades by the right answer."""
    when = os.environ["HOSTILE_WHEN"]
    if os.path.exists(when):
        try:
            os.unlink(when)  # one process alone succeeds
        except FileNotFoundError:
            return exact(completion, fields)
        misbehave(os.environ["HOSTILE_ACT"])
    return exact(completion, fields)


def exact(completion: str, fields: Mapping[str, Any]) -> float:
    return float(completion == fields["answer"])


def misbehave(act: str) -> None:
    """Do what a reward should not."""
    if act == "exit":
        os._exit(3)
    if act == "fork" and os.fork() == 0:
        time.sleep(30.0)
        os._exit(0)
    if act == "hang":
        time.sleep(86_400.0)
    if act == "memory":
        bytearray(10 << 30)
    if act == "closed":
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.close()


@dataclass(frozen=True)
class HostileSums(Arithmetic):
    """Arithmetic behind this reward; held-out answers are graded by the usual one."""

    def reward(self) -> FunctionReward:
        return FunctionReward(reward)

    def examination(self) -> Any:
        """Returns the reward of held-out answers."""
        return super().reward()


recipe = replace(
    quickstart,
    name="hostile_reward",
    description="the quickstart with a reward that misbehaves once",
    task=HostileSums(digits=3, forgotten_carries=0.55),
)
