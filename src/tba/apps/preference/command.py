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
from functools import partial
from pathlib import Path
from typing import Any, Generic

import numpy as np
from rich.console import Console

from tba.apps.preference.agreement import NEAR_SHARE, Agreement, agreement
from tba.apps.preference.frozen import CachedSentenceEncoder, FrozenRewardModel, load_scorer
from tba.apps.preference.options import RewardModelOptions
from tba.apps.preference.pairs import PairReport, PreferencePair, folds, held_out_indices, preference_pairs, read_pairs
from tba.apps.preference.scoring import REPORT, RewardModel, S, Scorable
from tba.apps.preference.training import ReadPair, fit_reward_model
from tba.errors import UserError
from tba.models.source import merged_if_adapter
from tba.record.terminal import terminal
from tba.runs.output import OutOptions
from tba.settings import override
from tba.tasks.problem_rows import rows_from_hub
from tba.weights.atomic_dir import atomic_folder


def make_reward_model(file: str, overrides: Sequence[str], places: OutOptions) -> int:
    """Writes model, tokenizer and report to `--out`. Raises `UserError` when that is not empty."""
    folder = places.new_folder()
    options = override(RewardModelOptions(), list(overrides), f"tba reward-model {file}")
    if not options.model:
        raise UserError("a reward model needs a backbone: give --model with a folder or a Hub name")
    console = terminal()
    pairs, report = _read_pairs(file, options.score_field)
    print_counts(console, report)
    if options.label_with is not None:
        pairs = relabel(pairs, options, console)
    agreement_, model, text_counts = train_reward_model(pairs, options, console)
    for line in agreement_.lines():
        console.print(line, highlight=False)
    facts = {
        "pairs": file,
        "backbone": options.model,
        "labelled_with": None if options.label_with is None else str(options.label_with),
        "lines": report.lines,
        "refused": dict(report.refused),
        **text_counts,
        "frozen": options.frozen,
        "reads": None if options.frozen else {"max_tokens": options.max_tokens, "keep": options.keep},
        "settings": asdict(options.train),
        "folds": options.folds,
        "held_out": asdict(agreement_),
    }
    with atomic_folder(folder) as temporary:
        model.save(temporary)
        (temporary / REPORT).write_text(json.dumps(facts, indent=1) + "\n")
    console.print(f"reward model in {folder}", highlight=False)
    return 0


def _read_pairs(file: str, score: str) -> tuple[list[PreferencePair], PairReport]:
    """Returns the pairs of a file, or of the split `train` of a data set on the Hub."""
    if Path(file).exists() or file.count("/") != 1 or Path(file).suffix:
        return read_pairs(Path(file), score)
    rows = rows_from_hub("tba reward-model", file, "train", "a JSON Lines or Parquet file of pairs")
    return preference_pairs(enumerate((row.values for row in rows), 1), file, score)


def print_counts(console: Console, report: PairReport) -> None:
    """Print how many pairs the file gave, and what was refused."""
    console.print(f"{report.pairs:,} pairs in {report.lines:,} lines", highlight=False)
    for reason, count in report.refused.most_common():
        console.print(f"  refused: {reason}, {count:,} (first: {report.examples[reason]})", highlight=False)


def train_reward_model(
    pairs: Sequence[PreferencePair], options: RewardModelOptions, console: Console
) -> tuple[Agreement, Scorable[Any], dict[str, int]]:
    """Returns the report on held-out documents, the model to save, and the counts of texts that were not read whole."""
    backbone = merged_if_adapter(options.model, console.print)
    if options.frozen:
        encoder = CachedSentenceEncoder.load(backbone, options.device)
        return _train(lambda: FrozenRewardModel.new(encoder), pairs, options, console)
    load = partial(RewardModel.load, backbone, options.max_tokens, options.keep, options.device, has_head=False)
    return _train(load, pairs, options, console)


def _train(
    start: Callable[[], Scorable[S]], pairs: Sequence[PreferencePair], options: RewardModelOptions, console: Console
) -> tuple[Agreement, Scorable[S], dict[str, int]]:
    """Returns the report, the model and the counts of unreadable texts, of models made by `start`."""
    if len({pair.document for pair in pairs}) < 2:
        raise UserError("all pairs are about one document, so that none can be held out: give pairs of at least two")
    held_out_parts = folds(pairs, options.folds) if options.folds else [held_out_indices(pairs, options.held_out)]
    all_indices = set(range(len(pairs)))
    model = start()
    texts = _Texts(model, pairs, options)
    texts.print_counts(console)
    measured_indices: list[int] = []
    differences: list[float] = []
    length_rights: list[float] = []
    for number, held_out in enumerate(held_out_parts):
        model = model if number == 0 else start()
        train_pairs = [pairs[i] for i in sorted(all_indices - set(held_out))]
        readable_pairs = _readable(texts, pairs, held_out)
        _fit(model, texts, train_pairs, options, console)
        scores = model.all_scores(texts.texts, options.train.max_tokens_per_pass)
        differences += [float(scores[pair.chosen] - scores[pair.rejected]) for _, pair in readable_pairs]
        sign = 1 if np.mean([_length_advantage(pair) for pair in train_pairs]) >= 0.5 else -1
        length_rights += [0.5 + sign * (_length_advantage(pairs[i]) - 0.5) for i, _ in readable_pairs]
        measured_indices += [i for i, _ in readable_pairs]
    near_lengths = [_has_near_lengths(pairs[i]) for i in measured_indices]
    report = agreement(differences, length_rights, near_lengths, [pairs[i].document for i in measured_indices])
    if options.folds:
        model = start()
        _fit(model, texts, pairs, options, console)
    return report, model, {"pairs_left_out": texts.unread_pairs, "texts_cut": texts.cut_texts}


