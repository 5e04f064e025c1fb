"""`tba reward-model`: trains a scalar reward model on pairs of answers, and measures it.

    tba reward-model PAIRS --model DIR --out DIR [--held-out 0.1] [--folds N] [--label-with DIR] [--frozen]
                     [--field value ...]

Documents, not pairs, are held out. With `--folds N` the report covers all documents, each scored by a model that was
not trained on it; the model that is saved is then trained on all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic

import numpy as np
from rich.console import Console

from tba.apps.preference.agreement import NEAR, Agreement, agreement
from tba.apps.preference.frozen import FrozenRewardModel, SentenceEncoder, loaded
from tba.apps.preference.options import RewardModelOptions
from tba.apps.preference.pairs import PairReport, PreferencePair, folds, pairs_of, read_pairs, share
from tba.apps.preference.scoring import REPORT, RewardModel, S, Scorable
from tba.apps.preference.training import ReadPair, fit
from tba.errors import UserError
from tba.models.source import merged_if_adapter
from tba.record.terminal import terminal
from tba.runs.output import OutOptions
from tba.settings import override
from tba.tasks.problem_rows import rows_from_hub
from tba.weights.atomic_dir import atomic_folder


def make_reward_model(file: str, overrides: Sequence[str], places: OutOptions) -> int:
    """Writes model, tokenizer and report to `--out`. Raises `UserError` when that is not empty."""
    out = places.new_folder()
    options = override(RewardModelOptions(), list(overrides), f"tba reward-model {file}")
    if not options.model:
        raise UserError("a reward model needs a backbone: give --model with a folder or a Hub name")
    console = terminal()
    pairs, report = _read(file, options.score_field)
    tell_lines(console, report)
    if options.label_with is not None:
        pairs = labelled(pairs, options, console)
    found, model, lost = trained(pairs, options, console)
    for line in found.lines():
        console.print(line, highlight=False)
    facts = {
        "pairs": file,
        "backbone": options.model,
        "labelled_with": None if options.label_with is None else str(options.label_with),
        "lines": report.lines,
        "refused": dict(report.refused),
        **lost,
        "frozen": options.frozen,
        "reads": None if options.frozen else {"max_tokens": options.max_tokens, "keep": options.keep},
        "settings": asdict(options.train),
        "folds": options.folds,
        "held_out": asdict(found),
    }
    with atomic_folder(out) as temporary:
        model.save(temporary)
        (temporary / REPORT).write_text(json.dumps(facts, indent=1) + "\n")
    console.print(f"reward model in {out}", highlight=False)
    return 0


def _read(file: str, score: str) -> tuple[list[PreferencePair], PairReport]:
    """Returns the pairs of a file, or of the split `train` of a data set on the Hub."""
    if Path(file).exists() or file.count("/") != 1 or Path(file).suffix:
        return read_pairs(Path(file), score)
    rows = rows_from_hub("tba reward-model", file, "train", "a JSON Lines or Parquet file of pairs")
    return pairs_of(enumerate((row.values for row in rows), 1), file, score)


def tell_lines(console: Console, report: PairReport) -> None:
    """Print how many pairs the file gave, and what was refused."""
    console.print(f"{report.pairs:,} pairs in {report.lines:,} lines", highlight=False)
    for reason, count in report.refused.most_common():
        console.print(f"  refused: {reason}, {count:,} (first: {report.examples[reason]})", highlight=False)


def trained(
    pairs: Sequence[PreferencePair], options: RewardModelOptions, console: Console
) -> tuple[Agreement, Scorable[Any], dict[str, int]]:
    """Returns the report on held-out documents, the model to save, and the texts, with what could not be read whole."""
    backbone = merged_if_adapter(options.model, console.print)
    if options.frozen:
        encoder = SentenceEncoder.load(backbone, options.device)
        return _trained(lambda: FrozenRewardModel.new(encoder), pairs, options, console)
    return _trained(
        lambda: RewardModel.load(backbone, options.max_tokens, options.keep, options.device, trained=False),
        pairs,
        options,
        console,
    )


def _trained(
    start: Callable[[], Scorable[S]], pairs: Sequence[PreferencePair], options: RewardModelOptions, console: Console
) -> tuple[Agreement, Scorable[S], dict[str, int]]:
    """Returns the report, the model and what could not be read, of models made by `start`."""
    documents = len({pair.document for pair in pairs})
    if documents < 2:
        raise UserError("all pairs are about one document, so that none can be held out: give pairs of at least two")
    places = folds(pairs, options.folds) if options.folds else [share(pairs, options.held_out)]
    every = set(range(len(pairs)))
    model = start()
    texts = _Texts(model, pairs, options)
    texts.tell(console)
    chosen: list[int] = []
    differences: list[float] = []
    longer: list[float] = []
    for number, held in enumerate(places):
        model = model if number == 0 else start()
        rest = [pairs[i] for i in sorted(every - set(held))]
        read = _readable(texts, pairs, held)
        _fit(model, texts, rest, options, console)
        scores = model.all_scores(texts.texts, options.train.max_tokens_per_pass)
        differences += [float(scores[pair.chosen] - scores[pair.rejected]) for _, pair in read]
        sign = 1 if np.mean([_longer(pair) for pair in rest]) >= 0.5 else -1
        longer += [0.5 + sign * (_longer(pairs[i]) - 0.5) for i, _ in read]
        chosen += [i for i, _ in read]
    found = agreement(differences, longer, [_near(pairs[i]) for i in chosen], [pairs[i].document for i in chosen])
    if options.folds:
        model = start()
        _fit(model, texts, pairs, options, console)
    return found, model, {"pairs_left_out": texts.unread, "texts_cut": texts.cut}


def _readable(texts: _Texts[S], pairs: Sequence[PreferencePair], held: Sequence[int]) -> list[tuple[int, ReadPair]]:
    """Returns the held-out pairs that the model can read. Raises `UserError` when it can read none."""
    read = [(i, pair) for i in held if (pair := texts.pair(pairs[i])) is not None]
    if not read:
        raise UserError(
            f"none of {len(held)} held-out pairs can be read by the model, so that nothing would be measured: raise "
            "--max-tokens, or give more documents"
        )
    return read


def labelled(pairs: Sequence[PreferencePair], options: RewardModelOptions, console: Console) -> list[PreferencePair]:
    """Returns the pairs in the order of another model's scores; pairs with equal scores or unreadable are left out."""
    other = loaded(
        str(options.label_with),
        options.max_tokens,
        options.keep,
        options.device,
        options.train.max_tokens_per_pass,
    )
    scores = other.judge([(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)])
    kept, agreed, read = [], 0, 0
    for pair, a, b in zip(pairs, scores[::2], scores[1::2], strict=True):
        if a is None or b is None:
            continue
        read += 1
        agreed += a > b
        if a > b:
            kept.append(pair)
        elif a < b:
            kept.append(PreferencePair(pair.prompt, pair.rejected, pair.chosen, pair.document))
    console.print(
        f"labelled by {options.label_with}: {len(kept):,} of {len(pairs):,} pairs, {agreed / max(1, read):.1%} "
        "as in the file",
        highlight=False,
    )
    return kept


