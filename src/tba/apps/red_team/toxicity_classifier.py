"""`tba red-team classifier`: trains a toxicity classifier on labelled texts, and measures it.

    tba red-team classifier FILE --out DIR [--held-out 0.1] [--fields.text NAME --fields.label NAME] [--field value ...]
    tba red-team classifier FILE --out DIR --features sentences

A share of the texts, chosen by a digest of each, is held out to measure it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from tba.apps.red_team.labelled import LabelledTexts, read_labelled
from tba.apps.red_team.options import ClassifierOptions
from tba.apps.red_team.word_classifier import WordWeights
from tba.errors import UserError
from tba.evaluation.estimators import Interval, auc_interval, wilson_interval
from tba.record.terminal import terminal
from tba.runs.output import OutOptions
from tba.settings import override
from tba.tasks.held_out import is_held_out
from tba.types import Json
from tba.weights.atomic_dir import atomic_folder

if TYPE_CHECKING:
    from tba.apps.red_team.sentence_classifier import SentenceWeights  # which loads torch


@dataclass(frozen=True)
class ClassifierReport:
    """The classifier's figures on held-out texts."""

    texts: int
    toxic: int
    auc: Interval
    accuracy: Interval  # at P(toxic) = 1/2
    loss: float  # nats a text


def make_classifier(file: str, overrides: Sequence[str], places: OutOptions) -> int:
    """Writes the classifier and its report to `--out`. Raises `UserError` when that is not empty."""
    folder = places.new_folder()
    options = override(ClassifierOptions(), list(overrides), f"tba red-team classifier {file}")
    texts = read_labelled(Path(file), options.fields)
    console = terminal()
    console.print(f"{len(texts.texts):,} texts, {sum(texts.toxic):,} of them toxic", highlight=False)
    for reason, count in texts.refused.most_common():
        console.print(f"  refused: {reason}, {count:,}", highlight=False)
    weights, report = train_classifier(texts, options)
    facts = {"file": Path(file).name, "texts": len(texts.texts), "held_out": asdict(report)}
    write_classifier(weights, folder, facts)
    print_report(console, report)
    console.print(f"classifier in {folder}", highlight=False)
    return 0


def train_classifier(
    texts: LabelledTexts, options: ClassifierOptions
) -> tuple[WordWeights | SentenceWeights, ClassifierReport]:
    """Returns a classifier of the texts that are not held out, and its report on the others. Raises `UserError` unless
    both have toxic and other texts.
    """
    is_held_out_N = np.array([is_held_out(text, options.held_out) for text in texts.texts])
    toxic_N, index_N = np.array(texts.toxic), np.arange(len(texts.texts))
    train_texts = [texts.texts[i] for i in index_N[~is_held_out_N]]
    weights = _train_weights(train_texts, toxic_N[~is_held_out_N].tolist(), options)
    if len(set(toxic_N[is_held_out_N].tolist())) < 2:
        raise UserError(
            f"of the {int(is_held_out_N.sum())} texts held out all are of one kind, so that nothing can be measured: "
            "give more texts, or a larger --held-out"
        )
    margin_N = weights.margins([texts.texts[i] for i in index_N[is_held_out_N]])
    correct = int(((margin_N > 0) == toxic_N[is_held_out_N]).sum())
    return weights, ClassifierReport(
        texts=int(is_held_out_N.sum()),
        toxic=int(toxic_N[is_held_out_N].sum()),
        auc=auc_interval(margin_N[toxic_N[is_held_out_N]], margin_N[~toxic_N[is_held_out_N]]),
        accuracy=wilson_interval(correct, int(is_held_out_N.sum())),
        loss=float(np.logaddexp(0.0, np.where(toxic_N[is_held_out_N], -margin_N, margin_N)).mean()),
    )


def _train_weights(texts: list[str], toxic: list[bool], options: ClassifierOptions) -> WordWeights | SentenceWeights:
    if options.features == "words":
        return WordWeights.train(texts, toxic, options.train)
    from tba.apps.red_team.embedding import SentenceEmbedder
    from tba.apps.red_team.sentence_classifier import SentenceWeights

    encoder = SentenceEmbedder.load(options.embedder)
    return SentenceWeights.train(texts, toxic, options.train.inverse_penalty, encoder)


def write_classifier(weights: WordWeights | SentenceWeights, folder: Path, facts: Json) -> None:
    """Write the folder atomically."""
    with atomic_folder(folder) as temporary:
        weights.save(temporary, facts)


def print_report(console: Console, report: ClassifierReport) -> None:
    """Print how well the classifier did on the texts that were held out."""
    for line in (
        f"held-out texts  {report.texts:,}, {report.toxic:,} of them toxic",
        f"AUC             {report.auc.estimate:.4f} [{report.auc.low:.4f}, {report.auc.high:.4f}]",
        f"accuracy        {report.accuracy.estimate:.1%} [{report.accuracy.low:.1%}, {report.accuracy.high:.1%}]",
        f"cross-entropy   {report.loss:.3f} nats a text",
    ):
        console.print(line, highlight=False)
