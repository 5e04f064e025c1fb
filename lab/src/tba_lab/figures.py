"""The figures of one run that a study compares, each under one name, read from the run's folder.

Invariant: a figure that a run does not have is missing: nothing is filled in, and nothing is 0 for lack of a number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tba.json_input import read_json
from tba.record import metrics
from tba.record.run_record import RunRecord
from tba.record.text import percent, short_number
from tba.types import Evaluation, Json

DIVERGENCE_FILE = "divergence.json"  # what `tba.evaluation.divergence` found, as JSON
DIVERSITY_FILE = "diversity.json"  # what `tba_lab.diversity` found, before and after
_REMEASURE = "remove it, and have it measured again (tba-lab study)"
_MEASURED = {"distinct": float, "differ": float | None, "pass_at": list[float]}  # of the diversity, at least
_LAST = 10  # the last tenth of the steps is what a mean over the end is taken of


def _points(share: float) -> str:
    return f"{100 * share:.1f}"


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.0f}"


def _decimals(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


# Name -> (heading with its unit, how a value is written). Accuracies other than these three are written as theirs.
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "pass@1/sampled": ("sampled accuracy, %", _points),
    "pass@1/greedy": ("greedy accuracy, %", _points),
    "pass@4/sampled": ("pass@4, %", _points),
    "fall": ("largest fall, points", _points),  # below the best so far, over the run's evaluations
    "reward": ("reward", _decimals(3)),  # held-out, sampled after the run
    "kl": ("KL, nats", _decimals(3)),  # to the reference, the same samples
    "perplexity": ("perplexity", _decimals(2)),  # of these samples under the reference, per token of an answer
    "perplexity_with_prompt": ("perplexity, prompts counted", _decimals(3)),  # as the paper's code counts it
    "answer_tokens": ("tokens an answer", _decimals(1)),  # of these samples
    "distinct": ("different right answers", _decimals(1)),  # of one problem, among the samples of the diversity
    "distinct_before": ("different ones before", _decimals(1)),  # the same of the weights that the run began with
    "differ": ("two right ones differ, %", _points),
    "differ_before": ("two differ before, %", _points),
    "seconds_to_target": ("s to target", _seconds),  # since the first step
    "updates_to_target": ("updates to target", _decimals(0)),
    "seconds": ("s training", _seconds),  # from the first step to the last
    "seconds_in_all": ("s in all", _seconds),  # start-up and evaluations too
    "steps": ("steps", _decimals(0)),
    "log_ratio": ("log-ratio", _decimals(3)),  # of the trained batches, the last tenth of the steps
    "lag": ("lag", _decimals(1)),
    "ess": ("effective sample size", percent),  # of the batches' rows, mean over all steps
    "uses": ("mean uses", _decimals(2)),
    "tokens_generated": ("tokens generated", short_number),
    "tokens_trained": ("tokens trained", short_number),  # every use
    "trainer_memory": ("trainer, MiB", _mebibytes),  # peak
    "searcher_memory": ("searcher, MiB", _mebibytes),  # peak, the largest of them
    "trainer_idle": ("trainer idle", percent),
    "trainer_paced": ("trainer paced", percent),
    "searcher_idle": ("searchers idle", percent),
    "skipped_steps": ("steps skipped", _decimals(0)),
}
DATA = ("steps", "log_ratio", "lag", "ess", "uses", "tokens_generated", "tokens_trained", "skipped_steps")
MACHINE = ("seconds_in_all", "trainer_memory", "searcher_memory", "trainer_idle", "trainer_paced", "searcher_idle")


def figures(run: RunRecord, metric: str, target: float | None = None) -> dict[str, float]:
    """Returns the figures of a run that has ended, by the names of `COLUMNS` (pass@K by its own).

    metric: the accuracy whose largest fall, and whose time to reach `target`, are measured.
    """
    summary = run.summary
    if summary is None:
        return {}
    values: dict[str, float | None] = {}
    for name, (_, last_evaluation) in run.figures().items():
        values[name] = last_evaluation.value if last_evaluation else None
    curve = accuracy_curve(run, metric)
    values["fall"] = largest_fall([value for _, value in curve]) if curve else None
    if target is not None:
        values["seconds_to_target"] = reached(curve, target)
        values["updates_to_target"] = reached(accuracy_by_updates(run, metric), target)
    wall, tokens, parts = summary.wall_seconds, summary.tokens, summary.peak_memory_bytes
    searchers = [size for part, size in parts.items() if part != "trainer"]
    values |= {
        "seconds": wall.train,
        "seconds_in_all": wall.total,
        "steps": summary.steps,
        "log_ratio": end_mean(run.metrics, metrics.LOG_RATIO),
        "lag": summary.lag.mean,
        "ess": mean(run.metrics, metrics.ESS),
        "uses": summary.trajectories.samples_per_insert,
        "tokens_generated": tokens.generated,
        "tokens_trained": tokens.trained_total,
        "trainer_memory": parts.get("trainer"),
        "searcher_memory": max(searchers, default=None),
        "trainer_idle": summary.trainer_idle,
        "trainer_paced": summary.trainer_paced,
        "searcher_idle": summary.searcher_idle,
        "skipped_steps": float(summary.faults.get("skipped_steps") or 0),
        **_divergence(run.directory),
        **_diversity(run.directory),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def format_figure(name: str, value: float) -> str:
    """Returns a figure's value as its column shows it."""
    return COLUMNS[name][1](value) if name in COLUMNS else _points(value)


