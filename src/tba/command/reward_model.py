"""`tba reward-model`: a scalar reward model from pairs of answers, and how far its scores can be trusted.

    tba reward-model PAIRS --model DIR --out DIR [--held-out 0.1] [--folds N] [--label-with DIR] [--field value ...]

Documents, not pairs, are held out. With `--folds N` the report is of all documents, each scored by a model that was not
trained on it, and what is saved is then trained on all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from tba.errors import UserError
from tba.evaluate.preference import NEAR, Agreement, agreement
from tba.intake.pairs import PairReport, PreferencePair, folds, read_pairs
from tba.rewards.scoring import RewardModel, Text, parts
from tba.settings import override
from tba.train.preference import PreferenceSettings, ReadPair, fit
from tba.weights.beside import folder_beside

FACTS = "reward_model.json"  # what it was made of, and its report


@dataclass(frozen=True)
class RewardModelOptions:
    """Which backbone, and how it is trained and measured."""

    model: str = ""  # the backbone: a folder or a Hub name, causal or for sequence classification
    held_out: float = 0.1  # share of the documents that is not trained on, but measured
    folds: int = 0  # with 2 or more: every document is measured, by a model that was not trained on it
    score_field: str = "score"  # of answers that are marked one by one: every two different marks are a pair
    label_with: Path | None = None  # a reward model that says which answer is better, in place of the file
    max_tokens: int = 640  # of prompt and answer together; longer ones lose tokens of the prompt
    keep: Literal["beginning", "end"] = "end"  # which part of such a prompt stays
    device: str = "cpu"
    train: PreferenceSettings = field(default_factory=PreferenceSettings)

    def __post_init__(self) -> None:
        if self.folds < 0 or self.folds == 1 or not 0 < self.held_out < 1:
            raise UserError(
                f"--folds is {self.folds} and --held-out {self.held_out}: give 0 or at least 2 folds, and a share "
                "between 0 and 1"
            )


def make_reward_model(file: str, overrides: Sequence[str], out: Path) -> int:
    """Writes model, tokenizer and report to `out`. Raises `UserError` when that is not empty."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is there already: choose another --out, or remove it")
    options = override(RewardModelOptions(), list(overrides), f"tba reward-model {file}")
    if not options.model:
        raise UserError("a reward model needs a backbone: give --model with a folder or a Hub name")
    console = Console()
    pairs, report = read_pairs(Path(file), options.score_field)
    tell_lines(console, report)
    if options.label_with is not None:
        pairs = labelled(pairs, options, console)
    found, model = trained(pairs, options, console)
    for line in found.lines():
        console.print(line, highlight=False)
    facts = {
        "pairs": file,
        "backbone": options.model,
        "labelled_with": None if options.label_with is None else str(options.label_with),
        "lines": report.lines,
        "refused": dict(report.refused),
        "settings": asdict(options.train),
        "folds": options.folds,
        "held_out": asdict(found),
    }
    with folder_beside(out) as beside:
        model.save(beside)
        (beside / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    console.print(f"reward model in {out}", highlight=False)
    return 0


def tell_lines(console: Console, report: PairReport) -> None:
    """What became of the file."""
    console.print(f"{report.pairs:,} pairs in {report.lines:,} lines", highlight=False)
    for reason, count in report.refused.most_common():
        console.print(f"  refused: {reason}, {count:,} (first: {report.examples[reason]})", highlight=False)


def trained(
    pairs: Sequence[PreferencePair], options: RewardModelOptions, console: Console
) -> tuple[Agreement, RewardModel]:
    """The report on documents that were not trained on, and the model to keep."""
    documents = len({pair.document for pair in pairs})
    if documents < 2:
        raise UserError("all pairs are about one document, so that none can be held out: give pairs of at least two")
    count = options.folds or min(documents, max(2, round(1 / options.held_out)))
    places = folds(pairs, count)
    every = set(range(len(pairs)))
    chosen: list[int] = []
    differences: list[float] = []
    longer: list[float] = []
    for number, held in enumerate(places[: options.folds or 1]):
        model = RewardModel.load(options.model, options.max_tokens, options.keep, options.device)
        texts = _Texts(model, console if number == 0 else None)
        rest = [pairs[i] for i in sorted(every - set(held))]
        _fit(model, texts, rest, options, console)
        read = [(i, pair) for i in held if (pair := texts.pair(pairs[i])) is not None]
        scores = model.all_scores(texts.texts, options.train.max_tokens_per_pass)
        differences += [float(scores[pair.chosen] - scores[pair.rejected]) for _, pair in read]
        sign = 1 if np.mean([_longer(pair) for pair in rest]) >= 0.5 else -1
        longer += [0.5 + sign * (_longer(pairs[i]) - 0.5) for i, _ in read]
        chosen += [i for i, _ in read]
    found = agreement(differences, longer, [_near(pairs[i]) for i in chosen], [pairs[i].document for i in chosen])
    if options.folds:
        model = RewardModel.load(options.model, options.max_tokens, options.keep, options.device)
        _fit(model, _Texts(model, None), pairs, options, console)
    return found, model


def labelled(pairs: Sequence[PreferencePair], options: RewardModelOptions, console: Console) -> list[PreferencePair]:
    """The same answers in the order of another model's scores; those that it cannot tell apart or read are left out."""
    model = RewardModel.load(str(options.label_with), options.max_tokens, options.keep, options.device)
    texts = _Texts(model, None)
    read = [(pair, places) for pair in pairs if (places := texts.pair(pair)) is not None]
    scores = model.all_scores(texts.texts, options.train.max_tokens_per_pass)
    kept, agreed = [], 0
    for pair, places in read:
        difference = float(scores[places.chosen] - scores[places.rejected])
        agreed += difference > 0
        if difference > 0:
            kept.append(pair)
        elif difference < 0:
            kept.append(PreferencePair(pair.prompt, pair.rejected, pair.chosen, pair.document))
    console.print(
        f"labelled by {options.label_with}: {len(kept):,} of {len(pairs):,} pairs, {agreed / max(1, len(read)):.1%} "
        "as in the file",
        highlight=False,
    )
    return kept


class _Texts:
    """Every text once, as tokens."""

    def __init__(self, model: RewardModel, console: Console | None) -> None:
        self.texts: list[Text] = []
        self._places: dict[tuple[str, str], int | None] = {}
        self._model, self._console = model, console

    def pair(self, pair: PreferencePair) -> ReadPair | None:
        """None when an answer alone is too long."""
        chosen, rejected = (self._place(pair.prompt, answer) for answer in (pair.chosen, pair.rejected))
        return None if chosen is None or rejected is None else ReadPair(chosen, rejected, pair.document)

    def pairs(self, pairs: Sequence[PreferencePair]) -> list[ReadPair]:
        """Those that can be read; tells how many cannot, and how many prompts were cut."""
        read = [found for pair in pairs if (found := self.pair(pair)) is not None]
        if self._console is not None:
            cut = sum(text.cut > 0 for text in self.texts)
            self._console.print(
                f"{len(pairs) - len(read):,} pairs with an answer longer than {self._model.max_tokens} tokens are left "
                f"out; {cut:,} of {len(self.texts):,} texts lost tokens of their prompt (its {self._model.keep} stays)",
                highlight=False,
            )
        return read

    def _place(self, prompt: str, answer: str) -> int | None:
        if (prompt, answer) not in self._places:
            text = self._model.read(prompt, answer)
            self._places[prompt, answer] = None if text is None else len(self.texts)
            if text is not None:
                self.texts.append(text)
        return self._places[prompt, answer]


def _fit(
    model: RewardModel,
    texts: _Texts,
    pairs: Sequence[PreferencePair],
    options: RewardModelOptions,
    console: Console,
) -> None:
    read = texts.pairs(pairs)

    def told(step: int, steps: int, loss: float) -> None:
        if step % max(1, steps // 10) == 0:
            console.print(f"step {step} of {steps}, loss {loss:.3f}", highlight=False)

    parameters = [p for p in model.model.parameters() if p.requires_grad]
    fit(model, parameters, texts.texts, read, parts, options.train, told)


def _longer(pair: PreferencePair) -> float:
    """1 when the chosen answer is the longer one, 0 when the shorter, 0.5 when neither."""
    a, b = len(pair.chosen), len(pair.rejected)
    return 0.5 if a == b else float(a > b)


def _near(pair: PreferencePair) -> bool:
    a, b = sorted((len(pair.chosen), len(pair.rejected)))
    return b - a < NEAR * b
