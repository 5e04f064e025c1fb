"""A reward model: any causal or sequence-classification backbone with a scalar head, in the Hugging Face layout.

Invariant: training and scoring see the same tokens: those of the prompt and of the response, each tokenised alone, then
EOS (or, for an encoder, [CLS] prompt [SEP] response [SEP]). Texts that are too long lose tokens of the prompt only,
which the caller counts; a response is never cut.

Shape legend: N texts, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tba.engines.rules import positions
from tba.errors import UserError
from tba.json_input import read_json
from tba.markup import control_tokens, encode_markup
from tba.policy.loading import no_bars, pretrained, readable
from tba.pretrained import SAFE

REPORT = "reward_model.json"  # in a folder of `tba reward-model`: what it was made of, and its report


class CuttableText(Protocol):
    """A text as a reward model reads it."""

    @property
    def cut(self) -> int: ...


S = TypeVar("S", bound=CuttableText)


class Scorable(Protocol[S]):
    """A reward model, whatever form it reads texts in."""

    @property
    def max_tokens(self) -> int | None:
        """Returns the most tokens of prompt and response together; None: any number."""

    def read_all(self, pairs: Sequence[tuple[str, str]], max_tokens: int) -> list[S | None]:
        """Returns each (prompt, response) in the form it is read; None if it cannot be read."""

    def begin(self, texts: Sequence[S]) -> None:
        """Prepares the model for the training data, once."""

    def scores(self, texts: Sequence[S]) -> Tensor:
        """Returns scores [N] of answers, with gradients."""

    def all_scores(self, texts: Sequence[S], max_tokens_per_pass: int) -> np.ndarray:
        """Returns scores [N] without gradients, in as many passes as it takes."""

    def passes(self, texts: Sequence[S], max_tokens: int) -> list[list[int]]:
        """Returns the indices of the texts, split into passes of at most `max_tokens`."""

    def trained_parameters(self) -> list[Parameter]:
        """Returns the parameters that training moves."""

    def save(self, folder: Path) -> None: ...


def naming_load_errors(path: str) -> AbstractContextManager[None]:
    """Turns errors of transformers about files that it cannot read into a `UserError` that names the reward model."""
    return readable(f"no reward model can be loaded from {path!r}", "give a folder or name")


def trained_lengths(folder: Path) -> tuple[int, Literal["beginning", "end"]] | None:
    """Returns (tokens, the part of a longer prompt that stays) that the model was trained with; None if not recorded.

    Raises `UserError` when what is recorded makes no sense.
    """
    path = folder / REPORT
    if not path.is_file():
        return None
    remedy = "it says how the model reads: make that again"
    if read_json(path, remedy, reads=dict[str, Any] | None).get("reads") is None:  # of an earlier version, or frozen
        return None
    reads = read_json(path, remedy, reads={"max_tokens": int, "keep": Literal["beginning", "end"]})["reads"]
    return reads["max_tokens"], reads["keep"]


@dataclass(frozen=True, slots=True)
class TokenisedText:
    """A prompt and a response as the model reads them."""

    tokens: tuple[int, ...]
    response_start: int  # where the response begins: an encoder tells the two apart
    cut: int  # tokens of the prompt that were left out


class RewardModel:
    """Scores (prompt, response) by a backbone with a scalar head, in batches."""

    def __init__(
        self, model: Any, tokenizer: Any, max_tokens: int, keep: Literal["beginning", "end"], device: str = "cpu"
    ) -> None:
        self.model, self.tokenizer, self.max_tokens, self.keep = model.to(device).eval(), tokenizer, max_tokens, keep
        self._is_pair_model = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
        self._end_tokens = [tokenizer.sep_token_id] if self._is_pair_model else [tokenizer.eos_token_id]
        if self._end_tokens[0] is None:
            raise UserError("the tokenizer has neither EOS nor [SEP], so that no response would end: give one that has")
        # The head reads the last token that is no padding: EOS must not be taken for padding.
        self.pad = next(i for i in (tokenizer.pad_token_id, 0, 1) if i is not None and i != self._end_tokens[0])
        model.config.pad_token_id = self.pad
        self._has_token_types = self._is_pair_model and (getattr(model.config, "type_vocab_size", 0) or 0) > 1

    @classmethod
    def load(
        cls,
        path: str,
        max_tokens: int = 640,
        keep: Literal["beginning", "end"] = "end",
        device: str = "cpu",
        has_head: bool = True,
    ) -> RewardModel:
        """Loads a folder or a Hub name. has_head: it has a head with one score; else a new one is drawn if it has not.

        Raises `UserError` when it cannot be loaded.
        """
        with no_bars(), naming_load_errors(path):
            model = pretrained(AutoModelForSequenceClassification, path, torch.float32, not has_head, num_labels=1)
            tokenizer = AutoTokenizer.from_pretrained(path, **SAFE)
        return cls(model, tokenizer, positions(model.config, max_tokens), keep, device)

    def read(self, prompt: str, response: str) -> TokenisedText | None:
        """Returns prompt and response as tokens; None for a response that is too long by itself."""
        prompt_tokens = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        response_tokens = encode_markup(self.tokenizer, control_tokens(self.tokenizer).markup(response))
        start_tokens = [self.tokenizer.cls_token_id] if self._is_pair_model else []
        middle_tokens = [self.tokenizer.sep_token_id] if self._is_pair_model else []
        room = self.max_tokens - len(start_tokens) - len(middle_tokens) - len(response_tokens) - 1
        if room < 1:
            return None
        cut_tokens = max(0, len(prompt_tokens) - room)
        prompt_part = prompt_tokens[:room] if self.keep == "beginning" else prompt_tokens[cut_tokens:]
        head_tokens = [*start_tokens, *prompt_part, *middle_tokens]
        return TokenisedText((*head_tokens, *response_tokens, *self._end_tokens), len(head_tokens), cut_tokens)

    def read_all(self, pairs: Sequence[tuple[str, str]], max_tokens: int) -> list[TokenisedText | None]:
        """Returns `read` of each pair."""
        return [self.read(*pair) for pair in pairs]

    def begin(self, texts: Sequence[TokenisedText]) -> None:
        """Does nothing: no preparation is needed."""

    def trained_parameters(self) -> list[Parameter]:
        """Returns the parameters that are not frozen."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def passes(self, texts: Sequence[TokenisedText], max_tokens: int) -> list[list[int]]:
        return length_batches(texts, max_tokens)

    def scores(self, texts: Sequence[TokenisedText]) -> Tensor:
        """Returns [N], from one forward pass."""
        ids_NT, response_NT, mask_NT = _padded(texts, self.pad)
        device = self.model.device
        token_types = {"token_type_ids": response_NT.to(device)} if self._has_token_types else {}
        logits = self.model(input_ids=ids_NT.to(device), attention_mask=mask_NT.to(device), **token_types).logits
        return logits[:, 0].float()

    @torch.no_grad()
    def all_scores(self, texts: Sequence[TokenisedText], max_tokens_per_pass: int = 16384) -> np.ndarray:
        """Returns [N] in as many passes as it takes, without gradients."""
        score_N = np.zeros(len(texts), np.float32)
        for indices in length_batches(texts, max_tokens_per_pass):
            score_N[indices] = self.scores([texts[i] for i in indices]).cpu().numpy()
        return score_N

    def save(self, folder: Path) -> None:
        """Write the model and its tokenizer into a folder."""
        with no_bars():
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


