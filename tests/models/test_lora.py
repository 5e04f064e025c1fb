"""Adapters on the quickstart's base: nothing at first, alone in what is published, gone when merged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import tba.recipes
from tba.batch import Batch, collate
from tba.engines.transformers import EngineSettings
from tba.errors import UserError
from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.causal import CausalPolicy
from tba.policy.lora import LoraSettings, copy_on_same_base, is_adapter, read_adapters
from tba.schedules import Constant
from tba.tasks.arithmetic import Arithmetic
from tba.training.gradients import backward
from tba.training.optimizer import OptimizerSettings
from tba.training.tiny_models import character_tokenizer
from tba.types import Completion, Group, Prompt, Sampling, Trajectory, Version

BASE = Path(tba.recipes.__path__[0]) / "quickstart_base"
MODEL = HuggingFace(
    path=str(BASE), device="cpu", generation=EngineSettings(max_completion_tokens=6), lora=LoraSettings(rank=4)
)
MERGED = 2e-4  # merging rounds every weight once: eps of logits of up to 20, over the sums of a few hundred terms
TEXTS = ("123+456=", "99+1=", "700+250=")


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    tokenizer = MODEL.tokenizer()
    return [Prompt("sums", np.array(tokenizer.encode(text), np.int32), text) for text in TEXTS]


def changed(policy: CausalPolicy) -> dict[str, torch.Tensor]:
    """Adapters that do something."""
    generator = torch.Generator().manual_seed(3)
    weights = {name: 0.3 * torch.randn(t.shape, generator=generator) for name, t in policy.weights().items()}
    policy.load(weights)
    return weights


def sampled(model: HuggingFace, prompts: list[Prompt], weights: Mapping[str, torch.Tensor]) -> list[list[Completion]]:
    engine = model.engine(Version())
    engine.load(weights, Version(0, 7))
    return generate(engine, prompts, 5, Sampling(temperature=0.8), np.random.default_rng(5))


def batch_of(prompts: list[Prompt], answered: list[list[Completion]], model: HuggingFace) -> Batch:
    """Scored by the model's own reference."""
    scores = model.reference(1.0, Version()).log_probabilities_of(list(zip(prompts, answered, strict=True)))
    groups = []
    for g, (prompt, row, scored) in enumerate(zip(prompts, answered, scores, strict=True)):
        marked = zip(row, scored, strict=True)
        groups.append(
            Group.of([Trajectory(f"{g}-{i}", prompt, c, i % 2, s, Version()) for i, (c, s) in enumerate(marked)])
        )
    return collate(groups)


def test_a_model_with_adapters_is_its_merged_model_to_engine_and_policy(tmp_path: Path, prompts: list[Prompt]) -> None:
    policy = MODEL.policy(1.0)
    assert policy.share_prompt
    adapters = changed(policy)
    MODEL.save(policy, tmp_path / "saved")
    merged = replace(MODEL, path=str(tmp_path / "saved"), lora=LoraSettings())
    plain = merged.policy(1.0)
    assert not any(map(is_adapter, plain.weights()))

    answered = sampled(MODEL, prompts, adapters)
    as_merged = sampled(merged, prompts, plain.weights())
    for ours, theirs in zip(answered, as_merged, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.log_behavior, other.log_behavior, rtol=0, atol=MERGED)

    batch = batch_of(prompts, answered, MODEL)
    expected = plain.evaluate(batch).log_policy_BT.detach()
    for shares in (policy, CausalPolicy(MODEL.policy(1.0, saved=tmp_path / "saved").model, share_prompt=False)):
        torch.testing.assert_close(shares.evaluate(batch).log_policy_BT.detach(), expected, rtol=0, atol=MERGED)
    moved = expected.sum(1) - batch.log_reference_BT.sum(1)
    assert float(moved.abs().max()) > 0.1  # these adapters do change the policy


def test_only_adapters_are_trained_and_published_and_the_reference_is_the_base(prompts: list[Prompt]) -> None:
    policy = MODEL.policy(1.0)
    base = replace(MODEL, lora=LoraSettings()).policy(1.0)
    assert all(map(is_adapter, policy.weights()))
    assert sum(t.numel() for t in policy.weights().values()) < 0.2 * sum(t.numel() for t in base.weights().values())
    answered = sampled(MODEL, prompts, policy.weights())
    batch = batch_of(prompts, answered, MODEL)
    torch.testing.assert_close(base.evaluate(batch).log_policy_BT, batch.log_reference_BT, rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.evaluate(batch).log_policy_BT, batch.log_reference_BT, rtol=0, atol=1e-5)

    before = {name: t.clone() for name, t in policy.model.state_dict().items()}
    optimizer = OptimizerSettings(lr=1e-2).start(policy.parameters())
    backward(policy, TrajectoryBalance(Constant(0.5)), batch, 1, 10**6)
    assert optimizer.step(1) > 0
    moved = {name for name, t in policy.model.state_dict().items() if not torch.equal(t, before[name])}
    assert moved  # B first: A has no gradient while B is zero
    assert all(".lora_B." in name for name in moved)


