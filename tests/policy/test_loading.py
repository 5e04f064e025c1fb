"""A model has the weights of its files and no others, in every way that one is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tba.errors import UserError
from tba.policy.loading import load_model, load_unfilled, no_bars, pretrained, refuse_other_files
from tba.training.tiny_models import character_tokenizer

TOKENIZER = character_tokenizer("ab")
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
GROUPED = SIZES | {"num_key_value_heads": 1, "head_dim": 8}
GPT2 = {"vocab_size": len(TOKENIZER), "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
MOE = GROUPED | {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": len(TOKENIZER), "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "cohere": GROUPED,
    "deepseek_v3": SIZES | LATENT | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "falcon": SIZES,
    "gemma": GROUPED,
    "gemma2": GROUPED,
    "gemma3_text": GROUPED | {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": GPT2,
    "gpt_neox": SIZES,
    "gpt_oss": MOE,
    "granite": GROUPED,
    "llama": GROUPED,
    "mamba": {"vocab_size": len(TOKENIZER), "hidden_size": 16, "num_hidden_layers": 2},
    "mistral": GROUPED,
    "mixtral": MOE,
    "olmo2": GROUPED,
    "opt": SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "phi": SIZES,
    "phi3": GROUPED,
    "qwen2": GROUPED,
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 8},
    "qwen3": GROUPED,
    "qwen3_moe": MOE,
    "smollm3": GROUPED,
    "stablelm": SIZES,
    "starcoder2": GROUPED,
}
QUERY = "model.layers.1.self_attn.q_proj.weight"


def saved(model: Any, folder: Path) -> Path:
    with no_bars():
        model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def llama(folder: Path, tied: bool = False) -> Path:
    torch.manual_seed(0)
    return saved(LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=tied)), folder)


def change(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def shapes(folder: Path) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


LOADS: dict[str, Callable[[Path], object]] = {
    "whole": lambda folder: load_model(folder, "cpu", torch.float32),
    "a rank's rows": lambda folder: load_unfilled(folder, torch.float32),
    "files for another program": lambda folder: refuse_other_files(folder, shapes(folder)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_model_of_these_families_is_refused_and_each_has_the_weights_of_its_files(
    family: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
    saved(model, tmp_path)
    for load in LOADS.values():
        load(tmp_path)
    weights = load_model(tmp_path, "cpu", torch.float32)[0].state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_tensor_that_is_missing_unknown_or_of_another_shape_is_named(
    load: Callable[[Path], object], tied: bool, tmp_path: Path, capfd: Any
) -> None:
    faults: dict[str, Callable[[dict[str, Tensor]], object]] = {
        rf"1 tensor is missing \(such as {QUERY}\)": lambda tensors: tensors.pop(QUERY),
        r"1 tensor is unknown to it \(such as model.layers.7\x1b\[31m\)": lambda tensors: tensors.update(
            {"model.layers.7\x1b[31m": torch.ones(2)}
        ),
        rf"{QUERY} is \[3, 16\], not \[16, 16\]": lambda tensors: tensors.update({QUERY: torch.ones(3, 16)}),
        r"2\d tensors are missing": lambda tensors: tensors.clear(),
    }
    for number, (sentence, damage) in enumerate(faults.items()):
        folder = llama(tmp_path / str(number), tied)
        change(folder, damage)
        with pytest.raises(UserError, match=f"do not hold the weights of a LlamaForCausalLM: {sentence}"):
            load(folder)
    assert "\x1b" not in "".join(capfd.readouterr())  # a name from a file


def test_threads_that_load_at_once_leave_tied_weights_tied(tmp_path: Path) -> None:
    """transformers replaces the method that ties weights while it loads a model, for the whole process."""
    folder, tie_weights = llama(tmp_path / "model", tied=True), PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: pretrained(AutoModelForCausalLM, folder, torch.float32), range(24)))
    assert PreTrainedModel.tie_weights is tie_weights
    assert all(m.get_output_embeddings().weight is m.get_input_embeddings().weight for m in models)


def test_a_missing_head_is_refused_unless_it_is_that_of_the_embeddings(tmp_path: Path) -> None:
    for tied in (True, False):
        folder = llama(tmp_path / f"{tied}", tied)
        change(folder, lambda tensors: tensors.pop("lm_head.weight", None))
        if tied:
            assert load_model(folder, "cpu", torch.float32)[0].lm_head.weight.shape == (4, 16)
        else:
            with pytest.raises(UserError, match=r"1 tensor is missing \(such as lm_head.weight\)"):
                load_model(folder, "cpu", torch.float32)


def test_what_transformers_leaves_out_of_a_family_is_left_out(tmp_path: Path) -> None:
    """Prediction layers, buffers of older versions, and what sees beside a model that reads."""
    llama4 = {"intermediate_size_mlp": 24, "num_local_experts": 1, "attention_chunk_size": 16}
    seeing: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    seeing |= {"intermediate_size": 64, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16}
    extras: dict[str, tuple[Any, list[str]]] = {
        "deepseek_v3": (None, ["model.layers.61.self_attn.o_proj.weight"]),
        "gpt_neox": (None, ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.masked_bias"]),
        "llama": (None, ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
        "llama4": (
            Llama4ForConditionalGeneration(
                Llama4Config(text_config=GROUPED | llama4, vision_config=seeing, boi_token_index=0, eoi_token_index=1)
            ),
            [],
        ),
    }
    for family, (model, names) in extras.items():
        torch.manual_seed(0)
        model = model or AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
        folder = saved(model, tmp_path / family)
        change(folder, lambda tensors, names=names: tensors.update({name: torch.ones(2) for name in names}))
        for load in LOADS.values():
            load(folder)
    change(folder, lambda tensors: tensors.update({"language_model.model.layers.9.weight": torch.ones(2)}))
    with pytest.raises(UserError, match="1 tensor is unknown to it"):
        load_model(folder, "cpu", torch.float32)


def test_only_a_head_that_is_about_to_be_trained_may_be_missing(tmp_path: Path) -> None:
    folder, scored = llama(tmp_path / "causal"), tmp_path / "scored"
    kind = AutoModelForSequenceClassification
    with pytest.raises(UserError, match=r"1 tensor is missing \(such as score.weight\), 1 tensor is unknown"):
        pretrained(kind, folder, torch.float32, num_labels=1)
    saved(pretrained(kind, folder, torch.float32, headless=True, num_labels=3), scored)
    pretrained(kind, scored, torch.float32)
    with pytest.raises(UserError, match=r"score.weight is \[3, 16\], not \[1, 16\]"):
        pretrained(kind, scored, torch.float32, num_labels=1)
    pretrained(kind, scored, torch.float32, headless=True, num_labels=1)
    change(scored, lambda tensors: tensors.pop(QUERY))
    with pytest.raises(UserError, match=rf"1 tensor is missing \(such as {QUERY}\)"):
        pretrained(kind, scored, torch.float32, headless=True, num_labels=1)


def test_embeddings_need_neither_a_pooler_nor_another_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = saved(BertForMaskedLM(BertConfig(**SIZES)), tmp_path)
    pretrained(AutoModel, folder, torch.float32, headless=True)
    change(folder, lambda tensors: tensors.pop("bert.encoder.layer.1.output.dense.weight"))
    with pytest.raises(UserError, match=r"1 tensor is missing \(such as encoder.layer.1.output.dense.weight\)"):
        pretrained(AutoModel, folder, torch.float32, headless=True)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_ids_that_are_no_tokens_of_the_model_are_left_out_of_its_configuration(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = llama(tmp_path)
    values = {"bos_token_id": 4, "eos_token_id": [-1, 2], "pad_token_id": -1}
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))
    models: list[Any] = [load_model(folder, "cpu", torch.float32)[0]]
    models += [load_unfilled(folder, torch.float32)[0]] if file == "config.json" else []
    for model in models:
        config = model.config if file == "config.json" else model.generation_config
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, [2], None)
        if file == "config.json":  # -1 would be the last token, whose embedding would never be trained
            assert model.get_input_embeddings().padding_idx is None
    assert f"pad_token_id of {folder} is -1: what is no token of 0 to 3 is left out" in caplog.text


def test_an_id_that_is_no_number_is_named(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    values = json.loads((folder / "config.json").read_text()) | {"eos_token_id": "x"}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"Validation error for field 'eos_token_id': .*with value 'x'"):
        load_model(folder, "cpu", torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named(value: float, tmp_path: Path) -> None:
    folder = llama(tmp_path)
    change(folder, lambda tensors: tensors[QUERY][3].fill_(value))
    with pytest.raises(UserError, match=rf"the weight {QUERY} of .* not finite .*: its training has diverged, or"):
        load_model(folder, "cpu", torch.float32)


def test_quantized_weights_whose_package_is_missing_say_so(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    quantized = {"quantization_config": {"quant_method": "quark"}}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | quantized))
    with pytest.raises(
        UserError, match=r"Quark.*: install what is missing, or give a model whose weights are not quant"
    ):
        load_model(folder, "cpu", torch.float32)