def length_batches(texts: Sequence[TokenisedText], max_tokens: int) -> list[list[int]]:
    """Returns the texts' indices sorted by length, in parts of at most `max_tokens` padded tokens (or one text)."""
    batches: list[list[int]] = []
    for i in sorted(range(len(texts)), key=lambda i: len(texts[i].tokens)):
        if not batches or (len(batches[-1]) + 1) * len(texts[i].tokens) > max_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def _padded(texts: Sequence[TokenisedText], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three [N, T]: tokens, whether each belongs to the response, and whether it is not padding."""
    longest = max(len(text.tokens) for text in texts)
    token_NT, response_NT, mask_NT = (np.full((len(texts), longest), fill, np.int64) for fill in (pad, 0, 0))
    for row, text in enumerate(texts):
        n = len(text.tokens)
        token_NT[row, :n], response_NT[row, text.response_start : n], mask_NT[row, :n] = text.tokens, 1, 1
    return torch.from_numpy(token_NT), torch.from_numpy(response_NT), torch.from_numpy(mask_NT)


@dataclass(frozen=True)
class PairScorer:
    """A reward model that reads texts and scores them."""

    model: Scorable[Any]
    max_tokens_per_pass: int

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
        """Returns the score of each (prompt, response), None if the response is too long; equal ones are read once."""
        distinct_pairs = list(dict.fromkeys(pairs))
        read_texts = self.model.read_all(distinct_pairs, self.max_tokens_per_pass)
        text_by_pair = dict(zip(distinct_pairs, read_texts, strict=True))
        readable_pairs = [pair for pair, text in text_by_pair.items() if text is not None]
        texts = [text for text in text_by_pair.values() if text is not None]
        scores = self.model.all_scores(texts, self.max_tokens_per_pass).tolist() if texts else []
        score_by_pair = dict(zip(readable_pairs, scores, strict=True))
        return [score_by_pair.get(pair) for pair in pairs]
