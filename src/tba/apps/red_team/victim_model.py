"""A victim in this process, sampled by the policy's own engine: an attack is read once for all answers to it.

Invariant: the same attacks in one call get the same answers (draws are seeded by the attacks and the settings), so that
a resumed run continues as it would have; torch's own generator is left as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.chat_prompts import chat_markup
from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.errors import UserError
from tba.generation import generate
from tba.gpus import visible_gpus
from tba.markup import control_tokens, encode_markup, encode_whole_text, fill_template, visible_text
from tba.policy.loading import no_bars, pretrained, readable
from tba.pretrained import SAFE
from tba.types import Prompt, Sampling


@dataclass
class VictimModel:
    """Answers attacks by a model in this process; its fields are those of `ModelVictim`."""

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
        is_bfloat16 = self.dtype == "bfloat16" or (self.dtype == "auto" and device == "cuda")
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        self.model, self.tokenizer = load_with_tokenizer(AutoModelForCausalLM, self.path, "victim", device, dtype)
        if self.template == "chat" and not getattr(self.tokenizer, "chat_template", None):
            raise UserError(f"the victim {self.path!r} has no chat template: give --task.victim.template a text")
        settings = EngineSettings(slots=self.rows_per_pass, max_completion_tokens=self.max_tokens)
        self._engine = TransformersEngine(self.model, self.tokenizer, settings)

    def answers(self, attacks: Sequence[str], count: int) -> list[list[str]]:
        """Returns `count` answers to each attack."""
        texts = [self._text(attack) for attack in attacks]
        draws = count if self.temperature > 0 else 1  # greedy answers are all the same
        completions = generate(
            self._engine,
            [self._prompt(text) for text in texts],
            draws,
            Sampling(self.temperature, self.top_p if self.temperature > 0 else 1.0),
            np.random.default_rng(_seed(self.seed, texts)),
        )
        return [[completion.text for completion in row] * (count // draws) for row in completions]

    def _text(self, attack: str) -> str:
        if self.template != "chat":
            return fill_template(control_tokens(self.tokenizer), self.template, attack=attack)
        return chat_markup(self.tokenizer, [{"role": "user", "content": attack}])

    def _prompt(self, text: str) -> Prompt:
        # A chat template writes the beginning of a text itself.
        encode = encode_markup if self.template == "chat" else encode_whole_text
        return Prompt("victim", np.array(encode(self.tokenizer, text), np.int32), visible_text(text))


def chosen_device(name: str) -> str:
    """Returns the device; `auto` is cuda, else mps, else cpu."""
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def expected_device(name: str) -> str:
    """Returns what `chosen_device` will return in a searcher, without starting CUDA here."""
    if name != "auto":
        return name
    return "cuda" if visible_gpus() else chosen_device(name)


def load_with_tokenizer(auto_class: Any, path: str, role: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns a model of that auto class, in evaluation mode, and its tokenizer. Raises `UserError` if it cannot."""
    with no_bars(), readable(f"no {role} can be loaded from {path!r}", "give a folder or a Hub name"):
        model = pretrained(auto_class, path, dtype)
        tokenizer = AutoTokenizer.from_pretrained(path, **SAFE)
    return model.to(device).eval(), tokenizer


def _seed(seed: int, texts: Sequence[str]) -> int:
    """Returns the seed of the draws, a digest of all that is asked."""
    digest = hashlib.blake2b(f"{seed}\0".encode(), digest_size=7)
    for text in texts:
        digest.update(text.encode() + b"\0")
    return int.from_bytes(digest.digest(), "little")
