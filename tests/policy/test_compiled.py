"""A compiled policy is the same function, for batches of every size, and is compiled once."""

from __future__ import annotations

import re
import shutil
from copy import deepcopy

import pytest
import torch
from test_causal import PAIRS, answered, groups, llama
from torch._inductor.utils import fresh_cache, run_and_get_code
from transformers import PreTrainedModel

from tba.batch import Batch, collate
from tba.policy.causal import CausalPolicy
from tba.policy.lora import LoraSettings, add_adapters
from tba.policy.reference import FrozenReference
from tba.types import Version

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")


def gradients(policy: CausalPolicy, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    policy.model.zero_grad()
    log_policy_BT = policy.evaluate(batch).log_policy_BT
    (log_policy_BT.sum(1) ** 2).sum().backward()
    return log_policy_BT.detach(), [p.grad for p in policy.parameters() if p.grad is not None]


def adapted_llama() -> PreTrainedModel:
    """Returns a model whose adapters change what it computes."""
    model = add_adapters(llama(), LoraSettings(rank=2))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@compiler
def test_a_copy_of_a_compiled_model_computes_with_its_own_weights() -> None:
    policy = CausalPolicy(llama(), compiled=True)
    layers = deepcopy(policy.model).model.layers
    assert all("forward" in vars(layer) and layer.forward.__self__ is layer for layer in layers)


@compiler
@pytest.mark.parametrize(("checkpointed", "adapted"), [(False, False), (True, False), (True, True)])
def test_compiled_layers_give_the_same_log_probabilities_and_gradients(checkpointed: bool, adapted: bool) -> None:
    models = [adapted_llama() if adapted else llama() for _ in range(2)]
    plain, compiled = (
        CausalPolicy(model, gradient_checkpointing=checkpointed, compiled=on)
        for model, on in zip(models, (False, True), strict=True)
    )

    def compare() -> None:
        for pairs in (PAIRS, PAIRS[:1], answered([(11, [5, 6]), (3, [2, 30, 7])]), PAIRS[2:]):
            batch = collate(groups(pairs, FrozenReference(llama(), Version())))
            compiled_pass, plain_pass = gradients(compiled, batch), gradients(plain, batch)
            torch.testing.assert_close(compiled_pass[0], plain_pass[0], rtol=0, atol=5e-5)  # as in `test_causal`
            for one, other in zip(compiled_pass[1], plain_pass[1], strict=True):
                assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())

    torch._dynamo.utils.counters.clear()
    with fresh_cache():  # what was compiled before has no code to look at
        _, codes = run_and_get_code(compare)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # the parts of a layer around its attention, with adapters each adapter by itself: none more for layers or batches
    assert 0 < graphs <= (7 if adapted else 4)
    if adapted:
        return
    # a layer beside its attention, whose code all layers share: 7 products forward and 14 backward, and few kernels
    # more, because rotary positions, SwiGLU, and a residual with the norm after it are one each
    calls = "".join(code[code.index("def call(") :] for code in codes)
    assert len(re.findall(r"^\s+extern_kernels\.\w+\(", calls, re.MULTILINE)) == 21
    assert len(re.findall(r"^\s+cpp_fused_\w+\(", calls, re.MULTILINE)) <= 11
