"""A reward model with a frozen backbone: similarities of sentence embeddings, and a linear head on them.

It is for machines on which a backbone cannot be trained: the head on the features `similarity.NAMES` trains in seconds.
The document is read whole, however long it is.

Invariant: a sentence is embedded once while it is cached, whichever answer it is in; features are clipped at three
standard deviations of the training data, so that no answer is scored far outside of what was seen.

Shape legend: N texts, F features, T tokens of the longest, H numbers of an embedding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from tba.apps.preference.scoring import PairScorer, RewardModel, naming_load_errors, trained_lengths
from tba.apps.preference.similarity import NAMES, Floats, features, split_sentences
from tba.errors import UserError
from tba.json_input import read_json
from tba.markup import pad_texts
from tba.models.arithmetic import judge_bytes
from tba.policy.loading import no_bars, pretrained
from tba.pretrained import SAFE, UNREADABLE

HEAD, FACTS = "head.safetensors", "frozen.json"
CACHED_SENTENCES = 50_000  # sentences
SENTENCE_TOKENS = 128  # of a sentence; what comes after is not read
CLIP_DEVIATIONS = 3.0  # standard deviations


@dataclass(frozen=True, slots=True)
class TextFeatures:
    """Holds the features of a prompt and a response."""

    values: Floats  # [F]
    cut: int = 0  # tokens of the prompt that were left out: none


class CachedSentenceEncoder:
    """Embeds sentences: the mean of a frozen backbone's last layer over a sentence's tokens, at norm 1."""

    def __init__(self, model: Any, tokenizer: Any, device: str = "cpu") -> None:
        self.model, self.tokenizer = model.to(device).eval(), tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self._cache: dict[str, Floats] = {}

    @classmethod
    def load(cls, path: str, device: str = "cpu") -> CachedSentenceEncoder:
        """Loads a folder or a Hub name. Raises `UserError` when it cannot be loaded."""
        with no_bars(), naming_load_errors(path):
            model = pretrained(AutoModel, path, torch.float32, headless=True)
            tokenizer = AutoTokenizer.from_pretrained(path, **SAFE)
        return cls(model, tokenizer, device)

    def embed(self, texts: Sequence[str], max_tokens: int) -> list[Floats]:
        """Returns [H] for each text, in passes of at most `max_tokens` padded tokens."""
        missing_texts = [text for text in dict.fromkeys(texts) if text not in self._cache]
        if missing_texts and len(self._cache) + len(missing_texts) > CACHED_SENTENCES:
            self._cache.clear()
            missing_texts = list(dict.fromkeys(texts))
        missing_texts.sort(key=len)
        start = 0
        while start < len(missing_texts):
            size = max(1, max_tokens // (2 + max(1, len(missing_texts[start]) // 3)))
            batch = missing_texts[start : start + size]
            self._cache.update(zip(batch, self._pass(batch), strict=True))
            start += len(batch)
        return [self._cache[text] for text in texts]

    @torch.inference_mode()
    def _pass(self, texts: list[str]) -> Floats:
        batch = pad_texts(self.tokenizer, texts, SENTENCE_TOKENS).to(self.model.device)
        hidden_NTH = self.model(**batch).last_hidden_state.float()
        mask_NT1 = batch["attention_mask"][..., None]
        mean_NH = (hidden_NTH * mask_NT1).sum(1) / mask_NT1.sum(1).clamp(min=1)
        unit_NH: Floats = torch.nn.functional.normalize(mean_NH, dim=1).cpu().numpy()
        return unit_NH


class FrozenRewardModel:
    """Scores (prompt, response) by a weighted sum of standardised features."""

    max_tokens: int | None = None

    def __init__(self, encoder: CachedSentenceEncoder, weight_F: Tensor, mean_F: Tensor, scale_F: Tensor) -> None:
        self.encoder = encoder
        self.weight_F, self.mean_F, self.scale_F = Parameter(weight_F), mean_F, scale_F

    @classmethod
    def new(cls, encoder: CachedSentenceEncoder) -> FrozenRewardModel:
        """Returns a reward model with a head of zeros."""
        size = len(NAMES)
        return cls(encoder, torch.zeros(size), torch.zeros(size), torch.ones(size))

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> FrozenRewardModel:
        """Loads what `save` wrote. Raises `UserError` for one with other features."""
        recorded_names = read_json(folder / FACTS, "make the reward model again", features=list[str])["features"]
        if recorded_names != list(NAMES):
            raise UserError(f"the reward model in {folder} has other features than this version: make it again")
        try:
            head = load_file(folder / HEAD)
            weight, mean, scale = (head[name].reshape(len(NAMES)) for name in ("weight", "mean", "scale"))
        except UNREADABLE as error:
            raise UserError(f"the reward model's head in {folder} cannot be read ({error}): make it again") from error
        return cls(CachedSentenceEncoder.load(str(folder), device), weight, mean, scale)

    def read_all(self, pairs: Sequence[tuple[str, str]], max_tokens: int) -> list[TextFeatures | None]:
        """Returns features for each (prompt, response); None if either has no sentence."""
        sentences_by_text = {text: split_sentences(text) for pair in pairs for text in pair}
        all_sentences = list(dict.fromkeys(chain.from_iterable(sentences_by_text.values())))
        embeddings = dict(zip(all_sentences, self.encoder.embed(all_sentences, max_tokens), strict=True))
        matrices = {
            text: np.stack([embeddings[sentence] for sentence in row]) for text, row in sentences_by_text.items() if row
        }
        return [
            TextFeatures(features(*pair, matrices[pair[0]], matrices[pair[1]]))
            if pair[0] in matrices and pair[1] in matrices
            else None
            for pair in pairs
        ]

    def begin(self, texts: Sequence[TextFeatures]) -> None:
        """Set the standardisation from the training data."""
        values_NF = np.stack([text.values for text in texts])
        self.mean_F = torch.from_numpy(values_NF.mean(0))
        self.scale_F = torch.from_numpy(np.maximum(values_NF.std(0), 1e-4))

    def scores(self, texts: Sequence[TextFeatures]) -> Tensor:
        """Returns scores [N] of answers, with gradients."""
        values_NF = torch.from_numpy(np.stack([text.values for text in texts]))
        return ((values_NF - self.mean_F) / self.scale_F).clamp(-CLIP_DEVIATIONS, CLIP_DEVIATIONS) @ self.weight_F

    @torch.no_grad()
    def all_scores(self, texts: Sequence[TextFeatures], max_tokens_per_pass: int = 0) -> Floats:
        """Returns scores [N] of answers, without gradients."""
        score_N: Floats = self.scores(texts).numpy() if texts else np.zeros(0, np.float32)
        return score_N

    def passes(self, texts: Sequence[TextFeatures], max_tokens: int) -> list[list[int]]:
        """Returns one part with all texts: the backbone has been run already."""
        return [list(range(len(texts)))]

    def trained_parameters(self) -> list[Parameter]:
        return [self.weight_F]

    def save(self, folder: Path) -> None:
        """Write backbone and tokenizer in the Hugging Face layout, and the head."""
        with no_bars():
            self.encoder.model.save_pretrained(folder)
            self.encoder.tokenizer.save_pretrained(folder)
        head = {"weight": self.weight_F.detach(), "mean": self.mean_F, "scale": self.scale_F}
        save_file({name: tensor.contiguous() for name, tensor in head.items()}, folder / HEAD)
        weights = {name: round(float(weight), 4) for name, weight in zip(NAMES, head["weight"], strict=True)}
        facts = {"features": list(NAMES), "weights": weights}
        (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def load_scorer(
    path: str, max_tokens: int, keep: Literal["beginning", "end"], device: str, max_tokens_per_pass: int
) -> PairScorer:
    """Returns a scorer with the reward model at a path, of either kind. Raises `UserError` when it cannot be loaded.

    For a model made by `tba reward-model`, the lengths that it was trained with (they are in its folder) override
    those given here.
    """
    if (Path(path) / FACTS).is_file():
        return PairScorer(FrozenRewardModel.load(Path(path), device), max_tokens_per_pass)
    recorded_lengths = trained_lengths(Path(path))
    if recorded_lengths is not None:
        max_tokens, keep = recorded_lengths
    return PairScorer(RewardModel.load(path, max_tokens, keep, device), max_tokens_per_pass)


def reward_model_bytes(path: str, max_tokens_per_pass: int) -> int:
    """Returns the bytes that the reward model at a path needs, of either kind; 0 where that is not known."""
    auto_class = AutoModel if (Path(path) / FACTS).is_file() else AutoModelForSequenceClassification
    return judge_bytes(path, auto_class, max_tokens_per_pass)
