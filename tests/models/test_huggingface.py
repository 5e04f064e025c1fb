"""A Hugging Face model: what is said when there is none, and the attention that its kind needs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from tba.chat_prompts import chat_markup
from tba.engines.transformers import EngineSettings
from tba.errors import UserError
from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.policy.lora import LoraSettings
from tba.runs.recipe_resolution import with_weights
from tba.runtime.run_directory import RunDirectory
from tba.settings import find, override
from tba.tasks.arithmetic import Arithmetic
from tba.training.tiny_models import ScratchModel, character_tokenizer
from tba.types import Completion, Prompt, Sampling, Version


def test_a_name_on_a_hub_that_cannot_be_reached_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "ftp_proxy"):
        monkeypatch.delenv(proxy, raising=False)
    with pytest.raises(UserError, match=r"'some/model' is no folder here .*127\.0\.0\.1 cannot be reached"):
        HuggingFace(path="some/model").prepared(Arithmetic())


def test_a_model_that_caps_its_attention_scores_is_one_model_in_every_part_and_wherever_its_checkpoint_is_loaded(
    tmp_path: Path,
) -> None:
    """Gemma 2: sdpa, which transformers takes by default, leaves the cap out and says nothing."""
    tokenizer = character_tokenizer("0123456789+=")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
    config = Gemma2Config(
        **sizes,
        **heads,
        vocab_size=len(tokenizer),
        sliding_window=8,
        attn_logit_softcapping=1.0,
        tie_word_embeddings=False,
    )
    made = Gemma2ForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=2 / parameter.shape[-1] ** 0.5)
    made.save_pretrained(tmp_path / "gemma2")
    tokenizer.save_pretrained(tmp_path / "gemma2")
    capped, uncapped = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "gemma2", attn_implementation=how) for how in ("eager", "sdpa")
    )
    model = HuggingFace(str(tmp_path / "gemma2"), device="cpu", generation=EngineSettings(max_completion_tokens=6))
    prompt = Prompt("sums", np.array(tokenizer.encode("123+456="), np.int32), "123+456=")
    for rank in (0, 2):
        model = replace(model, lora=LoraSettings(rank=rank))
        answered = generate(model.engine(Version()), [prompt], 4, Sampling(), np.random.default_rng(1))[0]
        scored = model.reference(1.0, Version()).log_probabilities_of([(prompt, answered)])[0]
        for completion, log_reference in zip(answered, scored, strict=True):
            right = plain_log_probabilities(capped, prompt, completion)
            np.testing.assert_allclose(completion.log_behavior, right, rtol=0, atol=1e-5)
            np.testing.assert_allclose(log_reference, right, rtol=0, atol=1e-5)
        model.save(model.policy(1.0), tmp_path / f"saved-{rank}")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"saved-{rank}")
        assert again.config._attn_implementation == "eager"
        found = plain_log_probabilities(again, prompt, answered[0])
        np.testing.assert_allclose(found, answered[0].log_behavior, rtol=0, atol=1e-5)
        assert np.abs(plain_log_probabilities(uncapped, prompt, answered[0]) - found).max() > 0.01


def plain_log_probabilities(model: PreTrainedModel, prompt: Prompt, completion: Completion) -> np.ndarray:
    """[T]: of a completion's tokens, by the model's own forward of all of them."""
    tokens = torch.from_numpy(np.concatenate([prompt.tokens, completion.tokens]).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, len(prompt.tokens) - 1 : -1]
    found: np.ndarray = torch.log_softmax(logits, -1).gather(1, tokens[len(prompt.tokens) :, None])[:, 0].numpy()
    return found


def test_a_checkpoint_keeps_the_arguments_of_the_chat_template_that_its_run_had(tmp_path: Path) -> None:
    """So whoever asks the checkpoint asks as the run did, unless they say otherwise."""
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking is false %}={% endif %}"
    ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=24, max_positions=32).start(tokenizer).save_pretrained(
        tmp_path / "base"
    )
    tokenizer.save_pretrained(tmp_path / "base")
    model = HuggingFace(str(tmp_path / "base"), device="cpu", template_arguments=("enable_thinking=false",))
    model.save(model.policy(1.0), tmp_path / "saved")
    asked = [{"role": "user", "content": "1+1"}]
    plain, kept = (AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("base", "saved"))
    right = plain.apply_chat_template(asked, tokenize=False, enable_thinking=False)
    assert right == "1+1="
    assert chat_markup(model.tokenizer(), asked) == right
    assert kept.apply_chat_template(asked, tokenize=False) == right
    assert kept.apply_chat_template(asked, tokenize=False, enable_thinking=True) == "1+1"
    again = replace(model, path=str(tmp_path / "saved")).tokenizer()
    assert again.chat_template == kept.chat_template


def test_a_template_that_writes_what_day_it_is_is_told_one_day_by_a_run_and_by_its_resumption(tmp_path: Path) -> None:
    """As Llama 3.1's and gpt-oss's: at midnight prompts stay what they were."""
    base = tmp_path / "base"
    tokenizer = character_tokenizer("0123456789- =Q")
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }} {{ messages[0]['content'] }}"
    ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=24, max_positions=32).start(tokenizer).save_pretrained(base)
    tokenizer.save_pretrained(base)
    asked = [{"role": "user", "content": "1="}]
    given = ["--model.path", str(base), "--model.device", "cpu", "--model.dtype", "float32"]
    recipe, overrides = with_weights(override(find("quickstart"), given, ""), given, lambda line: None, "2020-02-29")
    assert overrides == [*given, "--model.day", "2020-02-29"]
    assert chat_markup(recipe.model.tokenizer(), asked) == "2020-02-29 1="
    run = RunDirectory.create(tmp_path / "run", "quickstart", overrides, recipe)
    run.begin_again("it was stopped")
    assert chat_markup(RunDirectory.open(run.path).recipe().model.tokenizer(), asked) == "2020-02-29 1="
    assert with_weights(recipe, overrides, lambda line: None)[1] == overrides
    model = HuggingFace(str(base), device="cpu", day="2021-01-01")
    model.save(model.policy(1.0), tmp_path / "saved")  # whoever asks the checkpoint is told their own day
    assert "2021" not in str(AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template)
    with pytest.raises(UserError, match="give a day as 2026-03-31"):
        HuggingFace(str(base), day="29.2.2020")
