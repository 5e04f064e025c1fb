"""A small model that chats: random weights under the chat template of a family."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from chat_families import tokenizer
from tba.engines.transformers import EngineSettings
from tba.models.huggingface import HuggingFace


def chat_llama(folder: Path, family: str = "qwen3", max_completion_tokens: int = 200, slots: int = 4) -> HuggingFace:
    """Returns a random Llama with a family's tokenizer whose next tokens are far from equally likely."""
    chat_tokenizer = tokenizer(family, "chat")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(chat_tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=chat_tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    settings = EngineSettings(slots=slots, max_completion_tokens=max_completion_tokens)
    return HuggingFace(str(folder), device="cpu", generation=settings)
