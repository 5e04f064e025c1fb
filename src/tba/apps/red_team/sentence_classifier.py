"""Toxicity by logistic regression on sentence embeddings: other features than words, for a second opinion.

Invariant: as with `word_classifier`, a saved classifier is numbers and settings only: nothing is unpickled, and no text
of the training data is kept.

Shape legend: N texts, W width of an embedding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tba.apps.red_team.embedding import SentenceEmbedder
from tba.apps.red_team.word_classifier import FACTS, WEIGHTS, log_sigmoid, refuse_single_class, regression
from tba.errors import UserError
from tba.json_input import parse_json
from tba.pretrained import UNREADABLE
from tba.types import Json

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SentenceWeights:
    """A classifier that has been trained: log P(toxic) = log sigmoid(embedding . weight + bias)."""

    encoder: SentenceEmbedder
    weight_W: _Floats
    bias: float

    @classmethod
    def train(
        cls, texts: Sequence[str], toxic: Sequence[bool], inverse_penalty: float, encoder: SentenceEmbedder
    ) -> SentenceWeights:
        """Trains a classifier; both classes weigh the same. Raises `UserError` unless there are texts of both."""
        refuse_single_class(toxic)
        return cls(encoder, *regression(encoder.embed(texts), toxic, inverse_penalty))

    def margins(self, texts: Sequence[str]) -> _Floats:
        """Returns [N], the logit of each text."""
        if not texts:
            return np.zeros(0)
        margin_N: _Floats = self.encoder.embed(texts) @ self.weight_W + self.bias
        return margin_N

    def log_toxic(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Returns log P(toxic) of each (attack, answer), from the answer alone."""
        return log_sigmoid(self.margins([answer for _, answer in pairs]))

    def save(self, folder: Path, facts: Json) -> None:
        """Write weights and `facts` to the folder; the embeddings' model is not copied."""
        save_file({"weight": self.weight_W, "bias": np.array([self.bias])}, folder / WEIGHTS)
        (folder / FACTS).write_text(json.dumps({"features": "sentences", **facts}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str, encoder: SentenceEmbedder) -> SentenceWeights:
        """Loads a saved classifier. Raises `UserError` when the folder has none, or one of other embeddings."""
        try:
            tensors = load_file(Path(path) / WEIGHTS)
            weight_W, bias = tensors["weight"], float(tensors["bias"][0])
        except UNREADABLE as error:
            raise UserError(
                f"no classifier can be loaded from {path!r} ({type(error).__name__}): give a folder that `tba red-team "
                "classifier FILE --features sentences --out DIR` made"
            ) from error
        if weight_W.shape != (encoder.model.config.hidden_size,):
            raise UserError(f"the classifier in {path!r} is of other sentence embeddings: make it again")
        return cls(encoder, weight_W, bias)


def reads_sentences(path: str) -> bool:
    """Returns whether a folder's classifier reads sentence embeddings, not words."""
    try:
        return parse_json((Path(path) / FACTS).read_bytes()).get("features") == "sentences"
    except UNREADABLE:
        return False
