"""Adapters: our forward of few kernels is peft's, and its gradient too."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tba.policy.lora import LoraSettings, add_adapters, copy_on_same_base, is_adapter, switch_adapters

pytest.importorskip("peft")


def adapted(dtype: torch.dtype = torch.float32, bias: bool = False) -> PreTrainedModel:
    """Two layers with adapters that are not zero."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=bias,
    )
    model = add_adapters(LlamaForCausalLM(config).to(dtype), LoraSettings(rank=4, alpha=8.0), torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.normal_(std=0.2)
    return model


def as_peft_does(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with the forward of peft's own layers."""
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.forward = MethodType(type(module).forward, module)
    return model


def logits_and_gradients(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(torch.arange(24).view(2, 12)).logits
    logits.float().square().sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bias", [False, True])
def test_the_forward_and_its_gradient_are_those_of_peft(bias: bool) -> None:
    ours, theirs = adapted(torch.float64, bias), as_peft_does(adapted(torch.float64, bias))
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.data = parameter.data.double()
    logits, gradients = logits_and_gradients(ours)
    expected, expected_gradients = logits_and_gradients(theirs)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    assert gradients.keys() == expected_gradients.keys()
    assert all(is_adapter(name) for name in gradients)
    assert len(gradients) == 2 * 7 * 2
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-10, atol=1e-10)


def test_in_bfloat16_the_gradients_of_a_layer_are_float32_and_exact_but_for_rounding() -> None:
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        layer = adapted(torch.bfloat16).to(torch.float32).get_submodule("model.layers.0.mlp.down_proj")
        layer.base_layer.to(dtype)
        x = torch.linspace(-1, 1, 20 * 48).view(20, 48).cos().to(torch.bfloat16).to(dtype).requires_grad_()
        out = layer(x)
        assert out.dtype == dtype
        out.float().square().sum().backward()
        a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
        assert (a.dtype, a.grad.dtype, b.grad.dtype, x.grad.dtype) == (torch.float32, *[torch.float32] * 2, dtype)
        found.append((out.detach(), x.grad, a.grad, b.grad))
    for rounded, exact in zip(*found, strict=True):
        # 2^-9 of a value for each of: A, B, A x, the output, its gradient and the result
        assert 0 < float((rounded.float() - exact).norm()) <= 6 * 2**-9 * float(exact.norm())


def test_a_copy_on_the_same_base_computes_with_adapters_of_its_own() -> None:
    model, tokens = adapted().requires_grad_(False), torch.arange(12)[None]
    before = model(tokens).logits
    copy = copy_on_same_base(model)
    torch.testing.assert_close(copy(tokens).logits, before, rtol=0, atol=0)
    for name, parameter in copy.named_parameters():
        if is_adapter(name):
            parameter.zero_()
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=0)
    switch_adapters(model, on=False)
    torch.testing.assert_close(copy(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert float((before - model(tokens).logits).abs().max()) > 0.01
