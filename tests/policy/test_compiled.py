"""A compiled policy is the same function, for batches of every size, and is compiled once."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from test_causal import PAIRS, answered, groups, llama
from torch._inductor.utils import fresh_cache, run_and_get_code

from tba.batch import Batch, collate
from tba.policy.causal import CausalPolicy
from tba.policy.reference import FrozenReference
from tba.types import Version

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")


def gradients(policy: CausalPolicy, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    policy.model.zero_grad()
    log_policy_BT = policy.evaluate(batch).log_policy_BT
    (log_policy_BT.sum(1) ** 2).sum().backward()
    return log_policy_BT.detach(), [p.grad for p in policy.parameters() if p.grad is not None]


@compiler
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_layers_give_the_same_log_probabilities_and_gradients(checkpointed: bool) -> None:
    plain, compiled = (CausalPolicy(llama(), gradient_checkpointing=checkpointed, compiled=on) for on in (False, True))

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
    assert 0 < graphs <= 4  # the parts of a layer around its attention: no new ones for other layers or batches
    # a layer beside its attention, whose code all layers share: 7 products forward and 14 backward, and few kernels
    # more, because rotary positions, SwiGLU, and a residual with the norm after it are one each
    calls = "".join(code[code.index("def call(") :] for code in codes)
    assert len(re.findall(r"^\s+extern_kernels\.\w+\(", calls, re.MULTILINE)) == 21
    assert len(re.findall(r"^\s+cpp_fused_\w+\(", calls, re.MULTILINE)) <= 11
