"""Toxicity by logistic regression on words and pairs of words, trained with scikit-learn (the extra `red-team`).

Invariant: a saved classifier consists of numbers and settings only (`weights.safetensors`, `classifier.json`), so that
nothing is unpickled; a loaded one scores as the trained one did. Words are hashed: no text of the training data is
kept.

Shape legend: N texts, F features.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tba.errors import UserError
from tba.json_input import parse_json
from tba.pretrained import UNREADABLE
from tba.types import Json

WEIGHTS, FACTS = "weights.safetensors", "classifier.json"
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class WordFeatures:
    """How texts become features, and how strongly the weights are regularised."""

    features: int = 2**18  # buckets that words and pairs of words are hashed to
    longest_gram: int = 2  # longest n-gram that is a feature, in words
    inverse_penalty: float = 10.0  # C of the logistic regression: higher fits the training data more closely

    def __post_init__(self) -> None:
        if self.features < 2 or self.longest_gram < 1 or not self.inverse_penalty > 0:
            raise UserError(f"{self} cannot be: give 2 features or more, grams of 1 word or more and a penalty > 0")

    def hashed(self, texts: Sequence[str]) -> Any:
        """Returns [N, F] sparse: which words are in which text."""
        return (
            _sklearn("feature_extraction.text")
            .HashingVectorizer(
                n_features=self.features,
                ngram_range=(1, self.longest_gram),
                token_pattern=r"(?u)\b\w+\b",  # noqa: S106 - a pattern of words
                alternate_sign=False,
                binary=True,
                norm=None,
            )
            .transform(texts)
        )


@dataclass(frozen=True)
class WordWeights:
    """A classifier that has been trained: log P(toxic) = log sigmoid(normalised(words x rarity) . weight + bias)."""

    settings: WordFeatures
    rarity_F: _Floats  # inverse document frequencies
    weight_F: _Floats
    bias: float

    @classmethod
    def train(cls, texts: Sequence[str], toxic: Sequence[bool], settings: WordFeatures) -> WordWeights:
        """Trains a classifier; both classes weigh the same. Raises `UserError` unless there are texts of both."""
        refuse_single_class(toxic)
        words = settings.hashed(texts)
        count_F = np.asarray(words.sum(axis=0)).ravel()
        rarity_F = np.log((1 + len(texts)) / (1 + count_F)) + 1  # smoothed, as scikit-learn's own
        weight_F, bias = regression(_normalised(words, rarity_F), toxic, settings.inverse_penalty)
        return cls(settings, rarity_F, weight_F, bias)

    def margins(self, texts: Sequence[str]) -> _Floats:
        """Returns [N], the logit of each text."""
        if not texts:
            return np.zeros(0)
        margin_N: _Floats = _normalised(self.settings.hashed(texts), self.rarity_F) @ self.weight_F + self.bias
        return margin_N

    def log_toxic(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Returns log P(toxic) of each (attack, answer), from the answer alone."""
        return log_sigmoid(self.margins([answer for _, answer in pairs]))

    def save(self, folder: Path, facts: Json) -> None:
        """Write weights, settings and `facts` to the folder."""
        save_file({"rarity": self.rarity_F, "weight": self.weight_F, "bias": np.array([self.bias])}, folder / WEIGHTS)
        (folder / FACTS).write_text(json.dumps({"settings": asdict(self.settings), **facts}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str) -> WordWeights:
        """Loads a saved classifier. Raises `UserError` when the folder has none, or scikit-learn is missing."""
        _sklearn("feature_extraction.text")
        folder = Path(path)
        try:
            settings = WordFeatures(**parse_json((folder / FACTS).read_bytes(), settings=WordFeatures)["settings"])
            tensors = load_file(folder / WEIGHTS)
            rarity_F, weight_F, bias = tensors["rarity"], tensors["weight"], float(tensors["bias"][0])
        except UNREADABLE as error:
            raise UserError(
                f"no word classifier can be loaded from {path!r} ({type(error).__name__}): give a folder that `tba "
                "red-team classifier FILE --out DIR` made"
            ) from error
        if rarity_F.shape != (settings.features,) or weight_F.shape != (settings.features,):
            raise UserError(f"the word classifier in {path!r} does not fit its settings: make it again")
        return cls(settings, rarity_F, weight_F, bias)


def _normalised(words: Any, rarity_F: _Floats) -> Any:
    """Returns [N, F] sparse, rows of length 1."""
    return _sklearn("preprocessing").normalize(words.multiply(rarity_F).tocsr())


def refuse_single_class(toxic: Sequence[bool]) -> None:
    """Raises `UserError` unless there are texts of both kinds."""
    if len(set(toxic)) < 2:
        raise UserError("a classifier learns from texts of both kinds, toxic and not: give a file with both")


def regression(features: Any, toxic: Sequence[bool], inverse_penalty: float) -> tuple[_Floats, float]:
    """Returns weights and bias of a logistic regression in which both classes weigh the same."""
    model = _sklearn("linear_model").LogisticRegression(C=inverse_penalty, class_weight="balanced", max_iter=1000)
    model.fit(features, np.asarray(toxic, dtype=bool))
    return model.coef_[0].astype(np.float64), float(model.intercept_[0])


def log_sigmoid(margins: _Floats) -> list[float]:
    """Returns log P(toxic) for each logit."""
    logs: list[float] = (-np.logaddexp(0.0, -margins)).tolist()
    return logs


def _sklearn(name: str) -> Any:
    """Returns a module of scikit-learn. Raises `UserError` when it is not installed."""
    import importlib

    try:
        return importlib.import_module(f"sklearn.{name}")
    except ImportError as error:
        raise UserError(
            "toxicity classifiers of words or sentences need scikit-learn: `pip install scikit-learn`, or choose a "
            "recipe with another classifier"
        ) from error
