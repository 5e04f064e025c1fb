"""A victim in this process, sampled by the transformers library's own `generate`, which takes any causal model.

Invariant: the same attacks in one call get the same answers (draws are seeded by the attacks and the settings), so that
a resumed run continues as it would have; torch's own generator is left as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from tba.errors import UserError
from tba.foreign import SAFE, SAFE_MODEL, UNREADABLE, templated


@dataclass
class VictimModel:
    """An `Answering` (see `victim`); its fields are those of `ModelVictim`."""

    path: str
    template: str
    temperature: float
    top_p: float
    max_tokens: int
    device: str
    dtype: str
    rows_per_pass: int
    seed: int

    def __post_init__(self) -> None:
        device = chosen_device(self.device)
        low = self.dtype == "bfloat16" or (self.dtype == "auto" and device == "cuda")
        dtype = torch.bfloat16 if low else torch.float32
        self.model, self.tokenizer = loaded(AutoModelForCausalLM, self.path, "victim", device, dtype)
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.template == "chat" and not getattr(self.tokenizer, "chat_template", None):
            raise UserError(f"the victim {self.path!r} has no chat template: give --task.victim.template a text")

    def answers(self, attacks: Sequence[str], count: int) -> list[list[str]]:
        """Returns `count` answers to each, sampled in passes of attacks of about equal length."""
        texts = [self._read(attack) for attack in attacks]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        size = max(1, self.rows_per_pass // count)
        found: list[list[str]] = [[] for _ in texts]
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            for i, said in zip(chosen, self._sample([texts[i] for i in chosen], count), strict=True):
                found[i] = said
        return found

    def _read(self, attack: str) -> str:
        if self.template != "chat":
            return self.template.replace("{attack}", attack)
        messages = [{"role": "user", "content": attack}]
        return templated(self.tokenizer, messages)

    def _sample(self, texts: Sequence[str], count: int) -> list[list[str]]:
        # A chat template writes the beginning of a text itself.
        encoded = self.tokenizer(
            list(texts), return_tensors="pt", padding=True, add_special_tokens=self.template != "chat"
        ).to(self.model.device)
        drawn: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.inference_mode(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(_seed(self.seed, texts))
            said = self.model.generate(
                input_ids=encoded["input_ids"],
                attention_mask=encoded["attention_mask"],
                max_new_tokens=self.max_tokens,
                num_return_sequences=count if self.temperature > 0 else 1,
                pad_token_id=self.tokenizer.pad_token_id,
                **drawn,
            )
        answers = self.tokenizer.batch_decode(said[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
        if self.temperature == 0:
            return [[answer] * count for answer in answers]
        return [answers[i * count : (i + 1) * count] for i in range(len(texts))]


def chosen_device(name: str) -> str:
    """Returns the device; `auto` is cuda, else mps, else cpu."""
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def loaded(kind: Any, path: str, what: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns a model of that auto class, in evaluation mode, and its tokenizer. Raises `UserError` if it cannot."""
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = kind.from_pretrained(path, dtype=dtype, **SAFE_MODEL)
        tokenizer = AutoTokenizer.from_pretrained(path, **SAFE)
    except UNREADABLE as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"no {what} can be loaded from {path!r} ({reason}): give a folder or a Hub name") from error
    finally:
        if drawn:
            logging.enable_progress_bar()
    return model.to(device).eval(), tokenizer


def _seed(seed: int, texts: Sequence[str]) -> int:
    """Returns a seed for torch's generator, a digest of all that is asked."""
    digest = hashlib.blake2b(f"{seed}\0".encode(), digest_size=7)
    for text in texts:
        digest.update(text.encode() + b"\0")
    return int.from_bytes(digest.digest(), "little")
