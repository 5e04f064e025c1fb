"""`metrics.jsonl`: one line per optimizer step.

Invariant: every line holds `step`, `version` and `wall_seconds` (since the run began), and all numbers that the step
gave; a number that is not finite is null. The names below are those that the curves and the live view know; a trainer
may add any other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from tba.record.jsonl import JsonLines, NewLines, read_last_line, read_lines
from tba.types import Json, Version

FILE = "metrics.jsonl"

REWARD = "reward"  # mean over the batch
PART = "reward/"  # prefix of the mean of each part of the reward, where it has several
LOG_RATIO = "log_ratio"  # mean over rows of log pi - log pi_ref summed over tokens; the KL only where rows are fresh
LOG_RATIO_ALONE = "log_ratio_reference"  # to the run's reference alone, where that above is to teachers, too
LAG = "lag"  # trainer updates since the weights that sampled the batch, mean over rows
LAG_MAX = "lag_max"
IN_FLIGHT = "in_flight_seconds"  # from the beginning of a trajectory's round to the journal, mean over rows
WAITING = "waiting_seconds"  # from the journal to training
OFF_POLICY = "off_policy"  # log(behaviour / policy) of a whole answer, mean over rows; its quantiles
OFF_POLICY_LOW = "off_policy_p05"
OFF_POLICY_HIGH = "off_policy_p95"
REPEATED = "replay_repeated"  # share of the trajectories that left as copies of others, never used
ESS = "ess"  # effective sample size, as a share of the rows
ENTROPY = "entropy"  # of what a token was drawn from, mean over the batch's tokens, nats
MISMATCH = "mismatch"  # |log(behaviour / policy)| of a token that these very weights sampled, mean
MISMATCH_ANSWER = "mismatch_answer"  # of a whole answer
FRESH = "fresh_share"  # share of the rows over which these two are
DRIFT = "drift"  # by how much an update has moved the distribution of a token, nats: mean log(behaviour / policy)
CUT = "cut"  # share of ratios to the behaviour that were cut
LENGTH = "length"  # sampled tokens of an answer, mean over rows
TRUNCATED = "truncated"  # share of answers that were cut off
WITHOUT_SIGNAL = "without_signal"  # share of groups all of whose rewards are the same
RESIDUAL = "residual_relative"  # spread of r - beta log-ratio within groups, over that of r
TRAINER_IDLE = "trainer_idle"  # shares of wall-clock after warm-up, so far, in 0..1
TRAINER_PACED = "trainer_paced"
EVALUATING = "evaluating"  # versions that are to be evaluated, or being evaluated
SEARCHER_EVALUATING = "searcher_evaluating"  # share of the searchers' time so far, in 0..1; others likewise
GENERATED_TOKENS = "generated_tokens"  # by all searchers, since the run began
TRAINED_TOKENS = "tokens"  # in this step's batch
BACKUP_AGE = "backup_age"  # seconds since the newest backup began, or since the trainer did where there is none yet
JOURNAL_ROWS = "journal_rows"  # trajectories that the trainer has read from the journal: it holds at least so many

RATE_POINTS = 40  # at most, over a run
STEPS_PER_RATE_POINT = 5  # at least
MEAN_STEPS = 50  # of which the live view shows means
RATE_SECONDS = 10.0  # at least, of which it shows a rate


class MetricsWriter:
    """Appends a line of metrics per optimizer step."""

    def __init__(self, directory: Path) -> None:
        self._lines = JsonLines(directory / FILE)

    def write(self, version: Version, wall_seconds: float, metrics: Mapping[str, float]) -> None:
        """Append the line of a step: the step and the wall-clock it ended at, then its metrics."""
        head = {"step": version.step, "version": version, "wall_seconds": round(wall_seconds, 3)}
        self._lines.append({**head, **metrics, **head})

    def close(self) -> None:
        self._lines.close()


def read_metrics(directory: Path) -> list[dict[str, Json]]:
    """Returns a run's lines, in the order written; none when it has no metrics yet."""
    return read_lines(directory / FILE, parse_step)


def read_last(directory: Path) -> dict[str, Json] | None:
    """Returns the newest line of a run, without reading the others; None when it has no metrics yet."""
    return read_last_line(directory / FILE, parse_step)


def incarnation_of(row: dict[str, Json]) -> int | None:
    """Returns which incarnation of the run made the step of a line; None where the line does not say."""
    incarnation = str(row.get("version", "0")).partition(".")[0]
    return int(incarnation) if incarnation.isdecimal() else None


def parse_step(row: dict[str, Json]) -> dict[str, Json]:
    """Returns a line that has its step and its time; raises `TypeError` for any other."""
    if not (isinstance(row["step"], int) and is_number(row["wall_seconds"])):
        raise TypeError("no line of a step")
    return row


