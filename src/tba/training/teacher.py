"""Teachers: other models whose log-probabilities take part in the target, beside the reward and the reference.

Invariant: to an objective a teacher is nothing but another reference. Its log-probabilities are stored with each answer
as they are; weights and schedule enter here, when a batch is trained on.

Shape legend: B rows (one completion each), T completion positions, N teachers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from tba.batch import Batch
from tba.errors import UserError
from tba.fields import BY_CODE, as_declared
from tba.protocols import ScoringModel
from tba.schedules import Constant, Schedule


@dataclass(frozen=True)
@as_declared
class Teacher:
    """Models that are learnt from: the target is pi* = pi_ref^(1 - a) p_1^a1 p_2^a2 ... exp(r / beta) / Z, where a is
    the sum of the weights a1, a2, ...

    That is Trajectory Balance with the reward r + beta sum_i ai (log p_i - log pi_ref). With one teacher, a = 1 and no
    reward the optimum is the teacher itself (on-policy distillation: Agarwal et al. 2024, arXiv 2306.13649); with a
    above 1 it lies beyond the teacher, seen from the reference (arXiv 2602.12125). Like a reference, a teacher scores
    each answer once, whoever wrote it, at the recipe's policy temperature. Raises `UserError` when a field makes no
    sense.
    """

    paths: tuple[str, ...] = ()  # teachers: a folder, a GGUF file, an adapter of PEFT or a Hub name each
    weights: tuple[float, ...] = ()  # of each teacher in the target; empty: they share 1 evenly
    schedule: Schedule = Constant(1.0)  # by step, what all weights are multiplied by
    top: int = 0  # most probable tokens of the teacher whose log-probabilities are stored at each place, for `Distil`
    reward: bool = True  # whether the target contains the reward; if not, it is recorded and evaluated only
    models: tuple[ScoringModel, ...] = field(default=(), metadata=BY_CODE)  # made by code; `paths` replace them

    def __post_init__(self) -> None:
        if self.weights and len(self.weights) != self.count:
            raise UserError(
                f"--teacher.weights are {len(self.weights)}, of {self.count} teachers: give one of each, or none"
            )
        for value in (*self.weights, self.schedule(1), self.schedule.last):
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"a teacher's weight is {value} (--teacher.weights): give a number, 0 or more")
        if self.top < 0:
            raise UserError(f"--teacher.top is {self.top}: give a number of tokens, 0 or more")
        if not self.reward and not self.count:
            raise UserError("--teacher.no-reward leaves nothing to learn from without --teacher.paths: give that too")

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect while there is no teacher."""
        return {} if self.count else dict.fromkeys(("weights", "schedule", "top", "reward"), "paths")

    @property
    def count(self) -> int:
        """Returns how many teachers there are."""
        return len(self.paths or self.models)

    @property
    def is_target(self) -> bool:
        """Returns whether the target is one teacher and nothing else."""
        return self.count == 1 and not self.reward and self.shares(1) == [1.0] and isinstance(self.schedule, Constant)

    @property
    def replaces_reference(self) -> bool:
        """Returns whether the reference's weight in the target, 1 - a, is 0 at every step."""
        return self.count > 0 and isinstance(self.schedule, Constant) and math.isclose(sum(self.shares(1)), 1)

    def shares(self, step: int) -> list[float]:
        """Returns each teacher's weight at optimizer step `step` (from 1)."""
        weights = self.weights or (1 / max(1, self.count),) * self.count
        return [weight * self.schedule(step) for weight in weights]

    def with_teachers(self, batch: Batch, step: int) -> Batch:
        """Returns the batch with the teachers mixed into the reference, sum_i ai log p_i + (1 - a) log pi_ref, and with
        rewards of 0 where they are no part of the target.

        Raises `UserError` when a row has not been scored by as many teachers.
        """
        if not self.count:
            return batch
        log_teacher_BTN = batch.log_teacher_BTN
        if log_teacher_BTN is None or log_teacher_BTN.shape[-1] != self.count:
            raise UserError(
                f"a trajectory of this batch was not scored by the recipe's {self.count} teachers: train it in a run "
                "that had them when it was sampled or imported"
            )
        share_N = torch.tensor(self.shares(step), dtype=torch.float64).to(log_teacher_BTN)
        return replace(
            batch,
            log_reference_BT=(1 - sum(self.shares(step))) * batch.log_reference_BT + log_teacher_BTN @ share_N,
            log_anchor_BT=batch.log_reference_BT,
            log_teacher_BTN=None,
            reward_B=batch.reward_B if self.reward else torch.zeros_like(batch.reward_B),
        )
