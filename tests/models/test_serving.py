"""The self-test by which `--model.generation.engine auto` takes another engine, on engines that are right and wrong."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen3MoeConfig

from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.errors import UserError
from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.models.memory import Shape
from tba.models.serving import LONG_CONTEXT, TOLERANCE, find_mismatch, own_engine_reason
from tba.policy.loading import load_model
from tba.policy.lora import LoraSettings, add_adapters, copy_on_same_base
from tba.training.tiny_models import ScratchModel, character_tokenizer
from tba.types import Prompt, Sampling, Version

SETTINGS = EngineSettings(slots=8, max_completion_tokens=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    path, tokenizer = tmp_path_factory.mktemp("model"), character_tokenizer("abcdefghij")
    made = ScratchModel(32, layers=2, heads=2, kv_heads=1, ff_size=48, max_positions=96).start(tokenizer)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 1.2 / parameter.shape[-1] ** 0.5, generator=generator)
    made.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return HuggingFace(path=str(path), device="cpu", dtype="float32", generation=SETTINGS)


def parts(model: HuggingFace, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The engine's model, and the self-test's."""
    return load_model(model.path, "cpu", dtype)[0], load_model(model.path, "cpu", dtype)[0]


def state(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_samples_from_the_policy_passes_and_has_its_weights_again_to_the_bit(
    model: HuggingFace, dtype: torch.dtype
) -> None:
    own, probe = parts(model, dtype)
    before, engine = state(own), TransformersEngine(own, model.tokenizer(), SETTINGS, Version(2, 7))
    assert find_mismatch(engine, probe, 20) is None
    assert engine.version == Version(2, 7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())


def test_adapters_are_updated_alone_and_are_nothing_again_afterwards(model: HuggingFace) -> None:
    pytest.importorskip("peft")
    own = add_adapters(parts(model)[0], LoraSettings(rank=4), torch.float32)
    before, probe = state(own), copy_on_same_base(own)
    engine = TransformersEngine(own, model.tokenizer(), SETTINGS)
    assert find_mismatch(engine, probe, 20) is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())


@pytest.mark.parametrize("forgotten", ["", "embed_tokens", "v_proj", "layers.1.mlp.down_proj"])
def test_an_engine_that_keeps_a_weight_through_an_update_is_told(model: HuggingFace, forgotten: str) -> None:
    class Forgetful(TransformersEngine):
        def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
            kept = {n: t for n, t in own.state_dict().items() if forgotten in n}
            super().load({**weights, **{n: t.clone() for n, t in kept.items() if n in weights}}, version)

    own, probe = parts(model)
    engine = Forgetful(own, model.tokenizer(), SETTINGS)
    assert "after an update, where" in str(find_mismatch(engine, probe, 20))


def test_an_engine_of_other_weights_is_told_at_once_with_the_distance(model: HuggingFace) -> None:
    own, probe = parts(model)
    with torch.no_grad():
        own.model.layers[0].self_attn.q_proj.weight.mul_(1.3)
    said = str(find_mismatch(TransformersEngine(own, model.tokenizer(), SETTINGS), probe, 20))
    assert said.startswith("its log-probabilities are ")
    assert said.endswith(f" from the policy's at the start, where {TOLERANCE[4]:g} is allowed")


def test_answers_that_may_not_end_early_are_compared_from_where_they_may(model: HuggingFace) -> None:
    """Before it the engine renormalises over what is left without the end-of-text token, and the policy does not."""
    own, probe = parts(model)
    settings = replace(SETTINGS, min_completion_tokens=9)
    assert find_mismatch(TransformersEngine(own, model.tokenizer(), settings), probe, 20) is None


def test_auto_is_transformers_on_a_cpu_and_vllm_is_not_even_imported(
    model: HuggingFace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    auto, prompt = replace(model, generation=replace(SETTINGS, engine="auto")), Prompt("letters", np.arange(4) + 3)
    engines = auto.engine(Version()), model.engine(Version())
    assert [type(engine) for engine in engines] == [TransformersEngine] * 2
    given = [generate(engine, [prompt], 3, Sampling(), np.random.default_rng(0)) for engine in engines]
    assert given[0][0][0].tokens.tolist() == given[1][0][0].tokens.tolist()
    (line,) = [record.message for record in caplog.records if record.name == "tba.searcher"]
    assert line == "answers are sampled by transformers: vllm is for CUDA and whole weights, not for float32 on cpu"
    assert "vllm" not in sys.modules


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="says what there is where vLLM is missing")
def test_where_vllm_is_missing_or_cannot_be_had_auto_has_a_reason_in_words(model: HuggingFace) -> None:
    assert "vllm, which is not installed" in str(model._try_vllm(Version(), 20))
    on_gpu = replace(model, device="cuda", generation=replace(SETTINGS, engine="auto"))
    assert on_gpu._vllm_obstacle(20).startswith("the model is small, with 0.0 billion parameters and contexts of ")
    assert on_gpu._vllm_obstacle(LONG_CONTEXT) == ""
    assert "for 4-bit on cuda" in replace(on_gpu, dtype="4-bit", lora=LoraSettings(rank=4))._vllm_obstacle(20)
    ruled = replace(on_gpu, generation=replace(SETTINGS, engine="auto", forbidden_first_tokens=("a",)))
    assert "no rule for the first token" in ruled._vllm_obstacle(20)


def test_auto_takes_vllm_for_large_models_experts_and_long_contexts_and_its_own_engine_for_the_others() -> None:
    def qwen(width: int, layers: int, ff: int) -> Shape:
        sizes = {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "intermediate_size": ff,
            "tie_word_embeddings": True,
        }
        return Shape.of(Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=2))

    half_billion, three_billions = qwen(896, 24, 4864), qwen(2048, 36, 11_008)
    experts = Shape.of(Qwen3MoeConfig(hidden_size=64, num_hidden_layers=2, num_experts=4, vocab_size=100))
    assert "0.5 billion parameters" in own_engine_reason(half_billion, 1024, has_adapters=False)
    assert "share the base" in own_engine_reason(three_billions, 1024, has_adapters=True)
    for shape, positions in ((half_billion, LONG_CONTEXT), (three_billions, 1024), (experts, 1024), (None, 1024)):
        assert own_engine_reason(shape, positions, has_adapters=False) == ""


def test_where_the_self_test_itself_fails_auto_has_a_reason_in_words(
    model: HuggingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(TransformersEngine):
        def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    own, _ = parts(model)
    monkeypatch.setattr(HuggingFace, "_vllm", lambda self, *_: Failing(own, self.tokenizer(), SETTINGS))
    assert model._try_vllm(Version(), 20) == "CUDA out of memory. Tried to allocate 2 GiB"


def test_an_engine_over_several_gpus_has_to_be_chosen(model: HuggingFace) -> None:
    with pytest.raises(UserError, match="choose that engine"):
        replace(model, generation=replace(SETTINGS, engine="auto"), vllm=replace(model.vllm, tensor_parallel=2))
