"""Loading, weights, saving, and the reference: the parts of the policy around its forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    PreTrainedTokenizerFast,
)

from tba.batch import collate
from tba.errors import UserError
from tba.policy.causal import CausalPolicy
from tba.policy.loading import load_model, make_writable
from tba.policy.packed import _probe
from tba.policy.reference import FrozenReference
from tba.pretrained import most_positions
from tba.types import Completion, Group, Prompt, StopReason, Trajectory, Version

VERSION = Version(1, 7)


def llama(tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.4,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(40)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w1")


def answered(lengths: list[tuple[int, list[int]]]) -> list[tuple[Prompt, list[Completion]]]:
    rng = np.random.default_rng(0)

    def tokens(n: int) -> np.ndarray:
        return rng.integers(0, 40, n).astype(np.int32)

    return [
        (
            Prompt("random", tokens(prompt)),
            [Completion(tokens(n), "", StopReason.EOS, (VERSION, VERSION)) for n in completions],
        )
        for prompt, completions in lengths
    ]


def groups(pairs: list[tuple[Prompt, list[Completion]]], reference: FrozenReference) -> list[Group]:
    scored = reference.log_probabilities_of(pairs)
    return [
        Group.of(
            [
                Trajectory(f"{i}-{j}", prompt, completion, 0.0, scored[i][j], reference.version)
                for j, completion in enumerate(completions)
            ]
        )
        for i, (prompt, completions) in enumerate(pairs)
    ]


PAIRS = answered([(5, [3, 9, 1]), (1, [4]), (8, [7, 2, 2, 20])])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
@pytest.mark.parametrize("share_prompt", [True, False])
def test_at_version_0_every_log_ratio_to_the_reference_is_0(temperature: float, share_prompt: bool) -> None:
    policy = CausalPolicy(llama(), temperature, share_prompt)
    batch = collate(groups(PAIRS, FrozenReference(llama(), VERSION, temperature)))
    log_policy_BT = policy.evaluate(batch).log_policy_BT
    assert float(log_policy_BT.sum(1).abs().min().detach()) > 1
    # of differences of logits of up to 20 in float32, whose own sums have a few dozen terms: 20 * eps * sqrt(40) = 2e-5
    assert float((log_policy_BT - batch.log_reference_BT).abs().max().detach()) <= 5e-5


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("tokens_per_pass", [1, 12, 25, 8192])
def test_the_reference_scores_the_same_however_its_passes_are_cut(tokens_per_pass: int, share_prompt: bool) -> None:
    one_by_one = [
        FrozenReference(llama(), VERSION).log_probabilities_of([(prompt, [completion])])[0][0]
        for prompt, completions in PAIRS
        for completion in completions
    ]
    model = llama()
    reference = FrozenReference(model, VERSION, tokens_per_pass=tokens_per_pass, share_prompt=share_prompt)
    assert (model.config._attn_implementation == "tba_packed") == share_prompt
    cut = reference.log_probabilities_of(PAIRS)
    assert [len(scores) for scores in cut] == [3, 1, 4]
    for ours, theirs in zip((array for scores in cut for array in scores), one_by_one, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_prompt_without_completions_has_no_scores_and_disturbs_nobody() -> None:
    reference = FrozenReference(llama(), VERSION)
    first, second, third = reference.log_probabilities_of([PAIRS[0], (PAIRS[1][0], []), PAIRS[2]])
    assert second == []
    np.testing.assert_allclose(third[3], reference.log_probabilities_of(PAIRS[2:3])[0][3], rtol=1e-5)
    assert len(first) == 3


def test_a_reference_takes_new_weights_and_their_version() -> None:
    reference, other = FrozenReference(llama(), VERSION), llama(seed=1)
    before = reference.log_probabilities_of(PAIRS[:1])[0]
    reference.load(CausalPolicy(other).weights(), Version(2, 0))
    after, fresh = (r.log_probabilities_of(PAIRS[:1])[0] for r in (reference, FrozenReference(other, VERSION)))
    assert reference.version == Version(2, 0)
    assert float(np.abs(after[1] - before[1]).max()) > 0.1
    np.testing.assert_array_equal(after[1], fresh[1])
    with pytest.raises(ValueError, match="first weights are gone"):
        reference.load_first()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_have_the_names_and_values_of_the_saved_file(tied: bool, tmp_path: Path) -> None:
    policy = CausalPolicy(llama(tied))
    policy.save(tmp_path / "model", tokenizer())
    saved = load_file(tmp_path / "model" / "model.safetensors")
    weights = policy.weights()
    assert weights.keys() == saved.keys()
    assert ("lm_head.weight" in weights) is not tied
    for name, tensor in weights.items():
        assert not tensor.requires_grad
        torch.testing.assert_close(tensor, saved[name], rtol=0, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_loaded_weights_make_the_same_policy_in_place(tied: bool) -> None:
    ours, theirs = CausalPolicy(llama(tied)), CausalPolicy(llama(tied, seed=1))
    places = [p.data_ptr() for p in ours.parameters()]
    ours.load({name: tensor.clone() for name, tensor in theirs.weights().items()})
    assert [p.data_ptr() for p in ours.parameters()] == places
    batch = collate(groups(PAIRS, FrozenReference(llama(tied), VERSION)))
    one, other = (p.evaluate(batch).log_policy_BT.detach() for p in (ours, theirs))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_weights_of_another_model_are_refused_by_name_and_by_shape() -> None:
    policy = CausalPolicy(llama(tied=True))
    with pytest.raises(KeyError, match=r"lm_head\.weight"):
        policy.load(CausalPolicy(llama(tied=False)).weights())
    weights = dict(policy.weights())
    weights["model.norm.weight"] = torch.ones(3)
    before = {name: tensor.clone() for name, tensor in policy.weights().items()}
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(3,\), this model's is \(16,\)"):
        policy.load(weights)
    for name, tensor in policy.weights().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_what_is_saved_loads_again_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "model"
    CausalPolicy(llama(seed=1)).save(path)
    CausalPolicy(llama()).save(path, tokenizer())
    model, loaded = load_model(path, "cpu", torch.float32)
    torch.testing.assert_close(model.state_dict(), llama().state_dict(), rtol=0, atol=0)
    assert not model.training
    assert loaded.eos_token_id == 1
    assert [p.name for p in path.parent.iterdir()] == ["model"]
    assert "tba_packed" not in (path / "config.json").read_text()


def test_a_seed_draws_new_weights_from_the_configuration(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(llama().config.to_dict()))
    first, again, other = (load_model(tmp_path, "cpu", torch.float32, seed)[0].state_dict() for seed in (3, 3, 4))
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert float((first[name] - other[name]).abs().max()) > 0.1


def test_a_missing_model_is_one_sentence_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load_model(tmp_path / "absent", "cpu", torch.float32)
    message = str(raised.value)
    assert str(tmp_path / "absent") in message
    assert "\n" not in message
    assert "give a folder that holds config.json" in message


def test_a_temperature_of_0_is_refused() -> None:
    with pytest.raises(UserError, match=r"temperature is 0, but it must be above 0"):
        CausalPolicy(llama(), temperature=0)


def test_tied_parameters_are_given_to_the_optimizer_once() -> None:
    parameters = CausalPolicy(llama(tied=True)).parameters()
    assert len({id(p) for p in parameters}) == len(parameters)
    assert sum(p.numel() for p in parameters) == sum(p.numel() for p in llama(tied=True).parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_that_drops_out_by_itself_does_not(checkpointing: bool) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = OPTForCausalLM(
        OPTConfig(vocab_size=32, word_embed_proj_dim=16, max_position_embeddings=64, dropout=0.5, **shape)
    )
    policy = CausalPolicy(model.eval(), 1.0, gradient_checkpointing=checkpointing)
    batch = _probe(32)
    first, second = (policy.evaluate(batch).log_policy_BT for _ in range(2))
    assert torch.equal(first, second)
    first.sum().backward()


@pytest.mark.parametrize("said", [{"temperature": 0.6, "top_p": 0.9}, {"early_stopping": True, "eos_token_id": [1, 2]}])
def test_a_generation_config_that_transformers_only_reads_is_written_too(said: dict[str, Any], tmp_path: Path) -> None:
    model = OPTForCausalLM(
        OPTConfig(vocab_size=32, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2)
    )
    model.generation_config = GenerationConfig(**said)
    make_writable(model)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written.get("temperature") == said.get("temperature")
    assert written.get("eos_token_id") == said.get("eos_token_id")


def test_of_positions_that_change_what_shorter_sequences_are_those_before_them_are_used() -> None:
    rope = {"rope_type": "longrope", "long_factor": [2.0] * 4, "short_factor": [1.0] * 4, "rope_theta": 1e4}
    shape = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
    assert most_positions(Phi3Config(**shape, original_max_position_embeddings=16, rope_parameters=rope)) == 16
    assert most_positions(Phi3Config(**shape)) == 128
