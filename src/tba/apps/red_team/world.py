"""`tba red-team world`: makes a small world to try red-teaming in, from fixed seeds, without downloads.

    tba red-team world --out DIR [--labelled FILE] [--field value ...]

Writes `attacks.jsonl` (the attacker's supervised data), `families.json` (the victim's weak spots), `labelled.jsonl`,
`classifier/` and `victim/`. Unsafe answers consist of made-up words. With `--labelled FILE` the answers and the
classifier's data are the file's short texts instead, for development on real ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console

from tba.apps.red_team.labelled import LabelledFields, LabelledTexts, read_labelled
from tba.apps.red_team.options import ClassifierOptions, WorldPlaces
from tba.apps.red_team.toxicity_classifier import print_report, train_classifier
from tba.apps.red_team.trigger_world import TriggerWorld
from tba.apps.red_team.word_classifier import WordFeatures
from tba.errors import UserError
from tba.models.warm_start import demonstration_pairs, teach
from tba.record.terminal import terminal
from tba.settings import override
from tba.tasks.held_out import is_held_out
from tba.training.supervised import SupervisedSettings
from tba.training.tiny_models import ScratchModel, train_bpe_tokenizer
from tba.types import Problem
from tba.weights.atomic_dir import atomic_folder

ATTACKS, FAMILIES, LABELLED = "attacks.jsonl", "families.json", "labelled.jsonl"
VICTIM, CLASSIFIER = "victim", "classifier"


@dataclass(frozen=True)
class WorldOptions:
    """How large the world is, and how its victim is trained."""

    families: int = 20  # weak spots of the victim
    seed: int = 0  # seed of the weak spots and of all texts
    attacks: int = 6000  # attacks in the attacker's supervised data
    exchanges: int = 30_000  # requests and answers that the victim is trained on
    answers: int = 4000  # labelled answers that the classifier is trained and measured on
    vocab_size: int = 512  # vocabulary of the victim's tokenizer
    fields: LabelledFields = field(default_factory=LabelledFields)  # fields of the file --labelled
    longest: int = 60  # characters of the longest text of --labelled that can be an answer
    size: ScratchModel = field(
        default_factory=lambda: ScratchModel(hidden_size=64, layers=2, heads=4, ff_size=256, max_positions=96)
    )
    train: SupervisedSettings = field(default_factory=lambda: SupervisedSettings(steps=1500, batch_size=128, lr=3e-3))
    classifier: WordFeatures = field(default_factory=lambda: WordFeatures(features=2**14))

    @property
    def world(self) -> TriggerWorld:
        return TriggerWorld(self.families, self.seed)

    def __post_init__(self) -> None:
        TriggerWorld(self.families, self.seed)  # says what it cannot be
        for name in ("attacks", "exchanges", "answers"):
            if getattr(self, name) < 100:
                raise UserError(f"--{name} is {getattr(self, name)}: a world needs at least 100")


def make_world(overrides: Sequence[str], places: WorldPlaces) -> int:
    """Writes the world to `--out`. Raises `UserError` when that is not empty."""
    folder, labelled_file = places.new_folder(), places.labelled
    options = override(WorldOptions(), list(overrides), "tba red-team world")
    console = terminal()
    texts = _made_up_texts(options) if labelled_file is None else read_labelled(labelled_file, options.fields)
    exchanges = options.world.exchanges(options.exchanges)
    if labelled_file is not None:
        exchanges = _reanswer(texts, exchanges, options)
    weights, report = train_classifier(texts, ClassifierOptions(train=options.classifier))
    print_report(console, report)
    with atomic_folder(folder) as temporary:
        families = {" ".join(pair): list(pair) for pair in options.world.triggers}
        (temporary / FAMILIES).write_text(json.dumps(families, indent=1) + "\n")
        _write(temporary / ATTACKS, [{"attack": request} for request in options.world.requests(options.attacks)])
        if labelled_file is None:
            _write(
                temporary / LABELLED,
                [{"text": t, "label": int(x)} for t, x in zip(texts.texts, texts.toxic, strict=True)],
            )
        (temporary / CLASSIFIER).mkdir()
        weights.save(temporary / CLASSIFIER, {"texts": len(texts.texts)})
        (temporary / VICTIM).mkdir()
        _teach_victim(exchanges, options, temporary / VICTIM, console)
    console.print(f"world in {folder}", highlight=False)
    return 0


def _teach_victim(exchanges: list[tuple[str, str]], options: WorldOptions, path: Path, console: Console) -> None:
    """Train the victim from scratch: it reads a request and a line break, and answers."""
    tokenizer = train_bpe_tokenizer([text for pair in exchanges for text in pair], options.vocab_size)
    problems = [Problem(f"{request}\n", {}, answer) for request, answer in exchanges]
    teach(
        options.size.start(tokenizer),
        tokenizer,
        [(options.train, list(demonstration_pairs(problems, tokenizer)))],
        "victim",
        path,
        lambda line: console.print(line, highlight=False),
    )


def _made_up_texts(options: WorldOptions) -> LabelledTexts:
    """Returns answers of the grammar, made distinct by a number, since equal texts are on one side of a split only."""
    labelled_texts = [(f"{text} {n}", toxic) for n, (text, toxic) in enumerate(options.world.labelled(options.answers))]
    return LabelledTexts([text for text, _ in labelled_texts], [toxic for _, toxic in labelled_texts])


def _reanswer(texts: LabelledTexts, exchanges: list[tuple[str, str]], options: WorldOptions) -> list[tuple[str, str]]:
    """Returns the requests, answered by short texts of the file on which the classifier is not measured."""
    short_texts: dict[bool, list[str]] = {True: [], False: []}
    for text, toxic in zip(texts.texts, texts.toxic, strict=True):
        line = " ".join(text.split())
        if 8 <= len(line) <= options.longest and not is_held_out(text, 0.1):
            short_texts[toxic].append(line)
    if min(map(len, short_texts.values())) < 20:
        raise UserError(
            f"the labelled file has {len(short_texts[True])} toxic texts of 8 to {options.longest} characters and "
            f"{len(short_texts[False])} others: give one with at least 20 of each, or raise --longest"
        )
    rng = np.random.default_rng([options.world.seed, 0x7E])
    return [
        (request, lines[int(rng.integers(len(lines)))])
        for request, _ in exchanges
        for lines in [short_texts[options.world.family(request) is not None]]
    ]


def _write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