def heading(name: str) -> str:
    """Returns a figure's column heading."""
    return COLUMNS[name][0] if name in COLUMNS else f"{name}, %"


def training_start(run: RunRecord) -> float:
    """Returns when the first optimizer step began, in seconds since the run began."""
    return run.summary.wall_seconds.sft + run.summary.wall_seconds.warm_up if run.summary else 0.0


def accuracy_curve(run: RunRecord, metric: str) -> list[tuple[float, float]]:
    """Returns (seconds since the first step, accuracy) of each evaluation, by version; earlier ones are at 0."""
    return [(max(0.0, e.wall_seconds - training_start(run)), e.value) for e in _by_version(run, metric)]


def accuracy_by_updates(run: RunRecord, metric: str) -> list[tuple[float, float]]:
    """Returns (updates of the weights, accuracy) of each evaluation, by version."""
    return [(float(e.version.step), e.value) for e in _by_version(run, metric)]


def _by_version(run: RunRecord, metric: str) -> list[Evaluation]:
    return sorted((e for e in run.evaluations if e.metric == metric), key=lambda e: e.version)


def reached(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Returns where the curve first reaches `target`, by linear interpolation; None if it never does."""
    if curve and curve[0][1] >= target:
        return curve[0][0]
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if y1 >= target:
            return x0 + (x1 - x0) * (target - y0) / (y1 - y0)
    return None


def largest_fall(values: Sequence[float]) -> float:
    """Returns the largest distance below the best so far, a measure of instability: 0 for a curve that never falls."""
    best_values = np.maximum.accumulate(np.asarray(values, dtype=np.float64))
    return float((best_values - values).max()) if len(values) else 0.0


def end_mean(rows: Sequence[Mapping[str, Json]], name: str) -> float | None:
    """Returns the mean of a metric over the last tenth of the steps that have it."""
    _, y = metrics.column(rows, name, over="step")
    return float(y[-max(1, len(y) // _LAST) :].mean()) if len(y) else None


def mean(rows: Sequence[Mapping[str, Json]], name: str) -> float | None:
    """Returns the mean of a metric over all steps that have it."""
    _, y = metrics.column(rows, name, over="step")
    return float(y.mean()) if len(y) else None


def _divergence(directory: Path) -> dict[str, float]:
    path = directory / DIVERGENCE_FILE
    if not path.exists():
        return {}
    names = {"kl": "kl", "reward": "reward", "tokens": "answer_tokens"}
    names |= {name: name for name in ("perplexity", "perplexity_with_prompt")}
    values = read_json(path, _REMEASURE, **dict.fromkeys(names, float | None))
    return {name: values[key] for key, name in names.items() if values.get(key) is not None}


def read_diversity(directory: Path) -> dict[str, Json]:
    """Returns the diversity of a run's first and last weights, under `before` and `after`; empty if not measured.

    Each has the fields of `tba_lab.diversity.Diversity`.
    """
    path = directory / DIVERSITY_FILE
    if not path.exists():
        return {}
    diversities: dict[str, Json] = read_json(path, _REMEASURE, before=_MEASURED, after=_MEASURED)
    return diversities


def pass_of(k: int, samples: int) -> str:
    """Returns the name of pass@k over the diversity's samples."""
    return f"pass@{k}/of{samples}"


def _diversity(directory: Path) -> dict[str, float | None]:
    diversities = read_diversity(directory)
    if not diversities:
        return {}
    values_before, values_after = diversities["before"], diversities["after"]
    samples = len(values_after["pass_at"])
    powers = [2**i for i in range(samples.bit_length())]  # 1, 2, 4, ... up to the samples
    return {
        **{name: values_after[name] for name in ("distinct", "differ")},
        **{f"{name}_before": values_before[name] for name in ("distinct", "differ")},
        **{pass_of(k, samples): values_after["pass_at"][k - 1] for k in powers},
    }
