"""Numbers that change with the optimizer step: beta's anneals, and the shapes of the learning rate.

Invariant: steps count from 1, as the paper's do: `schedule(1)` is what the first update uses, `schedule(n)` the n-th,
with n - 1 updates behind it. Every schedule is a frozen pure function, defined for all steps >= 1 (asking for less
raises `ValueError`), and each anneal is monotone, so that its first and its last value bound it.
Standard library only, a leaf next to `batch`: objectives and the optimizer both import it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

from tba.errors import UserError
from tba.fields import as_declared


@dataclass(frozen=True)
@as_declared
class Constant:
    """Gives one value at every step."""

    value: float  # the value at every step

    def __post_init__(self) -> None:
        _require_finite("Constant", value=self.value)

    def __call__(self, step: int) -> float:
        _updates_before(step)
        return self.value

    @property
    def last(self) -> float:
        """Returns the value that the schedule ends at."""
        return self.value


@dataclass(frozen=True)
@as_declared
class Linear:
    """`start` at step 1, a straight line to `end` at step `steps` + 1, `end` from there on."""

    start: float  # the value at step 1
    end: float  # the value in the end
    steps: int  # updates from start to end

    def __post_init__(self) -> None:
        _require_finite("Linear", start=self.start, end=self.end)
        _require_at_least("Linear", 1, steps=self.steps)

    def __call__(self, step: int) -> float:
        progress = min(_updates_before(step) / self.steps, 1.0)
        return (1 - progress) * self.start + progress * self.end  # exact at both ends

    @property
    def last(self) -> float:
        """Returns the value that the schedule ends at."""
        return self.end


@dataclass(frozen=True)
@as_declared
class LinearThenCut:
    """The first part of `Linear(start, end, target_steps)`, then abruptly `end` from step `cut_step` on.

    The paper's TL;DR anneal: the cut is on purpose, it spends at once the distance to the reference that is left.
    """

    start: float  # the value at step 1
    end: float  # the value in the end
    target_steps: int  # updates the line would take from start to end
    cut_step: int  # the first step at `end`

    def __post_init__(self) -> None:
        _require_finite("LinearThenCut", start=self.start, end=self.end)
        _require_at_least("LinearThenCut", 1, target_steps=self.target_steps, cut_step=self.cut_step)

    def __call__(self, step: int) -> float:
        if _updates_before(step) + 1 >= self.cut_step:
            return self.end
        return Linear(self.start, self.end, self.target_steps)(step)

    @property
    def last(self) -> float:
        """Returns the value that the schedule ends at."""
        return self.end


Schedule: TypeAlias = Constant | Linear | LinearThenCut


def gsm8k_anneal(start: float = 0.012) -> Linear:
    """Returns the paper's beta on GSM8K: `start` to 0.004 over 500 steps (Table 2; 0.014 for its 700-step run)."""
    return Linear(start, 0.004, 500)


