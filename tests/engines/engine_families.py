"""Small random models of the six families, and prompts for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tba.types import Prompt

VOCABULARY = 29
EOS = 1
WINDOW = 6
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_GROUPED = _SHAPE | {"num_key_value_heads": 2, "head_dim": 16}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_GROUPED)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_embd=32, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=64, bos_token_id=0, eos_token_id=EOS
        )
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_GROUPED, sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **_GROUPED,
            sliding_window=WINDOW,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            layer_types=_LAYERS,
            attn_implementation="eager",
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_GROUPED, sliding_window=WINDOW, layer_types=_LAYERS)),
}


class Letters:
    """A tokenizer of one letter per token; token 1 is EOS and special."""

    eos_token_id = EOS

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - ord("a") + 2 for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + i - 2) for i in token_ids if i > EOS)


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model in evaluation mode, its matrices wide enough for probabilities that depend on the context."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=1.2 / parameter.shape[-1] ** 0.5)
    return model.eval()


def ragged_prompts(*lengths: int, seed: int = 0) -> list[Prompt]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [Prompt("test", rng.integers(2, VOCABULARY, n).astype(np.int32)) for n in lengths]


@torch.no_grad()
def plain_log_probabilities(
    model: PreTrainedModel, prompt: Prompt, tokens: np.ndarray, temperature: float = 1.0
) -> torch.Tensor:
    """[T, V]: log-probabilities at the completion's positions by the model's plain forward, one row, no cache."""
    sequence = torch.from_numpy(np.concatenate([prompt.tokens, tokens]).astype(np.int64))[None]
    logits = model(input_ids=sequence, use_cache=False).logits[0, len(prompt.tokens) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)
