"""How much of what a processor can compute a run uses, against operations counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from tba.models.arithmetic import Arithmetic, passes, product_rate, shape_of
from tba.models.huggingface import HuggingFace
from tba.models.memory import Shape
from tba.policy.lora import LoraSettings
from tba.settings import find


def test_a_share_is_operations_per_second_over_the_best_rate() -> None:
    arithmetic = Arithmetic(read=2e6, scored=3e6, passes=3, rate=1e9)
    assert arithmetic.share(100, 50, seconds=7) == pytest.approx((200 + 150) * 1e6 / 7 / 1e9)
    assert arithmetic.share(100, 50, seconds=0) == 0


def test_a_token_costs_what_torch_counts_without_attention() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=200
    )
    shape, tokens = Shape.of(config), 40
    with FlopCounterMode(display=False) as counter:
        LlamaForCausalLM(config)(torch.ones(1, tokens, dtype=torch.long))
    counted = counter.get_flop_counts()["Global"]
    products = sum(
        n for operation, n in counted.items() if "attention" not in str(operation) and "bmm" not in str(operation)
    )
    matrices = 2 * (shape.matrices + shape.vocabulary * shape.width) * tokens
    assert products == matrices
    assert shape.operations(tokens, tokens) == pytest.approx(matrices, rel=0.02)  # counts the norms too


def test_a_model_that_is_not_prepared_or_no_transformer_has_none() -> None:
    model = find("quickstart").model
    assert isinstance(model, HuggingFace)
    assert shape_of(model) is None
    assert Arithmetic.of(object(), torch.device("cpu")) is None
    assert passes(model) == 3
    assert passes(replace(model, lora=LoraSettings(rank=4))) == 2


def test_a_product_takes_time() -> None:
    assert 1e8 < product_rate(torch.float32, torch.device("cpu")) < 1e14