def tldr_anneal(steps: int = 256) -> LinearThenCut:
    """Returns the paper's beta on TL;DR: a line from 1 to 0.05 over half of the run's `steps`, cut off at an eighth."""
    return LinearThenCut(1.0, 0.05, target_steps=max(steps // 2, 1), cut_step=max(-(-steps // 8), 1))


# Learning-rate shapes: multipliers of the peak rate, in [0, 1]. Warm-up counts the update that is being made and decay
# those behind it, so that no update within the planned steps has the rate 0 (unless `final` is reached). A run that is
# longer than its shape is planned for is refused, or the shape made to last as long (`lasting`).


@dataclass(frozen=True)
@as_declared
class WarmupConstant:
    """A linear rise over `warmup` updates (step n has n / warmup), then the peak.

    Without a rise the first updates, whose moments are of a few batches, are as large as any: on a task of one's own
    they have cost a third of the accuracy within six of them.
    """

    warmup: int = 30  # updates of the rise; 0: none

    def __post_init__(self) -> None:
        _require_at_least("WarmupConstant", 0, warmup=self.warmup)

    def __call__(self, step: int) -> float:
        return warmup_share(step, self.warmup)

    @property
    def planned(self) -> None:
        """Returns None, because the schedule has no end."""

    def lasting(self, steps: int) -> WarmupConstant:
        """Returns the schedule itself, which lasts as long as any run."""
        return self


@dataclass(frozen=True)
@as_declared
class _WarmupDecay:
    """A linear rise, then a decay to `final` that lasts for the rest of `steps`."""

    steps: int  # updates in all, warm-up included
    warmup: int = 0  # updates of the rise
    final: float = 0.0  # share of the peak after `steps`

    def __post_init__(self) -> None:
        _require_decay(type(self).__name__, self.steps, self.warmup, self.final)

    def __call__(self, step: int) -> float:
        decay_left = self._decay_left(_progress(step, self.warmup, self.steps - self.warmup))
        return warmup_share(step, self.warmup) * (self.final + (1 - self.final) * decay_left)

    def _decay_left(self, progress: float) -> float:
        return 1 - progress

    @property
    def planned(self) -> int:
        """Returns the number of updates that the schedule is made for."""
        return self.steps

    def lasting(self, steps: int) -> Self:
        """Returns the schedule's shape over another number of updates."""
        return replace(self, steps=steps, warmup=_scaled_part(self.warmup, self.steps, steps))


class WarmupLinear(_WarmupDecay):
    """A linear rise, then a straight line to `final`."""


class WarmupCosine(_WarmupDecay):
    """A linear rise, then half a cosine to `final`."""

    def _decay_left(self, progress: float) -> float:
        return _half_cosine(progress)


@dataclass(frozen=True)
@as_declared
class WarmupStableDecay:
    """A linear rise, a plateau, then half a cosine to `final` (WSD; the paper's GSM8K run is 50/450/500)."""

    warmup: int = 50  # updates of the rise
    stable: int = 450  # updates at the peak
    decay: int = 500  # updates of the decay
    final: float = 0.0  # share of the peak after the decay

    def __post_init__(self) -> None:
        _require_at_least("WarmupStableDecay", 0, warmup=self.warmup, stable=self.stable)
        _require_decay("WarmupStableDecay", self.planned, self.warmup + self.stable, self.final)

    def __call__(self, step: int) -> float:
        decay_left = _half_cosine(_progress(step, self.warmup + self.stable, self.decay))
        return warmup_share(step, self.warmup) * (self.final + (1 - self.final) * decay_left)

    @property
    def planned(self) -> int:
        """Returns the number of updates that the schedule is made for."""
        return self.warmup + self.stable + self.decay

    def lasting(self, steps: int) -> WarmupStableDecay:
        """Returns the schedule's shape over another number of updates."""
        warmup, decay_start = (_scaled_part(n, self.planned, steps) for n in (self.warmup, self.warmup + self.stable))
        return replace(self, warmup=warmup, stable=decay_start - warmup, decay=steps - decay_start)


RateShape: TypeAlias = WarmupConstant | WarmupLinear | WarmupCosine | WarmupStableDecay


def _updates_before(step: int) -> int:
    """Returns how many updates were made before `step`."""
    if step < 1:
        raise ValueError(f"steps count from 1 (the first update), but got step {step}")
    return step - 1


def warmup_share(step: int, warmup: int) -> float:
    """Returns the share of the peak at update number `step`, after a linear rise over `warmup` updates."""
    return min((_updates_before(step) + 1) / warmup, 1.0) if warmup else 1.0


def _progress(step: int, decay_start: int, decay: int) -> float:
    """Returns the progress of a decay: 0 up to `decay_start` updates, then a linear rise to 1 over `decay` updates."""
    return min(max(_updates_before(step) - decay_start, 0) / decay, 1.0)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _scaled_part(part: int, total: int, new_total: int) -> int:
    return round(part / total * new_total)


def _require_finite(schedule: str, **values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise UserError(f"{schedule}: {name} is {value}, but it has to be a finite number; give one.")


def _require_at_least(schedule: str, minimum: int, **values: int) -> None:
    for name, value in values.items():
        if value < minimum:
            raise UserError(f"{schedule}: {name} is {value}, but it counts steps; give {minimum} or more.")


def _require_decay(schedule: str, n: int, start: int, final: float) -> None:
    _require_at_least(schedule, 0, warmup=start)
    if n <= start:
        raise UserError(f"{schedule}: {n} steps in all leave none to decay after the first {start}; give more steps.")
    if not 0 <= final <= 1:
        raise UserError(f"{schedule}: final is {final}, but it is a share of the peak rate; give a number from 0 to 1.")
