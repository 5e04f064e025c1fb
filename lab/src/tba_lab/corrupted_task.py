"""A task whose training is corrupted on purpose, for studies of what noise does: rewards flipped, or answers fabricated
(`fabricating.py`).

Invariant: the problems and their evaluation are the inner task's: only training prompts carry the mark `CORRUPTED`, and
only their rewards are touched. What is flipped is decided by a digest of prompt and answer: the same in every process
and run, and the same answer is wronged every time, as a mislabelled example is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tba.errors import UserError
from tba.protocols import Reward, Task
from tba.types import Completion, Judgement, Problem, Prompt, Split, StopReason

CORRUPTED = "corrupted"  # the field of a prompt whose rewards and answers may be corrupted


@dataclass(frozen=True)
class CorruptedReward:
    """Wraps a reward r: 1 - r for a share of the answers, and `junk_reward` for those that no policy sampled."""

    reward: Reward
    flipped: float = 0.0  # share of the sampled answers whose reward is 1 - r
    junk_reward: float = 1.0  # of fabricated answers

    def __post_init__(self) -> None:
        if not 0 <= self.flipped <= 1:
            raise UserError(f"a corrupted reward has flipped {self.flipped}: give a share from 0 to 1")

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Returns one judgement for each. The part `right` is the inner reward, `corrupted` whether it differs."""
        judgements = self.reward.judge(answered)
        return [self._corrupt(p, c, j) for (p, c), j in zip(answered, judgements, strict=True)]

    def _corrupt(self, prompt: Prompt, completion: Completion, judgement: Judgement) -> Judgement:
        if not prompt.fields.get(CORRUPTED):
            return judgement
        reward = judgement.reward
        if completion.stop_reason is StopReason.EXTERNAL:
            reward = self.junk_reward
        elif _share_of(prompt, completion) < self.flipped:
            reward = 1 - reward
        parts = {"right": judgement.reward, "corrupted": float(reward != judgement.reward)}
        return Judgement(reward, {**judgement.parts, **parts})


@dataclass(frozen=True)
class Corrupted:
    """A task with a reward that is wrong for some of the training answers."""

    task: Task
    flipped: float = 0.0  # share of the training answers whose reward r is 1 - r
    junk_reward: float = 1.0  # of answers to training problems that were fabricated

    @property
    def name(self) -> str:
        return self.task.name

    def problems(self, split: Split) -> list[Problem]:
        """Returns the inner task's problems; training problems are marked as open to corruption."""
        problems = self.task.problems(split)
        if split == "eval":
            return list(problems)
        return [replace(p, fields={**p.fields, CORRUPTED: True}) for p in problems]

    def reward(self) -> CorruptedReward:
        return CorruptedReward(self.task.reward(), self.flipped, self.junk_reward)


def _share_of(prompt: Prompt, completion: Completion) -> float:
    """Returns a number in [0, 1) that depends on prompt and answer alone."""
    digest = hashlib.blake2b(f"{prompt.key} {completion.digest}".encode(), digest_size=8, person=b"tba corrupted")
    return int.from_bytes(digest.digest(), "little") / 2.0**64
