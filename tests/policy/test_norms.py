"""Norms of accelerators: the same function in one kernel; on a CPU the model's own."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tba.policy.norms import fuse_norms, rms_norm

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def norms_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        (LlamaForCausalLM(LlamaConfig(**SHAPE)), 5),
        (Qwen3ForCausalLM(Qwen3Config(**SHAPE)), 9),  # with those of queries and keys
        (Gemma2ForCausalLM(Gemma2Config(**SHAPE)), 0),  # scales by 1 + weight
    ],
    ids=["llama", "qwen3", "gemma2"],
)
def test_norms_are_replaced_where_they_are_the_plain_ones(model: torch.nn.Module, fused: int) -> None:
    for _ in range(2):  # a second time changes nothing
        fuse_norms(model)
        assert sum("forward" in vars(norm) for norm in norms_of(model)) == fused
    copy = deepcopy(model)
    for norm in norms_of(copy):
        with torch.no_grad():
            norm.get_parameter("weight").fill_(3.0)  # its own, which the model does not see
    x = torch.randn(2, norms_of(model)[0].get_parameter("weight").shape[0])
    assert not torch.equal(norms_of(copy)[0](x), norms_of(model)[0](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_a_norm_is_the_models_own_to_the_bit_and_on_a_gpu_it_is_that_but_for_rounding(
    dtype: torch.dtype,
) -> None:
    plain = norms_of(LlamaForCausalLM(LlamaConfig(**SHAPE)))[0].to(dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        plain.get_parameter("weight").uniform_(0.5, 2.0)
    fused, x, grad = deepcopy(plain), torch.randn(64, 32).to(dtype), torch.randn(64, 32).to(dtype)
    fuse_norms(fused)
    assert torch.equal(fused(x), plain(x))

    def gradients(function: Any) -> list[torch.Tensor]:
        weight, of = plain.get_parameter("weight"), x.clone().requires_grad_()
        weight.grad = None
        out = function(of)
        out.backward(grad)
        assert of.grad is not None
        assert weight.grad is not None
        return [out.detach(), of.grad, weight.grad]

    one = gradients(lambda of: rms_norm(of, plain.get_parameter("weight"), plain.variance_epsilon))
    for ours, theirs in zip(one, gradients(plain), strict=True):
        # each number is rounded a few times on either way; the weight's gradient is a sum of 64
        assert float((ours - theirs).abs().max()) <= 8 * torch.finfo(dtype).eps * float(theirs.abs().max())
