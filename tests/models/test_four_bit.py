"""A base in 4 bits under adapters: one policy for trainer, reference and engine, and a plain model when it is saved."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import tba.recipes
from tba.batch import Batch, collate
from tba.engines.transformers import EngineSettings
from tba.errors import UserError
from tba.generation import generate
from tba.models import memory
from tba.models.huggingface import HuggingFace
from tba.models.memory import Shape, TrainerWorkload
from tba.policy.causal import CausalPolicy
from tba.policy.loading import load_model
from tba.policy.lora import LoraSettings, is_adapter
from tba.runtime.ranks.start import start_policy, start_ranks
from tba.settings import find
from tba.tasks.arithmetic import Arithmetic
from tba.training.ranks.messages import RankSettings
from tba.types import Group, Prompt, Sampling, Trajectory, Version

BASE = Path(tba.recipes.__path__[0]) / "quickstart_base"
TEXTS = ("123+456=", "99+1=", "700+250=")
THERE = importlib.util.find_spec("bitsandbytes") is not None
installed = pytest.mark.skipif(not THERE, reason="bitsandbytes is not installed")


def model() -> HuggingFace:
    return HuggingFace(
        path=str(BASE),
        device="cpu",
        dtype="4-bit",
        generation=EngineSettings(max_completion_tokens=6),
        lora=LoraSettings(rank=4),
    )


def prompts(of: HuggingFace) -> list[Prompt]:
    return [Prompt("sums", np.array(of.tokenizer().encode(text), np.int32), text) for text in TEXTS]


@installed
def test_trainer_and_reference_agree_to_the_bit_and_adapters_alone_are_trained_and_published() -> None:
    of = model()
    asked, engine, reference = prompts(of), of.engine(Version()), of.reference(1.0, Version())
    answered = generate(engine, asked, 5, Sampling(), np.random.default_rng(5))
    scored = reference.log_probabilities_of(list(zip(asked, answered, strict=True)))
    groups = []
    for p, row in zip(asked, zip(answered, scored, strict=True), strict=True):
        pairs = enumerate(zip(*row, strict=True))
        groups.append(Group.of([Trajectory(f"{p.text}{i}", p, c, 0.0, s, Version()) for i, (c, s) in pairs]))
    batch: Batch = collate(groups)
    recipe = replace(find("quickstart"), model=of)
    assert start_ranks(recipe, 0) is None
    policy, _ = start_policy(recipe, None, None)
    found = policy.evaluate(batch).log_policy_BT
    assert torch.equal(found.detach(), batch.log_reference_BT)
    for row, completion in enumerate(c for of_prompt in answered for c in of_prompt):
        assert completion.log_behavior is not None
        own_T = found[row, : len(completion.tokens)].detach()
        np.testing.assert_allclose(own_T, completion.log_behavior, atol=0.5)  # logits up to 16, rounded to 8 bits

    found.sum().backward()
    named = dict(policy.model.named_parameters())
    assert {name for name, p in named.items() if p.grad is not None} == set(filter(is_adapter, named))
    assert any(bool(p.grad.any()) for p in named.values() if p.grad is not None)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    weights = policy.weights()
    assert set(weights) == set(filter(is_adapter, named))
    with torch.no_grad():
        for tensor in weights.values():
            tensor.add_(0.01)
    published = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    reference.load(published, Version(0, 1))
    again = reference.log_probabilities_of(list(zip(asked, answered, strict=True)))
    after = policy.evaluate(batch).log_policy_BT.detach()
    assert not torch.equal(after, found)
    scores = [s for of_prompt in again for s in of_prompt]
    assert all(np.array_equal(after[row, : len(s)].numpy(), s) for row, s in enumerate(scores))


@installed
def test_what_is_saved_is_whole_and_any_program_can_read_it(tmp_path: Path) -> None:
    policy = model().policy(1.0)
    with torch.no_grad():
        for tensor in policy.weights().values():
            tensor.add_(0.01)
    policy.save(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert plain.dtype == torch.bfloat16
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    assert set(plain.state_dict()) == set(AutoModelForCausalLM.from_pretrained(BASE).state_dict())
    token = torch.arange(12)[None]
    expected = CausalPolicy(plain)
    assert not expected.has_adapters
    batch = fixed(token[0].tolist())
    with torch.no_grad():
        found, own = (p.evaluate(batch).log_policy_BT for p in (expected, policy))
    assert float((found - own).abs().max()) < 0.5  # W + B A rounded to 8 bits, and logits of up to 16
    assert float(own.abs().max()) > 5


def fixed(tokens: list[int]) -> Batch:
    prompt = torch.tensor([tokens[:4]])
    completion = torch.tensor([tokens[4:]])
    return Batch(
        prompt_GP=prompt,
        prompt_length_G=torch.tensor([4]),
        completion_BT=completion,
        length_B=torch.tensor([completion.shape[1]]),
        mask_BT=torch.ones_like(completion, dtype=torch.bool),
        log_reference_BT=torch.zeros(completion.shape),
        reward_B=torch.zeros(1),
        group_B=torch.tensor([0]),
    )


@installed
def test_the_base_takes_nine_sixteenths_of_a_byte_for_each_number_of_a_matrix() -> None:
    of = model()
    policy = of.policy(1.0)
    held = 0
    for parameter in policy.model.parameters():
        state = getattr(parameter, "quant_state", None)
        held += parameter.nbytes + (0 if state is None else state.absmax.nbytes)
    computed = memory.trainer_bytes(
        Shape.of(AutoConfig.from_pretrained(BASE)), TrainerWorkload(100, of.precision, rank=4)
    )
    assert computed["weights"] == held


@pytest.mark.skipif(THERE, reason="bitsandbytes is installed")
def test_without_bitsandbytes_it_is_named() -> None:
    with pytest.raises(UserError, match=r"needs the library bitsandbytes: pip install -e '\.\[four-bit\]'"):
        model().policy(1.0)


@installed
def test_an_adapter_on_a_base_in_4_bits_is_merged_into_what_the_base_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(BASE, quantization_config=packed, dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    model().tokenizer().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").dequantize().float()
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    made = HuggingFace(str(tmp_path / "adapter"), device="cpu").prepared(Arithmetic())
    assert not hasattr(AutoConfig.from_pretrained(made.path), "quantization_config")
    tokens = torch.tensor([model().tokenizer().encode(TEXTS[0])])
    with torch.no_grad():
        right, found = (
            m.eval()(input_ids=tokens).logits for m in (adapted, load_model(made.path, "cpu", torch.float32)[0])
        )
        plain = AutoModelForCausalLM.from_pretrained(BASE)(input_ids=tokens).logits
    torch.testing.assert_close(found, right, rtol=0, atol=2e-4)  # merging rounds every weight once
    assert float((right - plain).abs().max()) > 0.1


def test_it_needs_adapters_the_own_engine_one_rank_and_a_device_that_can() -> None:
    with pytest.raises(UserError, match="4-bit is for CPUs and CUDA, but the model's device is mps"):
        replace(model(), device="mps").policy(1.0)
    with pytest.raises(UserError, match=r"4-bit is for the frozen base of adapters"):
        replace(model(), lora=LoraSettings())
    with pytest.raises(UserError, match=r"4-bit is for the frozen base of adapters"):
        replace(model(), generation=EngineSettings(engine="vllm"))
    with pytest.raises(UserError, match=r"--trainer\.ranks is 2, but a base in 4 bits"):
        replace(find("quickstart"), model=model(), trainer=RankSettings(2))