def test_a_reference_shares_the_engines_base_and_takes_adapters_of_its_own_at_a_reset(prompts: list[Prompt]) -> None:
    engine, reference = MODEL.engine(Version()), MODEL.reference(1.0, Version())
    own, theirs = (dict(m.named_parameters()) for m in (engine.model, reference._policy.model))
    shared = {name for name in own if own[name].data_ptr() == theirs[name].data_ptr()}
    assert shared == {name for name in own if not is_adapter(name)}

    adapters = changed(MODEL.policy(1.0))
    engine.load(adapters, Version(0, 1))
    answered = generate(engine, prompts, 2, Sampling(), np.random.default_rng(1))
    before = reference.log_probabilities_of(list(zip(prompts, answered, strict=True)))
    reference.load(adapters, Version(0, 1))
    after = reference.log_probabilities_of(list(zip(prompts, answered, strict=True)))
    for row, scored, was in zip(answered, after, before, strict=True):
        for completion, log_reference, old in zip(row, scored, was, strict=True):
            np.testing.assert_allclose(log_reference, completion.log_behavior, atol=1e-4)
            assert np.abs(log_reference - old).max() > 1e-3
    reference.load_first()
    assert reference.version == Version()
    first = reference.log_probabilities_of(list(zip(prompts, answered, strict=True)))
    np.testing.assert_array_equal(
        np.concatenate([log_T for row in first for log_T in row]),
        np.concatenate([log_T for row in before for log_T in row]),
    )

    with pytest.raises(KeyError, match="missing"):
        engine.load(dict(list(adapters.items())[1:]), Version(0, 2))


def test_a_reference_of_all_weights_takes_those_that_it_began_with_again(prompts: list[Prompt]) -> None:
    model = replace(MODEL, lora=LoraSettings())
    reference, policy = model.reference(1.0, Version()), model.policy(1.0)
    answered = list(zip(prompts, sampled(model, prompts, policy.weights()), strict=True))
    before = reference.log_probabilities_of(answered)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    reference.load(policy.weights(), Version(0, 1))
    assert np.abs(reference.log_probabilities_of(answered)[0][0] - before[0][0]).max() > 1e-3
    reference.load_first()
    assert reference.version == Version()
    for first, expected in zip(reference.log_probabilities_of(answered), before, strict=True):
        np.testing.assert_array_equal(np.concatenate(first), np.concatenate(expected))


