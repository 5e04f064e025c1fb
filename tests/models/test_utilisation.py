"""How much of what a processor can compute a run uses, against operations counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

from tba.models.arithmetic import forwards_per_update, shape_of
from tba.models.huggingface import HuggingFace
from tba.models.memory import Shape
from tba.protocols import ComputeCost
from tba.runtime.reporting import utilisation
from tba.settings import find


def test_a_share_is_operations_per_second_over_the_best_rate() -> None:
    arithmetic = ComputeCost(read=2e6, scored=3e6, passes=3, rate=1e9)
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
    assert shape_of(object()) is None
    assert (forwards_per_update(0), forwards_per_update(16)) == (3, 2)


def test_a_run_is_told_what_it_computed_over_all_lives_of_its_searchers() -> None:
    cost = ComputeCost(read=1e6, scored=2e6, passes=3, rate=1e9)
    computed = {"read": 600, "scored": 200, "milliseconds": 4000}
    searcher = {
        "generated_tokens": 300,  # of which 100 were said by environments
        "observed_tokens": 100,
        "auxiliary_tokens": 50,
        "asked_tokens": 150,
        "generating_milliseconds": 2000,
    }
    owners = {"searcher-0": searcher, "searcher-1": searcher, "replay": {"evicted_tokens": 9}}
    found = utilisation(cost, computed, 2, owners)
    assert found["trainer"] == pytest.approx(3 * (600 * 1e6 + 200 * 2e6) / (2 * 4.0 * 1e9))
    assert found["searchers"] == pytest.approx(2 * (500 * 1e6 + 250 * 2e6) / (2 * 2.0 * 1e9))
    assert utilisation(cost, computed, 2, {"import": {"imported_tokens": 5}}).keys() == {"trainer"}  # offline
    assert utilisation(None, {}, 1, {"searcher-0": searcher}) == {}
    assert utilisation(cost, {}, 1, {}) == {}


def test_a_model_with_experts_has_none(tmp_path: Path) -> None:
    experts = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=50
    )
    experts.save_pretrained(tmp_path)
    assert HuggingFace(path=str(tmp_path), device="cpu").arithmetic() is None
    LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=50).save_pretrained(tmp_path)
    found = HuggingFace(path=str(tmp_path), device="cpu").arithmetic()
    assert found is not None
    assert (found.scored, found.passes) == (2 * 50 * 32, 3)
