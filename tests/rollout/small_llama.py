"""A small model with weights of its own, for tests that score what it samples."""

from __future__ import annotations

from pathlib import Path

import torch

from tba.engines.transformers import EngineSettings
from tba.models.huggingface import HuggingFace
from tba.training.tiny_models import ScratchModel, character_tokenizer


def small_llama(folder: Path) -> HuggingFace:
    """A random Llama of 16 characters whose next tokens are far from equally likely."""
    tokenizer = character_tokenizer("0123456789+=. ")
    model = ScratchModel(hidden_size=32, layers=2, heads=2, ff_size=48, max_positions=32).start(tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return HuggingFace(str(folder), device="cpu", generation=EngineSettings(slots=7, max_completion_tokens=10))