def adapted_layers(model: torch.nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def input_of(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """[2, 10, in], values that bfloat16 has too."""
    width = layer.in_features
    return torch.linspace(-1, 1, 20 * width).view(2, 10, width).cos().bfloat16().to(dtype).requires_grad_()


def out_and_gradients(layer: Any, forward: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of x, A and B."""
    layer.zero_grad()
    out = forward(x)
    out.square().sum().backward()
    found = [out.detach(), x.grad, layer.lora_A.default.weight.grad, layer.lora_B.default.weight.grad]
    assert layer.base_layer.weight.grad is None
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("bias", [False, True])
def test_every_layer_computes_what_peft_computes_and_its_gradient(bias: bool) -> None:
    policy = MODEL.policy(1.0)
    changed(policy)
    layers = adapted_layers(policy.model.double())
    assert len(layers) == policy.model.config.num_hidden_layers * 7
    for name, layer in layers.items():
        if bias:
            width = layer.out_features
            layer.base_layer.bias = torch.nn.Parameter(torch.linspace(0, 1, width).double(), requires_grad=False)
        ours = out_and_gradients(layer, layer, input_of(layer, torch.float64))
        theirs = out_and_gradients(layer, lambda x, at=layer: type(at).forward(at, x), input_of(layer, torch.float64))
        assert len(ours) == len(theirs) == 4, name
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * float(other.abs().max()))


def test_in_bfloat16_gradients_of_adapters_are_float32_and_exact_but_for_rounding() -> None:
    policy = MODEL.policy(1.0)
    changed(policy)
    for layer in adapted_layers(policy.model).values():
        layer.base_layer.to(torch.bfloat16)
        rounded = out_and_gradients(layer, layer, input_of(layer, torch.bfloat16))
        layer.base_layer.to(torch.float32)
        exact = out_and_gradients(layer, layer, input_of(layer, torch.float32))
        assert [t.dtype for t in rounded] == [torch.bfloat16] * 2 + [torch.float32] * 2
        for one, other in zip(rounded, exact, strict=True):
            # 2^-9 of a value for each of: A, B, A x, the output, its gradient and the result
            assert 0 < float((one.float() - other).norm()) <= 6 * 2**-9 * float(other.norm())


def test_a_copy_on_the_same_base_computes_with_adapters_of_its_own() -> None:
    policy = MODEL.policy(1.0)
    changed(policy)
    copies = adapted_layers(copy_on_same_base(policy.model))
    for name, layer in adapted_layers(policy.model).items():
        x = input_of(layer, torch.float32).detach()
        before = layer(x).detach()
        torch.testing.assert_close(copies[name](x), before, rtol=0, atol=0)
        torch.nn.init.zeros_(copies[name].lora_B.default.weight)
        torch.testing.assert_close(copies[name](x), layer.base_layer(x), rtol=0, atol=0)
        torch.testing.assert_close(layer(x), before, rtol=0, atol=0)
        assert float((before - layer.base_layer(x).detach()).abs().max()) > 0.01


def test_what_a_run_saves_of_its_adapters_is_what_peft_reads_onto_its_base(
    tmp_path: Path, prompts: list[Prompt]
) -> None:
    policy = MODEL.policy(1.0)
    adapters = changed(policy)
    MODEL.save(policy, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 32, str(BASE))
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    begun = replace(MODEL, path=str(tmp_path / "saved" / "adapter")).prepared(Arithmetic())
    again = begun.policy(1.0).model  # with new adapters, which are nothing yet
    for prompt in prompts:
        tokens = torch.from_numpy(prompt.tokens.astype(np.int64))[None]
        with torch.no_grad():
            ours = policy.model.set_attn_implementation("eager") or policy.model(input_ids=tokens).logits
            for other in (theirs, merged, again.set_attn_implementation("eager") or again):
                torch.testing.assert_close(other(input_ids=tokens).logits, ours, rtol=0, atol=MERGED)
    back = read_adapters(tmp_path / "saved")
    assert back.keys() == adapters.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in policy.weights().items())


@pytest.mark.parametrize("target", ["no_such_layer", "lm_head", "embed_tokens"])
def test_targets_that_get_no_adapters_are_refused(target: str) -> None:
    with pytest.raises(UserError, match=r"--model\.lora\.targets names"):
        replace(MODEL, lora=LoraSettings(rank=2, targets=("q_proj", target))).policy(1.0)
    with pytest.raises(UserError, match=r"--model\.lora\.targets names"):
        replace(MODEL, lora=LoraSettings(rank=2, targets=(target,))).policy(1.0)


_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_MORE = {"vocab_size": 29, "max_position_embeddings": 64, "eos_token_id": 1, "pad_token_id": None}
_ROUTED = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
EXPERTS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_SIZES, **_MORE, **_ROUTED, num_key_value_heads=2, head_dim=16, num_experts=4)
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**_SIZES, **_MORE, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    ),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **_SIZES, **_MORE, **_ROUTED, **_LATENT, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
            first_k_dense_replace=1,
        )
    ),
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **_SIZES, **_MORE, **_ROUTED, num_key_value_heads=2, num_experts=4, shared_expert_intermediate_size=24
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", EXPERTS)
def test_a_model_with_experts_has_adapters_on_its_linear_layers_and_is_one_model_in_every_part(
    family: str, tmp_path: Path
) -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz_")
    torch.manual_seed(0)
    made = EXPERTS[family]()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.2 / parameter.shape[-1] ** 0.5)
    made.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = replace(MODEL, path=str(tmp_path / "base"))
    policy = model.policy(1.0)
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in policy.weights()}
    assert {"o_proj"} < adapted
    assert not {"experts", "gate_up_proj"} & adapted
    adapters = changed(policy)
    asked = [Prompt("t", np.array(tokenizer.encode(text), np.int32), text) for text in ("abc", "tba", "k")]
    answered = sampled(replace(model, generation=EngineSettings(max_completion_tokens=4)), asked, adapters)
    batch = batch_of(asked, answered, model)
    log_policy_BT = policy.evaluate(batch).log_policy_BT.detach()
    model.save(policy, tmp_path / "saved")
    merged = replace(model, path=str(tmp_path / "saved"), lora=LoraSettings())
    torch.testing.assert_close(
        log_policy_BT, merged.policy(1.0).evaluate(batch).log_policy_BT.detach(), rtol=0, atol=MERGED
    )
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved" / "adapter").eval()
    tokens = torch.tensor([tokenizer.encode("tbaabc")])
    with torch.no_grad():
        right = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(input_ids=tokens).logits
        torch.testing.assert_close(theirs(input_ids=tokens).logits, right, rtol=0, atol=MERGED)
    names = {"mixtral": "w1", "qwen2_moe": "experts"}.get(family, "gate_proj")
    with pytest.raises(UserError, match=r"--model\.lora\.targets names"):
        replace(model, lora=LoraSettings(rank=2, targets=(names,))).policy(1.0)