def column(
    rows: Sequence[Mapping[str, Json]], name: str, over: str = "wall_seconds"
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns (x, y) of one metric over another, of the rows that have both as finite numbers."""
    pairs = [(r[over], r[name]) for r in rows if is_number(r.get(over)) and is_number(r.get(name))]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def rates(rows: Sequence[Mapping[str, Json]]) -> dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
    """Returns (wall-clock, completion tokens per second of wall-clock) of `generated`, and of `trained` (every use).

    Each point is the mean over an equal span of wall-clock. Empty where the tokens were not recorded.
    """
    generated_seconds, generated = column(rows, GENERATED_TOKENS)
    trained_seconds, trained = column(rows, TRAINED_TOKENS)
    return {"generated": _rate(generated_seconds, generated), "trained": _rate(trained_seconds, np.cumsum(trained))}


class RunningMetrics:
    """Reads a run's metrics again and again: each call of `read_new` reads only what is new.

    A bounded number of points is kept, however many steps there are.
    """

    def __init__(self, directory: Path) -> None:
        self._lines = NewLines(directory / FILE, parse_step)
        self._clear()

    def _clear(self) -> None:
        self.newest: Mapping[str, Json] = {}  # row; empty before the first
        self.first_seconds = 0.0  # the wall-clock of the first row
        self._recent_rows: deque[Mapping[str, Json]] = deque(maxlen=MEAN_STEPS)
        self._trained_tokens = 0.0
        self._totals = {"generated": _Total(), "trained": _Total()}

    @property
    def bad_line_count(self) -> int:
        """Returns how many lines could not be read."""
        return len(self._lines.bad_lines)

    def read_new(self) -> None:
        """Read the steps that were recorded since the last call."""
        was_replaced, rows = self._lines.read()
        if was_replaced:
            self._clear()
        for row in rows:
            seconds, generated, trained = row["wall_seconds"], row.get(GENERATED_TOKENS), row.get(TRAINED_TOKENS)
            if not self.newest:
                self.first_seconds = seconds
            self.newest = row
            self._recent_rows.append(row)
            if is_number(generated):
                self._totals["generated"].add(seconds, generated)
            if is_number(trained):
                self._trained_tokens += trained
                self._totals["trained"].add(seconds, self._trained_tokens)

    def mean(self, name: str) -> float | None:
        """Returns the mean of a metric over the newest 50 steps; None where none of them has it."""
        values = [value for row in self._recent_rows if is_number(value := row.get(name))]
        return sum(values) / len(values) if values else None

    def parts(self) -> dict[str, float]:
        """Returns the mean of each part of the reward over the newest 50 steps, by its name."""
        names = [name.removeprefix(PART) for name in self.newest if name.startswith(PART)]
        return {name: mean for name in names if (mean := self.mean(PART + name)) is not None}

    def rate(self, half: str) -> float | None:
        """Returns tokens per second of `generated` or `trained` by now: over ten seconds or more, and so many that two
        arrivals lie in them, since those of a long round arrive together. None while there was no arrival.
        """
        return self._totals[half].rate()


class _Total:
    """Keeps a running total over wall-clock, as far back as its rate needs it."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()  # (wall-clock, total): the first known, and where it rose
        self._newest_point = (0.0, 0.0)

    def add(self, seconds: float, total: float) -> None:
        if not self._points or total > self._newest_point[1]:
            self._points.append((seconds, total))
        self._newest_point = (seconds, total)
        while len(self._points) > 2 and seconds - self._points[1][0] >= RATE_SECONDS:
            self._points.popleft()

    def rate(self) -> float | None:
        """Returns the rise per second since the oldest point that is kept; None without a rise, or in no time."""
        if len(self._points) < 2:
            return None
        (start_seconds, start_total), (end_seconds, end_total) = self._points[0], self._newest_point
        return (end_total - start_total) / (end_seconds - start_seconds) if end_seconds > start_seconds else None


def _rate(
    seconds: npt.NDArray[np.float64], total: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns the slope of a running total at the middles of equal spans of x."""
    if len(seconds) < 2 or seconds[-1] <= seconds[0]:
        return np.empty(0), np.empty(0)
    edges = np.linspace(seconds[0], seconds[-1], 1 + min(RATE_POINTS, max(1, len(seconds) // STEPS_PER_RATE_POINT)))
    return (edges[1:] + edges[:-1]) / 2, np.diff(np.interp(edges, seconds, total)) / np.diff(edges)


def is_number(value: Json) -> TypeGuard[float]:
    """Returns whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
