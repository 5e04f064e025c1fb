"""Warnings of a run: their kinds, those about its end and its held-out figures, and what is recorded of all.

Invariant: noise is no fall. A held-out figure has fallen when it is more than 5 points and more than 5 standard errors
(of the difference of two proportions) below the best one before it. The thresholds are that high because the best of
many figures is partly luck: with a hundred figures that differ by chance alone, fewer than one run in a hundred reports
a fall. A fall is reported once, and the next one only when the figure had recovered in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tba.evaluation.estimators import GREEDY, SAMPLED
from tba.record.faults import read_faults, record_fault
from tba.record.text import percent
from tba.types import Evaluation, Version

HELD_OUT, REWARD, STALE = "held_out_falls", "reward_falls", "stale_data"  # kinds of faults.jsonl
NO_SIGNAL, TRUNCATED, COPIES = "no_signal", "truncated_answers", "copied_answers"
ENTROPY_FALLS, MISMATCHES, LOST_SAMPLES = "entropy_falls", "mismatches", "lost_samples"
LARGE_STEPS, PADDED, SLOW_ENGINE = "large_steps", "padded_forward", "slow_engine"
SHORT, LONG, WITHOUT_MPS = "short_answers", "long_answers", "without_mps"
SLOW_REWARD = "slow_reward"
_WARNING_KINDS = {HELD_OUT, REWARD, STALE, NO_SIGNAL, TRUNCATED, COPIES, SHORT, LONG, SLOW_REWARD}
_WARNING_KINDS |= {ENTROPY_FALLS, MISMATCHES, LOST_SAMPLES, LARGE_STEPS, PADDED, SLOW_ENGINE, WITHOUT_MPS}
POINTS, ERRORS = 0.05, 5.0  # of a held-out figure
MOST_WAITING = 0.25  # share of the searchers' time that they stood still for the reward
_FIGURES = (SAMPLED, GREEDY)  # by which of them checkpoints are compared


def find_accuracy_falls(evaluations: Iterable[Evaluation]) -> list[str]:
    """Returns a sentence for each time that a held-out figure fell, in the order of versions."""
    best_figures: dict[str, Evaluation] = {}
    has_fallen: dict[str, bool] = {}
    sentences = []
    for e in sorted(evaluations, key=lambda e: e.version):
        best = best_figures.setdefault(e.metric, e)
        is_low = best.value - e.value > max(POINTS, ERRORS * math.hypot(_standard_error(best), _standard_error(e)))
        if is_low and not has_fallen.get(e.metric):
            sentences.append(
                f"{e.metric} is {percent(e.value)} at {e.version.in_words}: it was {percent(best.value)} at "
                f"{best.version.in_words}"
            )
        has_fallen[e.metric] = is_low
        if e.value > best.value:
            best_figures[e.metric] = e
    return sentences


def record_accuracy_falls(directory: Path, evaluations: Iterable[Evaluation]) -> list[str]:
    """Record as faults those falls of held-out figures that the run in `directory` has not recorded; returns them."""
    recorded = {line["what"] for line in read_faults(directory) if line["kind"] == HELD_OUT}
    new_falls = [sentence for sentence in find_accuracy_falls(evaluations) if sentence not in recorded]
    for sentence in new_falls:
        record_fault(directory, HELD_OUT, sentence)
    return new_falls


def recorded_warnings(directory: Path) -> list[str]:
    """Returns the warnings about falls and the like that a run has recorded, oldest first."""
    return [str(line["what"]) for line in read_faults(directory) if line["kind"] in _WARNING_KINDS]


def record_slow_reward(directory: Path, share: float, expired: int, judged: int) -> None:
    """Record that the reward held up a run, where it did. share: of the searchers' time that they waited for it."""
    messages = []
    if share > MOST_WAITING:
        messages.append(
            f"the reward held up the run: searchers waited for it {percent(share)} of their time. `tba check` says how "
            "long its calls take, and what `concurrency` would gain"
        )
    if expired:
        messages.append(
            f"{expired:,} of {judged:,} answers were not graded within --run.reward-deadline and are rejected: slow "
            "answers are one kind of answer, so give the reward more time, or make it faster"
        )
    for message in messages:
        record_fault(directory, SLOW_REWARD, message)


def by_version(evaluations: Sequence[Evaluation]) -> Mapping[Version, Evaluation]:
    """Returns the figure of each version by which versions are compared: sampled accuracy where that was measured."""
    names = {e.metric for e in evaluations}
    name = next((metric for metric in _FIGURES if metric in names), min(names, default=""))
    return {e.version: e for e in evaluations if e.metric == name}


def report_once(sentences: Mapping[str, str | None], reported: set[str]) -> dict[str, str]:
    """Returns the sentences whose kinds were not reported yet, and adds these kinds to `reported`."""
    new_sentences = {kind: text for kind, text in sentences.items() if text is not None and kind not in reported}
    reported.update(new_sentences)
    return new_sentences


def _standard_error(e: Evaluation) -> float:
    """Returns the standard error of a proportion, kept above 0 (Agresti and Coull 1998)."""
    share = (e.value * e.n + 2) / (e.n + 4)
    return math.sqrt(max(0.0, share * (1 - share)) / (e.n + 4))
