"""Measures how well scores agree with preferences: accuracy on pairs, calibration, and a baseline by length alone.

Invariant: intervals resample documents, since pairs of one document are not independent; equal scores count as half
right.

Shape legend: P pairs, D documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tba.evaluation.estimators import Interval, ratio_interval

BINS = 10
NEAR_SHARE = 0.1  # pairs whose lengths differ by less than this share are of nearly equal length

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Agreement:
    """How well scores agree with people, measured on held-out pairs."""

    pairs: int
    documents: int
    accuracy: Interval  # share of the pairs whose chosen answer has the higher score
    length_accuracy: Interval  # of the longer answer (or the shorter, if that was right more often in training)
    difference: Interval  # accuracy less that of length, document by document
    near_pairs: int  # whose answers differ in length by less than a tenth
    near_accuracy: Interval | None
    loss: float  # nats per pair, of sigmoid(difference of scores)
    calibration_error: float  # mean distance of the stated probability and the share that was right, over ten bins

    def lines(self) -> list[str]:
        """Returns the figures as sentences for people."""

        def percent(i: Interval) -> str:
            return f"{100 * i.estimate:.1f} % [{100 * i.low:.1f}, {100 * i.high:.1f}]"

        near_text = "none" if self.near_accuracy is None else f"{percent(self.near_accuracy)} of {self.near_pairs:,}"
        d = self.difference
        return [
            f"held-out pairs     {self.pairs:,} of {self.documents:,} documents (intervals resample documents)",
            f"accuracy           {percent(self.accuracy)}",
            f"by length alone    {percent(self.length_accuracy)}, difference {100 * d.estimate:+.1f} points "
            f"[{100 * d.low:+.1f}, {100 * d.high:+.1f}]",
            f"nearly equal long  {near_text}",
            f"calibration        {self.loss:.3f} nats a pair (a coin has 0.693), mean error "
            f"{100 * self.calibration_error:.1f} points",
        ]


def agreement(
    differences: Sequence[float], length_marks: Sequence[float], near_lengths: Sequence[bool], documents: Sequence[str]
) -> Agreement:
    """Returns how well scores agree with people. `differences` [P] are of scores, chosen less rejected; `length_marks`
    [P] is 1 where length alone is right, 0 where it is wrong, 0.5 where it is neither; `near_lengths` [P] says which
    answers are of nearly equal length. Raises `ValueError` for no pairs.
    """
    names = {name: d for d, name in enumerate(dict.fromkeys(documents))}
    document_P = np.array([names[name] for name in documents])
    difference_P = np.asarray(differences, np.float64)
    correct_P, length_P = _correct(difference_P), np.asarray(length_marks, np.float64)
    near_P = np.asarray(near_lengths, bool)

    def interval(value_P: _Floats, mask_P: npt.NDArray[np.bool_] | None = None) -> Interval:
        mask = np.ones(len(value_P), bool) if mask_P is None else mask_P
        total_D = np.bincount(document_P[mask], value_P[mask], len(names))
        return ratio_interval(total_D, np.bincount(document_P[mask], minlength=len(names)))

    return Agreement(
        pairs=len(difference_P),
        documents=len(names),
        accuracy=interval(correct_P),
        length_accuracy=interval(length_P),
        difference=interval(correct_P - length_P),
        near_pairs=int(near_P.sum()),
        near_accuracy=interval(correct_P, near_P) if near_P.any() else None,
        loss=float(np.logaddexp(0.0, -difference_P).mean()),
        calibration_error=calibration_error(difference_P),
    )


def calibration_error(difference_P: _Floats) -> float:
    """Returns the expected calibration error (Guo et al., arXiv 1706.04599) of sigmoid(|difference|) over bins of equal
    width from 1/2 to 1: how sure the scores are of the answer that they prefer, against how often that is the chosen
    one.
    """
    confidence_P = 1 / (1 + np.exp(-np.abs(difference_P)))
    bin_P = np.minimum(((confidence_P - 0.5) * 2 * BINS).astype(int), BINS - 1)
    correct_P = _correct(difference_P)
    gaps = [abs(float((confidence_P - correct_P)[bin_P == b].sum())) for b in range(BINS)]
    return sum(gaps) / len(difference_P)


def _correct(difference_P: _Floats) -> _Floats:
    return np.where(difference_P == 0, 0.5, difference_P > 0).astype(np.float64)