def _readable(texts: _Texts[S], pairs: Sequence[PreferencePair], indices: Sequence[int]) -> list[tuple[int, ReadPair]]:
    """Returns the held-out pairs that the model can read. Raises `UserError` when it can read none."""
    readable_pairs = [(i, pair) for i in indices if (pair := texts.pair(pairs[i])) is not None]
    if not readable_pairs:
        raise UserError(
            f"none of {len(indices)} held-out pairs can be read by the model, so that nothing would be measured: "
            "raise --max-tokens, or give more documents"
        )
    return readable_pairs


def relabel(pairs: Sequence[PreferencePair], options: RewardModelOptions, console: Console) -> list[PreferencePair]:
    """Returns the pairs in the order of another model's scores; pairs with equal scores or unreadable are left out."""
    scorer = load_scorer(
        str(options.label_with), options.max_tokens, options.keep, options.device, options.train.max_tokens_per_pass
    )
    scores = scorer.judge([(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)])
    new_pairs, agreements, read_count = [], 0, 0
    for pair, a, b in zip(pairs, scores[::2], scores[1::2], strict=True):
        if a is None or b is None:
            continue
        read_count += 1
        agreements += a > b
        if a > b:
            new_pairs.append(pair)
        elif a < b:
            new_pairs.append(PreferencePair(pair.prompt, pair.rejected, pair.chosen, pair.document))
    console.print(
        f"labelled by {options.label_with}: {len(new_pairs):,} of {len(pairs):,} pairs, "
        f"{agreements / max(1, read_count):.1%} as in the file",
        highlight=False,
    )
    return new_pairs


class _Texts(Generic[S]):
    """Holds all texts, each once, as the model reads them."""

    def __init__(self, model: Scorable[S], pairs: Sequence[PreferencePair], options: RewardModelOptions) -> None:
        distinct_pairs = list(dict.fromkeys((p.prompt, answer) for p in pairs for answer in (p.chosen, p.rejected)))
        read_texts = model.read_all(distinct_pairs, options.train.max_tokens_per_pass)
        self.texts = [text for text in read_texts if text is not None]
        text_numbers = iter(range(len(self.texts)))
        indices = (None if text is None else next(text_numbers) for text in read_texts)
        self._index_by_pair = dict(zip(distinct_pairs, indices, strict=True))
        self.unread_pairs = sum(self.pair(pair) is None for pair in pairs)
        self.cut_texts = sum(text.cut > 0 for text in self.texts)
        self._max_tokens, self._keep = model.max_tokens, options.keep

    def pair(self, pair: PreferencePair) -> ReadPair | None:
        """Returns the pair as the model reads it; None when an answer cannot be read."""
        chosen, rejected = (self._index_by_pair[pair.prompt, answer] for answer in (pair.chosen, pair.rejected))
        return None if chosen is None or rejected is None else ReadPair(chosen, rejected, pair.document)

    def pairs(self, pairs: Sequence[PreferencePair]) -> list[ReadPair]:
        """Returns the pairs that can be read."""
        return [read_pair for pair in pairs if (read_pair := self.pair(pair)) is not None]

    def print_counts(self, console: Console) -> None:
        """Print how many pairs cannot be read, and how many prompts were cut."""
        if self._max_tokens is None:
            sentence = f"{self.unread_pairs:,} pairs with an answer without words are left out; prompts are read whole"
        else:
            sentence = (
                f"{self.unread_pairs:,} pairs with an answer longer than {self._max_tokens} tokens are left out; "
                f"{self.cut_texts:,} of {len(self.texts):,} texts lost tokens of their prompt (its {self._keep} stays)"
            )
        console.print(sentence, highlight=False)


def _fit(
    model: Scorable[S], texts: _Texts[S], pairs: Sequence[PreferencePair], options: RewardModelOptions, console: Console
) -> None:
    usable_pairs = texts.pairs(pairs)
    if not usable_pairs:
        raise UserError(f"the model can read none of {len(pairs)} pairs: raise --max-tokens, or give shorter answers")
    model.begin([texts.texts[i] for i in sorted({p for pair in usable_pairs for p in (pair.chosen, pair.rejected)})])

    def report(step: int, steps: int, loss: float) -> None:
        if step % max(1, steps // 10) == 0:
            console.print(f"step {step} of {steps}, loss {loss:.3f}", highlight=False)

    fit_reward_model(model, model.trained_parameters(), texts.texts, usable_pairs, model.passes, options.train, report)


def _length_advantage(pair: PreferencePair) -> float:
    """Returns 1 when the chosen answer is the longer one, 0 when it is the shorter, 0.5 when neither."""
    a, b = len(pair.chosen), len(pair.rejected)
    return 0.5 if a == b else float(a > b)


def _has_near_lengths(pair: PreferencePair) -> bool:
    a, b = sorted((len(pair.chosen), len(pair.rejected)))
    return b - a < NEAR_SHARE * b
