"""A controller of staleness: it adjusts the sync interval k and the share m of recent groups.

Invariant: what it does follows from the metrics it was given and from nothing else (no clock, no chance), so that equal
runs are steered equally, and one that continues from its `state` is steered on. All that it adjusts stays within
bounds.

It works like a thermostat. The signal is averaged over spans of `every` updates. A span on the stale side of the range
makes the data fresher by one notch: k is halved and m raised by 0.1. Three spans in a row on the fresh side allow one
notch more staleness: k is doubled and m lowered by 0.1. The span after a change is not judged, since its data still
stem from before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from tba.errors import UserError
from tba.fields import as_declared
from tba.types import Json

Signal: TypeAlias = Literal["none", "ess", "off_policy", "lag", "residual_relative"]
PATIENCE = 3  # spans on the fresh side before anything is loosened
NOTCH = 0.1  # of m


@dataclass(frozen=True)
@as_declared
class Control:
    """Sets which signal is kept in which range by moving `sync_every` and `replay.selection.m`."""

    signal: Signal = "none"  # the metric (of metrics.jsonl) that is kept in range; none: no control
    lower_bound: float = 0.5  # the signal's mean over a span is kept above this
    upper_bound: float = 0.9  # and below this; both defaults are for ess
    every: int = 10  # updates in a span
    most_sync_every: int = 16  # k is kept between 1 and this
    least_m: float = 0.5  # m is kept between this and 1

    def __post_init__(self) -> None:
        if not self.lower_bound < self.upper_bound:
            bounds = f"--control.lower-bound is {self.lower_bound} and --control.upper-bound {self.upper_bound}"
            raise UserError(f"{bounds}: give a range")
        for name in ("every", "most_sync_every"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise UserError(f"--control.{flag} is {getattr(self, name)}: give a number of updates, 1 or more")
        if not 0 <= self.least_m <= 1:
            raise UserError(f"--control.least-m is {self.least_m}, it is a probability: give 0 to 1")

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect while nothing is steered."""
        dependent_fields = ("lower_bound", "upper_bound", "every", "most_sync_every", "least_m")
        return dict.fromkeys(dependent_fields, "signal") if self.signal == "none" else {}

    def start(self, sync_every: int, m: float) -> Controller:
        """Returns a controller starting at k = `sync_every` and `m`. Raises `UserError` when one is out of bounds."""
        if self.signal != "none" and sync_every > self.most_sync_every:
            raise UserError(
                f"--sync-every is {sync_every}, above --control.most-sync-every {self.most_sync_every}: raise the bound"
            )
        if self.signal != "none" and m < self.least_m:
            raise UserError(f"--replay.selection.m is {m}, below --control.least-m {self.least_m}: lower the bound")
        return Controller(self, sync_every, m)


@dataclass(frozen=True)
class ControlChange:
    """One change by the controller: after which step, the mean that caused it, and the values from then on."""

    step: int
    signal: str
    value: float
    sync_every: int
    m: float

    def to_json(self) -> dict[str, Json]:
        return asdict(self)


class Controller:
    """Decides on `sync_every` and `m` (its present values) by the metrics of every step, which `observe` receives."""

    def __init__(self, settings: Control, sync_every: int, m: float) -> None:
        self.settings = settings
        self.sync_every = sync_every
        self.m = m
        self.changes: list[ControlChange] = []
        self._span_steps = 0  # of this span
        self._signal_sum = 0.0
        self._signal_steps = 0  # steps of this span that had the signal
        self._fresh_spans = 0  # spans in a row on the fresh side
        self._skips_span = False  # this span is not judged

    @property
    def on(self) -> bool:
        return self.settings.signal != "none"

    def observe(self, step: int, metrics: Mapping[str, float]) -> ControlChange | None:
        """Returns the change that the step's metrics lead to, if any. A step without the signal, or where it is not
        finite, does not count.
        """
        if not self.on:
            return None
        value = metrics.get(self.settings.signal, math.nan)
        if math.isfinite(value):
            self._signal_sum, self._signal_steps = self._signal_sum + value, self._signal_steps + 1
        self._span_steps += 1
        if self._span_steps < self.settings.every:
            return None
        mean = self._signal_sum / self._signal_steps if self._signal_steps else math.nan
        is_skipped, self._skips_span = self._skips_span, False
        self._span_steps, self._signal_sum, self._signal_steps = 0, 0.0, 0
        return None if is_skipped or math.isnan(mean) else self._decide(step, mean)

    def _decide(self, step: int, mean: float) -> ControlChange | None:
        is_stale, is_fresh = mean > self.settings.upper_bound, mean < self.settings.lower_bound
        if self.settings.signal == "ess":  # the one signal that falls with staleness
            is_stale, is_fresh = is_fresh, is_stale
        self._fresh_spans = self._fresh_spans + 1 if is_fresh else 0
        if is_stale:
            next_values = max(1, self.sync_every // 2), min(1.0, round(self.m + NOTCH, 6))
        elif self._fresh_spans >= PATIENCE:
            self._fresh_spans = 0
            k, m = min(self.settings.most_sync_every, 2 * self.sync_every), round(self.m - NOTCH, 6)
            next_values = k, max(self.settings.least_m, m)
        else:
            return None
        if next_values == (self.sync_every, self.m):
            return None  # at its bounds already
        self.sync_every, self.m = next_values
        self._skips_span = True
        self.changes.append(ControlChange(step, self.settings.signal, mean, *next_values))
        return self.changes[-1]

    def state(self) -> Json:
        """Returns values, counts and changes as JSON, for `restore`."""
        return {
            "sync_every": self.sync_every,
            "m": self.m,
            "steps": self._span_steps,
            "sum": self._signal_sum,
            "count": self._signal_steps,
            "fresh": self._fresh_spans,
            "settling": self._skips_span,
            "changes": [change.to_json() for change in self.changes],
        }

    def restore(self, state: Json) -> None:
        """Continue with the values and counts that `state` gave."""
        self.sync_every, self.m = state["sync_every"], state["m"]
        self._span_steps, self._signal_sum, self._signal_steps = state["steps"], state["sum"], state["count"]
        self._fresh_spans, self._skips_span = state["fresh"], state["settling"]
        self.changes = [ControlChange(**change) for change in state["changes"]]
