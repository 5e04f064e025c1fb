"""A compiled policy is the same function, for batches of every size, and is compiled once."""

from __future__ import annotations

import shutil

import pytest
import torch
from test_causal import PAIRS, answered, groups, llama

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
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at those of tensors that have none
def test_compiled_layers_give_the_same_log_probabilities_and_gradients() -> None:
    plain, compiled = CausalPolicy(llama()), CausalPolicy(llama(), compiled=True)
    torch._dynamo.utils.counters.clear()
    for pairs in (PAIRS, PAIRS[:1], answered([(11, [5, 6]), (3, [2, 30, 7])]), PAIRS[2:]):
        batch = collate(groups(pairs, FrozenReference(llama(), Version())))
        ours, theirs = gradients(compiled, batch), gradients(plain, batch)
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=5e-5)  # as in `test_causal`
        for one, other in zip(ours[1], theirs[1], strict=True):
            assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < made <= 4  # a norm and a feed-forward layer: no new ones for every batch
