"""Value and log Z heads: what they read, whichever way the forward goes, and where their parameters are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tba.batch import Batch, collate
from tba.errors import UserError
from tba.policy.causal import CausalPolicy
from tba.protocols import HEADS
from tba.training.checkpoint import Checkpoint, save_checkpoint
from tba.training.optimizer import OptimizerSettings
from tba.types import Completion, Group, Prompt, Sampling, StopReason, Trajectory, Version
from toy.engine import sample_groups, tabular_prompts
from toy.policy import TabularPolicy, TabularTask

VOCABULARY = 29
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64, initializer_range=0.3)
    ),
    "granite-own-logits": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
}


def built(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[family]().to(dtype).eval()


def ragged() -> Batch:
    """Two prompts of 5 and 2 tokens; rows interleaved."""
    rng = np.random.default_rng(0)
    groups = []
    for prompt_length, lengths in ((5, (3, 1, 7)), (2, (4, 6))):
        prompt = Prompt("random", rng.integers(0, VOCABULARY, prompt_length).astype(np.int32))
        rows = []
        for i, n in enumerate(lengths):
            tokens = rng.integers(0, VOCABULARY, n).astype(np.int32)
            completion = Completion(tokens, "", StopReason.EOS, (Version(), Version()))
            rows.append(Trajectory(f"{prompt.key}-{i}", prompt, completion, 0.5, np.zeros(n, np.float32), Version()))
        groups.append(Group.of(rows))
    return collate(groups).select(torch.tensor([3, 0, 4, 2, 1]))


def randomised(policy: CausalPolicy) -> CausalPolicy:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return policy


def gradients(policy: CausalPolicy, value_BT: Tensor, log_z_G: Tensor) -> list[Tensor]:
    """Of an uneven weighting of both."""
    loss = (value_BT * torch.linspace(-1, 2, value_BT.numel()).view(value_BT.shape)).sum()
    loss = loss + (log_z_G * torch.linspace(1, -2, len(log_z_G))).sum()
    return list(torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("share_prompt", [True, False])
def test_a_value_reads_the_state_before_its_token_and_log_z_the_mean_state_of_the_prompt(
    family: str, share_prompt: bool
) -> None:
    model, batch = built(family), ragged()
    policy = randomised(CausalPolicy(built(family), share_prompt=share_prompt, heads=HEADS))
    output = policy.evaluate(batch)
    assert output.value_BT is not None
    assert output.log_z_G is not None
    value, log_z = policy.heads["value"], policy.heads["log_z"]
    assert isinstance(value, torch.nn.Linear)
    assert isinstance(log_z, torch.nn.Linear)
    plain_BT, plain_G = torch.zeros(batch.mask_BT.shape), torch.zeros(batch.groups)
    with torch.no_grad():
        for b, g in enumerate(batch.group_B.tolist()):
            prompt = batch.prompt_GP[g, : batch.prompt_length_G[g]]
            token = torch.cat([prompt, batch.completion_BT[b, : batch.length_B[b]]])
            hidden = model(input_ids=token[None], output_hidden_states=True).hidden_states[-1][0]
            plain_BT[b, : batch.length_B[b]] = (hidden[len(prompt) - 1 : -1] @ value.weight[0]) + value.bias
            plain_G[g] = hidden[: len(prompt)].mean(0) @ log_z.weight[0] + log_z.bias[0]
    assert float(plain_G.std()) > 0.1
    torch.testing.assert_close(output.value_BT.detach(), plain_BT, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.log_z_G.detach(), plain_G, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_heads_pass_the_same_gradient_to_the_model_packed_plain_and_under_gradient_checkpointing(family: str) -> None:
    batch, found = ragged(), []
    for settings in ({}, {"share_prompt": False}, {"gradient_checkpointing": True}):
        policy = randomised(CausalPolicy(built(family), heads=HEADS, **settings))
        output = policy.evaluate(batch)
        assert output.value_BT is not None
        assert output.log_z_G is not None
        found.append(gradients(policy, output.value_BT, output.log_z_G))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-5)  # sums of 160 terms: 10 * eps * sqrt(160)
    assert sum(float(g.abs().sum()) > 0 for g in found[0] if g is not None) >= 10  # the body has it too


def test_heads_are_zero_at_first_float32_and_none_of_the_published_weights() -> None:
    policy = CausalPolicy(built("llama", torch.bfloat16), heads={"value", "log_z"})
    output = policy.evaluate(ragged())
    assert output.value_BT is not None
    assert output.log_z_G is not None
    assert output.value_BT.dtype == output.log_z_G.dtype == torch.float32
    assert output.value_BT.abs().max() == output.log_z_G.abs().max() == 0
    bare = CausalPolicy(built("llama", torch.bfloat16))
    assert policy.weights().keys() == bare.weights().keys()
    policy.load(bare.weights())  # which an engine would do with them
    assert len(policy.parameters()) == len(bare.parameters()) + 4
    nothing = bare.evaluate(ragged())
    assert nothing.value_BT is None
    assert nothing.log_z_G is None
    assert len(bare.heads) == 0
    with pytest.raises(ValueError, match="but got \\['reward'\\]"):
        CausalPolicy(built("llama"), heads=["reward"])


def test_a_tabular_value_belongs_to_a_prefix_and_log_z_to_a_prompt() -> None:
    task = TabularTask(symbols=2, length=3, prompts=2)
    policy = TabularPolicy(task, heads=HEADS)
    with torch.no_grad():
        for name, scale in (("value", 1.0), ("log_z", 100.0)):
            (table,) = policy.heads[name].parameters()
            table.copy_(scale * torch.arange(float(len(table)))[:, None])
    batch = collate(sample_groups(task, tabular_prompts(task), 6, Sampling(2.0), np.random.default_rng(0)))
    output = policy.evaluate(batch)
    assert output.value_BT is not None
    assert output.log_z_G is not None
    assert output.log_z_G.tolist() == [0.0, 100.0]
    for b in range(batch.rows):
        node, expected = 0, []
        for token in batch.completion_BT[b, : batch.length_B[b]].tolist():
            expected.append(float(batch.group_B[b]) * task.nodes + node)
            node = node * task.symbols + token
        assert output.value_BT[b, : batch.length_B[b]].tolist() == expected
        assert output.value_BT[b, batch.length_B[b] :].abs().sum() == 0


def test_heads_are_saved_beside_the_model_and_restored_from_there(tmp_path: Path) -> None:
    policy = randomised(CausalPolicy(built("llama"), heads=HEADS))
    heads = list(policy.heads.parameters())
    optimizer = OptimizerSettings(head_lr=0.1).start(policy.parameters(), heads)
    path = save_checkpoint(tmp_path, Version(0, 3), policy.save, optimizer, heads=policy.heads).path
    model = LlamaForCausalLM.from_pretrained(path)
    assert not [name for name in model.state_dict() if "value" in name or "log_z" in name]
    again = CausalPolicy(model, heads=HEADS)
    Checkpoint.load(path).load_heads(again.heads)
    for one, other in zip(again.parameters(), policy.parameters(), strict=True):
        assert torch.equal(one, other)
    OptimizerSettings(head_lr=0.1).start(again.parameters(), list(again.heads.parameters())).load(path)
    Checkpoint.load(path).load_heads(CausalPolicy(built("llama")).heads)  # none are wanted, none are read
    with pytest.raises(UserError, match=r"cannot give the heads value .*give one that was trained with the same"):
        Checkpoint.load(path).load_heads(CausalPolicy(built("llama"), heads={"value"}).heads)
    (path / "heads.safetensors").unlink()
    with pytest.raises(UserError, match="cannot give the heads log_z, value"):
        Checkpoint.load(path).load_heads(again.heads)
