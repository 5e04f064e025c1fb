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
from tba.markup import control_tokens, encoded
from tba.policy.loading import no_bars, pretrained, readable
from tba.pretrained import SAFE

REPORT = "reward_model.json"  # in a folder of `tba reward-model`: what it was made of, and its report


class Cut(Protocol):
    """A text as a reward model reads it."""

    @property
    def cut(self) -> int: ...


S = TypeVar("S", bound=Cut)


class Scorable(Protocol[S]):
    """A reward model, whatever form it reads texts in."""

    @property
    def max_tokens(self) -> int | None:
        """Returns the most tokens of prompt and response together; None: any number."""
        ...

    def read_all(self, pairs: Sequence[tuple[str, str]], max_tokens: int) -> list[S | None]:
        """Returns each (prompt, response) in the form it is read; None if it cannot be read."""
        ...

    def begin(self, texts: Sequence[S]) -> None:
        """Called once with the training data."""
        ...

    def scores(self, texts: Sequence[S]) -> Tensor:
        """Scores [N] of answers, with gradients."""
        ...

    def all_scores(self, texts: Sequence[S], max_tokens_per_pass: int) -> np.ndarray:
        """Returns scores [N] without gradients, in as many passes as it takes."""
        ...

    def parts(self, texts: Sequence[S], max_tokens: int) -> list[list[int]]:
        """Returns the indices of the texts, split into passes of at most `max_tokens`."""
        ...

    def trained(self) -> list[Parameter]:
        """Returns the parameters that training moves."""
        ...

    def save(self, folder: Path) -> None: ...


def unreadable(path: str) -> AbstractContextManager[None]:
    """Inside, what transformers raises for files that it cannot read is a `UserError` that names the reward model."""
    return readable(f"no reward model can be loaded from {path!r}", "give a folder or name")


def made_to_read(folder: Path) -> tuple[int, Literal["beginning", "end"]] | None:
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
class Text:
    """A prompt and a response as the model reads them."""

    tokens: tuple[int, ...]
    second: int  # where the response begins: an encoder tells the two apart
    cut: int  # tokens of the prompt that were left out


class RewardModel:
    """Scores of (prompt, response), in batches."""

    def __init__(
        self, model: Any, tokenizer: Any, max_tokens: int, keep: Literal["beginning", "end"], device: str = "cpu"
    ) -> None:
        self.model, self.tokenizer, self.max_tokens, self.keep = model.to(device).eval(), tokenizer, max_tokens, keep
        self._pair = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
        self._ends = [tokenizer.sep_token_id] if self._pair else [tokenizer.eos_token_id]
        if self._ends[0] is None:
            raise UserError("the tokenizer has neither EOS nor [SEP], so that no response would end: give one that has")
        # The head reads the last token that is no padding: EOS must not be taken for padding.
        self.pad = next(i for i in (tokenizer.pad_token_id, 0, 1) if i is not None and i != self._ends[0])
        model.config.pad_token_id = self.pad
        self._typed = self._pair and (getattr(model.config, "type_vocab_size", 0) or 0) > 1

    @classmethod
    def load(
        cls,
        path: str,
        max_tokens: int = 640,
        keep: Literal["beginning", "end"] = "end",
        device: str = "cpu",
        trained: bool = True,
    ) -> RewardModel:
        """Loads a folder or a Hub name. trained: it has a head with one score; else a new one is drawn if it has not.

        Raises `UserError` when it cannot be loaded.
        """
        with no_bars(), unreadable(path):
            model = pretrained(AutoModelForSequenceClassification, path, torch.float32, not trained, num_labels=1)
            tokenizer = AutoTokenizer.from_pretrained(path, **SAFE)
        return cls(model, tokenizer, positions(model.config, max_tokens), keep, device)

    def read(self, prompt: str, response: str) -> Text | None:
        """Returns prompt and response as tokens; None for a response that is too long by itself."""
        first = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        second = encoded(self.tokenizer, control_tokens(self.tokenizer).markup(response))
        begin = [self.tokenizer.cls_token_id] if self._pair else []
        middle = [self.tokenizer.sep_token_id] if self._pair else []
        room = self.max_tokens - len(begin) - len(middle) - len(second) - 1
        if room < 1:
            return None
        cut = max(0, len(first) - room)
        kept = first[:room] if self.keep == "beginning" else first[cut:]
        head = [*begin, *kept, *middle]
        return Text((*head, *second, *self._ends), len(head), cut)

    def read_all(self, pairs: Sequence[tuple[str, str]], max_tokens: int) -> list[Text | None]:
        """Returns `read` of each."""
        return [self.read(*pair) for pair in pairs]

    def begin(self, texts: Sequence[Text]) -> None:
        """Does nothing: no preparation is needed."""

    def trained(self) -> list[Parameter]:
        """Returns the parameters that are not frozen."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def parts(self, texts: Sequence[Text], max_tokens: int) -> list[list[int]]:
        return parts(texts, max_tokens)

    def scores(self, texts: Sequence[Text]) -> Tensor:
        """Returns [N], from one forward pass."""
        ids_NT, second_NT, there_NT = _padded(texts, self.pad)
        device = self.model.device
        more = {"token_type_ids": second_NT.to(device)} if self._typed else {}
        logits = self.model(input_ids=ids_NT.to(device), attention_mask=there_NT.to(device), **more).logits
        return logits[:, 0].float()

    @torch.no_grad()
    def all_scores(self, texts: Sequence[Text], max_tokens_per_pass: int = 16384) -> np.ndarray:
        """Returns [N] in as many passes as it takes, without gradients."""
        found = np.zeros(len(texts), np.float32)
        for part in parts(texts, max_tokens_per_pass):
            found[part] = self.scores([texts[i] for i in part]).cpu().numpy()
        return found

    def save(self, folder: Path) -> None:
        """Write the model and its tokenizer into a folder."""
        with no_bars():
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


def parts(texts: Sequence[Text], max_tokens: int) -> list[list[int]]:
    """Returns the texts' indices sorted by length, in parts of at most `max_tokens` padded tokens (or one text)."""
    found: list[list[int]] = []
    for i in sorted(range(len(texts)), key=lambda i: len(texts[i].tokens)):
        if not found or (len(found[-1]) + 1) * len(texts[i].tokens) > max_tokens:
            found.append([])
        found[-1].append(i)
    return found


def _padded(texts: Sequence[Text], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three [N, T]: tokens, whether each belongs to the response, and whether it is not padding."""
    longest = max(len(text.tokens) for text in texts)
    ids, second, there = (np.full((len(texts), longest), fill, np.int64) for fill in (pad, 0, 0))
    for row, text in enumerate(texts):
        n = len(text.tokens)
        ids[row, :n], second[row, text.second : n], there[row, :n] = text.tokens, 1, 1
    return torch.from_numpy(ids), torch.from_numpy(second), torch.from_numpy(there)


@dataclass(frozen=True)
class Scored:
    """A reward model that reads texts and scores them."""

    model: Scorable[Any]
    max_tokens_per_pass: int

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
        """Returns the score of each (prompt, response), None if the response is too long; equal ones are read once."""
        asked = list(dict.fromkeys(pairs))
        distinct = dict(zip(asked, self.model.read_all(asked, self.max_tokens_per_pass), strict=True))
        readable = [pair for pair, text in distinct.items() if text is not None]
        texts = [text for text in distinct.values() if text is not None]
        scores = self.model.all_scores(texts, self.max_tokens_per_pass).tolist() if texts else []
        found = dict(zip(readable, scores, strict=True))
        return [found.get(pair) for pair in pairs]