class _Texts(Generic[S]):
    """Holds all texts, each once, as the model reads them."""

    def __init__(self, model: Scorable[S], pairs: Sequence[PreferencePair], options: RewardModelOptions) -> None:
        asked = list(dict.fromkeys((p.prompt, answer) for p in pairs for answer in (p.chosen, p.rejected)))
        read = model.read_all(asked, options.train.max_tokens_per_pass)
        self.texts = [text for text in read if text is not None]
        there = iter(range(len(self.texts)))
        self._places = {key: None if text is None else next(there) for key, text in zip(asked, read, strict=True)}
        self.unread = sum(self.pair(pair) is None for pair in pairs)
        self.cut = sum(text.cut > 0 for text in self.texts)
        self._max_tokens, self._keep = model.max_tokens, options.keep

    def pair(self, pair: PreferencePair) -> ReadPair | None:
        """Returns the pair as the model reads it; None when an answer cannot be read."""
        chosen, rejected = (self._places[pair.prompt, answer] for answer in (pair.chosen, pair.rejected))
        return None if chosen is None or rejected is None else ReadPair(chosen, rejected, pair.document)

    def pairs(self, pairs: Sequence[PreferencePair]) -> list[ReadPair]:
        """Returns the pairs that can be read."""
        return [found for pair in pairs if (found := self.pair(pair)) is not None]

    def tell(self, console: Console) -> None:
        """Print how many pairs cannot be read, and how many prompts were cut."""
        if self._max_tokens is None:
            said = f"{self.unread:,} pairs with an answer that has no words are left out; prompts are read whole"
        else:
            said = (
                f"{self.unread:,} pairs with an answer longer than {self._max_tokens} tokens are left out; "
                f"{self.cut:,} of {len(self.texts):,} texts lost tokens of their prompt (its {self._keep} stays)"
            )
        console.print(said, highlight=False)


def _fit(
    model: Scorable[S],
    texts: _Texts[S],
    pairs: Sequence[PreferencePair],
    options: RewardModelOptions,
    console: Console,
) -> None:
    read = texts.pairs(pairs)
    if not read:
        raise UserError(
            f"none of {len(pairs)} pairs can be read by the model: raise --max-tokens, or give shorter answers"
        )
    model.begin([texts.texts[place] for place in sorted({p for pair in read for p in (pair.chosen, pair.rejected)})])

    def told(step: int, steps: int, loss: float) -> None:
        if step % max(1, steps // 10) == 0:
            console.print(f"step {step} of {steps}, loss {loss:.3f}", highlight=False)

    fit(model, model.trained(), texts.texts, read, model.parts, options.train, told)


def _longer(pair: PreferencePair) -> float:
    """1 when the chosen answer is the longer one, 0 when the shorter, 0.5 when neither."""
    a, b = len(pair.chosen), len(pair.rejected)
    return 0.5 if a == b else float(a > b)


def _near(pair: PreferencePair) -> bool:
    a, b = sorted((len(pair.chosen), len(pair.rejected)))
    return b - a < NEAR * b
