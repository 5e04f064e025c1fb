"""An adapter saved by PEFT is a model: what a run begins with, and its reference, are base + adapter."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from tests.runtime.runs import inline, inline_again
from transformers import AutoModelForCausalLM

import tba.recipes
from tba.__main__ import main
from tba.batch import Batch, collate
from tba.engines.transformers import EngineSettings
from tba.errors import UserError
from tba.generation import generate
from tba.models.arithmetic import judge_bytes, shape_of
from tba.models.huggingface import HuggingFace
from tba.models.source import refuse_missing_model, resolve_model_path
from tba.models.warm_start import teach_pairs
from tba.policy.causal import CausalPolicy
from tba.policy.loading import read_config
from tba.policy.lora import LoraSettings, is_adapter
from tba.protocols import Work
from tba.record.metrics import read_metrics
from tba.tasks.arithmetic import Arithmetic
from tba.training.checkpoint import newest_checkpoint
from tba.training.supervised import Pair, SupervisedSettings
from tba.training.tiny_models import ScratchModel, train_bpe_tokenizer
from tba.types import Completion, Group, Prompt, Sampling, StopReason, Trajectory, Version

SUMS = Path(__file__).parents[1] / "tiny_sums.py"
QUICKSTART = Path(tba.recipes.__path__[0]) / "quickstart_base"
TASK = Arithmetic()  # it is asked only where there are no weights
TEXTS = ("one and one", "two", "one is two and")
MERGED = 1e-4  # merging rounds every weight once: eps of logits of up to 10, over sums of a hundred terms
TOKENIZER = train_bpe_tokenizer([" ".join(TEXTS)] * 5, 300)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def base_in(folder: Path, tied: bool = True) -> Path:
    """A small Llama whose answers depend on what was asked."""
    model = ScratchModel(hidden_size=32, layers=2, heads=4, ff_size=48, max_positions=64, tie_embeddings=tied).start(
        TOKENIZER
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def adapter_in(folder: Path, base: Path, config: Any, rows: int = 0, **saving: Any) -> Path:
    """An adapter that does something, saved by PEFT itself; rows: more than the base has embeddings."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if rows:
        model.resize_token_embeddings(model.config.vocab_size + rows)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # peft on tied embeddings
        adapted = peft.get_peft_model(model, config)
        torch.manual_seed(2)
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
        adapted.save_pretrained(folder, **saving)
    return folder


def as_peft_says(base: Path, adapter: Path, rows: int = 0) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    if rows:
        model.resize_token_embeddings(model.config.vocab_size + rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, adapter).eval()


def log_probabilities(model: Any, prompt: Prompt, completion: Completion) -> np.ndarray:
    """[T]: of each token of the completion, by a plain forward."""
    tokens = torch.from_numpy(np.concatenate([prompt.tokens, completion.tokens]).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, len(prompt.tokens) - 1 : -1]
    found = torch.log_softmax(logits, -1).gather(1, tokens[len(prompt.tokens) :, None])[:, 0]
    return found.numpy()


def prompts_for(model: HuggingFace) -> list[Prompt]:
    tokenizer = model.tokenizer()
    return [Prompt("t", np.array(tokenizer.encode(text), np.int32), text) for text in TEXTS]


def at_the_start(model: HuggingFace) -> tuple[list[Prompt], list[list[Completion]], Batch, CausalPolicy, torch.Tensor]:
    """What the engine has sampled, with its reference's log-probabilities, the policy and its of the same [B, T]."""
    prompts = prompts_for(model)
    answered = generate(model.engine(Version()), prompts, 3, Sampling(), np.random.default_rng(5))
    scores = model.reference(1.0, Version()).log_probabilities_of(list(zip(prompts, answered, strict=True)))
    groups = [
        Group.of(
            [
                Trajectory(f"{g}-{i}", prompt, c, i % 2, s, Version())
                for i, (c, s) in enumerate(zip(row, of, strict=True))
            ]
        )
        for g, (prompt, row, of) in enumerate(zip(prompts, answered, scores, strict=True))
    ]
    batch = collate(groups)
    policy = model.policy(1.0)
    return prompts, answered, batch, policy, policy.evaluate(batch).log_policy_BT.detach()


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], **changes})


KINDS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "for causal language models": lambda: lora(task_type="CAUSAL_LM"),
    "rslora": lambda: lora(use_rslora=True),
    "dora": lambda: lora(use_dora=True),
    "ranks by layer": lambda: lora(rank_pattern={"q_proj": 5}, alpha_pattern={"v_proj": 20}),
    "norms saved whole": lambda: lora(modules_to_save=["input_layernorm"]),
    "the head saved whole": lambda: lora(modules_to_save=["lm_head"]),
    "the embeddings saved whole": lambda: lora(modules_to_save=["embed_tokens"]),
    "both saved whole": lambda: lora(modules_to_save=["embed_tokens", "lm_head"]),
    "adapted embeddings": lambda: lora(target_modules=["q_proj", "embed_tokens"]),
    "an adapted head": lambda: lora(target_modules=["q_proj", "lm_head"]),
    "some tokens": lambda: lora(trainable_token_indices={"embed_tokens": [4, 5, 6]}),
    "the head's change shared": lambda: lora(target_modules=["q_proj", "lm_head"], ensure_weight_tying=True),
    "embeddings saved whole, shared": lambda: lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether their embeddings are tied."""
    return {tied: base_in(tmp_path_factory.mktemp("bases") / "base", tied) for tied in (True, False)}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_engine_reference_and_policy_begin_with_base_and_adapter(
    tmp_path: Path, bases: dict[bool, Path], kind: str, tied: bool
) -> None:
    base = bases[tied]
    adapter = adapter_in(tmp_path / "adapter", base, KINDS[kind]())
    model = HuggingFace(str(adapter), device="cpu", generation=EngineSettings(max_completion_tokens=5))
    expected, plain = as_peft_says(base, adapter), AutoModelForCausalLM.from_pretrained(base)
    moved = 0.0
    for rank in (0, 2):
        prepared = replace(model, lora=LoraSettings(rank=rank)).prepared(TASK)
        prompts, answered, batch, policy, log_policy_BT = at_the_start(prepared)
        torch.testing.assert_close(log_policy_BT, batch.log_reference_BT, rtol=0, atol=1e-5)
        for prompt, row in zip(prompts, answered, strict=True):
            for completion in row:
                right = log_probabilities(expected, prompt, completion)
                np.testing.assert_allclose(completion.log_behavior, right, rtol=0, atol=MERGED)
                moved = max(moved, float(np.abs(right - log_probabilities(plain, prompt, completion)).max()))
        assert all(map(is_adapter, policy.weights())) == (rank > 0)
    assert moved > 0.1  # the adapter does change the model


def test_tokens_that_an_adapter_brings_are_the_models(tmp_path: Path) -> None:
    base = base_in(tmp_path / "base")
    tokenizer = HuggingFace(str(base)).tokenizer()
    tokenizer.add_tokens(["<tool>", "</tool>"])
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    config = lora(modules_to_save=["embed_tokens", "lm_head"])
    adapter = adapter_in(tmp_path / "adapter", base, config, rows=2, save_embedding_layers=True)
    tokenizer.save_pretrained(adapter)
    made = HuggingFace(str(adapter), device="cpu").prepared(TASK)
    own = made.tokenizer()
    assert own.encode("<tool>") == [len(TOKENIZER)]
    assert own.chat_template == tokenizer.chat_template
    prompt = Prompt("t", np.array(own.encode("one<tool>"), np.int32), "one<tool>")
    completion = Completion(prompt.tokens[::-1].copy(), "", StopReason.LENGTH, (Version(), Version()))
    found = made.reference(1.0, Version()).log_probabilities_of([(prompt, [completion])])[0][0]
    right = log_probabilities(as_peft_says(base, adapter, rows=2), prompt, completion)
    np.testing.assert_allclose(found, right, rtol=0, atol=MERGED)
    assert (shape := shape_of(made)) is not None
    assert shape.vocabulary == len(TOKENIZER) + 2


def test_an_adapter_is_merged_once_and_again_only_when_it_or_its_base_has_changed(tmp_path: Path, cache: Path) -> None:
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base, lora())
    said: list[str] = []
    first = resolve_model_path(str(adapter), said.append)
    assert resolve_model_path(str(shutil.copytree(adapter, tmp_path / "copy")), said.append) == first
    assert len(said) == 1
    assert said[0].startswith(f"the adapter {adapter} is merged into its base, {base}, once, in float32: ")
    adapter_in(adapter, base, lora(lora_alpha=12))
    second = resolve_model_path(str(adapter), said.append)
    base_in(base, tied=False)
    assert len({first, second, third := resolve_model_path(str(adapter), said.append)}) == 3
    (base / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert resolve_model_path(str(adapter), said.append) not in {first, second, third}
    assert len(list((cache / "merged").iterdir())) == 4


def test_a_model_is_taught_again_when_what_is_saved_with_its_weights_has_changed(tmp_path: Path, cache: Path) -> None:
    base = base_in(tmp_path / "base")

    def made() -> Path:
        return teach_pairs(str(base), SupervisedSettings(steps=1), lambda _: [Pair([5], [6])], str)

    first = made()
    assert made() == first
    (base / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    second = made()
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert len({first, second, made()}) == 3


def test_an_adapter_on_an_adapter_starts_from_both_and_one_beside_its_base_finds_it(tmp_path: Path) -> None:
    base = base_in(tmp_path / "base")
    first = adapter_in(tmp_path / "first", base, lora())
    merged = resolve_model_path(str(first), print)
    second = adapter_in(tmp_path / "second", Path(merged), lora(target_modules=["o_proj"]))
    expected = as_peft_says(Path(merged), second)
    config = json.loads((second / "adapter_config.json").read_text())
    (second / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "../first"}))
    made = HuggingFace(str(second), device="cpu").prepared(TASK)
    prompts, answered, *_ = at_the_start(made)
    right = log_probabilities(expected, prompts[0], answered[0][0])
    np.testing.assert_allclose(answered[0][0].log_behavior, right, rtol=0, atol=MERGED)


def test_a_model_that_was_not_prepared_is_the_same(tmp_path: Path) -> None:
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base, lora())
    model = HuggingFace(str(adapter), device="cpu", lora=LoraSettings(rank=2))
    for made in (model, replace(model, lora=LoraSettings())):
        prompts, answered, batch, _, log_policy_BT = at_the_start(made)
        torch.testing.assert_close(log_policy_BT, batch.log_reference_BT, rtol=0, atol=1e-5)
        right = log_probabilities(as_peft_says(base, adapter), prompts[0], answered[0][0])
        np.testing.assert_allclose(answered[0][0].log_behavior, right, rtol=0, atol=MERGED)


def test_an_adapter_and_its_base_are_found_by_their_names_on_the_hub_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the Hub's cache has them; the base of the revision that the adapter names, and not the present one."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def cached(name: str, revisions: dict[str, Path]) -> None:
        folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        for commit, (revision, place) in enumerate(revisions.items()):
            shutil.copytree(place, folder / "snapshots" / f"{commit:040x}")
            (folder / "refs").mkdir(exist_ok=True)
            (folder / "refs" / revision).write_text(f"{commit:040x}")

    old, new = base_in(tmp_path / "old"), base_in(tmp_path / "new", tied=False)
    adapter = adapter_in(tmp_path / "adapter", old, lora(revision="v1"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "some/base"}))
    cached("some/base", {"main": new, "v1": old})
    cached("some/adapter", {"main": adapter})
    made = HuggingFace("some/adapter", device="cpu").prepared(TASK)
    prompts, answered, *_ = at_the_start(made)
    right = log_probabilities(as_peft_says(old, adapter), prompts[0], answered[0][0])
    np.testing.assert_allclose(answered[0][0].log_behavior, right, rtol=0, atol=MERGED)
    assert resolve_model_path("some/base", print) == "some/base"


def test_without_peft_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_in(tmp_path / "adapter", base_in(tmp_path / "base"), lora())
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"install the library peft: pip install 'tba-rl\[lora\]'"):
        resolve_model_path(str(adapter), print)


def test_what_cannot_be_merged_is_one_sentence_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    base = base_in(tmp_path / "base")

    def refused(adapter: Path, why: str) -> None:
        with pytest.raises(UserError, match=why) as found:
            HuggingFace(str(adapter)).prepared(TASK)
        assert "\n" not in str(found.value)
        assert not list((cache / "merged").glob("*"))

    def changed(name: str, **fields: Any) -> Path:
        folder = Path(shutil.copytree(adapter, tmp_path / name))
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
        return folder

    adapter = adapter_in(tmp_path / "adapter", base, lora())
    away = (
        "the base ./away of the adapter .*moved cannot be had .*there is no folder ./away.*base_model_name_or_path of"
    )
    refused(changed("moved", base_model_name_or_path="./away"), away)
    refused(changed("unnamed", base_model_name_or_path=None), "does not name its base")
    refused(changed("circle", base_model_name_or_path=str(tmp_path / "circle")), "names itself as its base")
    refused(changed("classifier", task_type="SEQ_CLS"), "is for SEQ_CLS, no language model")
    refused(changed("strange", peft_type="NEW"), "cannot be put on its base")
    refused(changed("broken", peft_type=5), "peft_type is 5, it must be a text")
    refused(changed("fewer", target_modules=["q_proj"]), "does not fit its base .* weights have no counterpart")
    refused(changed("more", target_modules=["q_proj", "v_proj", "down_proj", "o_proj"]), "does not fit its base")
    refused(changed("wider", r=4), "cannot be put on its base")
    pickled = changed("pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    refused(pickled, "has no adapter_model.safetensors")
    prompting = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    refused(adapter_in(tmp_path / "soft", base, prompting), "the kind PROMPT_TUNING cannot be merged; LoRA can")
    config = json.loads((base / "config.json").read_text())
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    refused(adapter, "cannot be put on its base .* not quantized")


@pytest.fixture
def on_the_quickstart(tmp_path: Path) -> tuple[str, Path]:
    """An adapter on the quickstart's base, and the folder of the whole weights that it gives."""
    adapter = adapter_in(tmp_path / "sft", QUICKSTART, lora(r=2))
    return str(adapter), Path(resolve_model_path(str(adapter), lambda line: None))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_from_an_adapter_is_the_run_from_the_merged_model_also_when_it_is_resumed(
    tmp_path: Path, on_the_quickstart: tuple[str, Path], rank: int
) -> None:
    """To the bit. Its reference is base + adapter, so log-ratios begin at 0."""
    adapter, merged = on_the_quickstart
    lora_of = ["--model.lora.rank", str(rank)] if rank else []
    for name, path in (("a", adapter), ("m", str(merged))):
        inline(tmp_path / name, "--model.path", path, *lora_of, "--steps", "3", source=SUMS)
        inline_again(tmp_path / name, "--steps", "5")
    rows, others = ({row["step"]: row for row in read_metrics(tmp_path / name)} for name in ("a", "m"))
    assert abs(rows[1]["log_ratio"]) < 1e-4
    assert [rows[step]["loss"] for step in range(1, 6)] == [others[step]["loss"] for step in range(1, 6)]
    ends = [newest_checkpoint(tmp_path / name / "checkpoints") for name in ("a", "m")]
    weights = [load_file(end.path / "model.safetensors") for end in ends if end is not None]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    begun = load_file(merged / "model.safetensors")
    assert any(not torch.equal(tensor, begun[name]) for name, tensor in weights[0].items())
    assert (ends[0] is not None and (ends[0].path / "adapter").is_dir()) == (rank > 0)


def test_commands_that_take_a_model_take_an_adapter(
    tmp_path: Path, on_the_quickstart: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, merged = on_the_quickstart
    said = []
    for path in (adapter, str(merged)):
        assert main(["eval", str(SUMS), "--checkpoint", path]) == 0
        said.append([line for line in capsys.readouterr().out.splitlines() if "pass@" in line])
    assert said[0] == said[1]
    assert said[0]
    assert main(["check", str(SUMS), "--model.path", adapter, "--model.lora.rank", "2"]) == 0
    assert "needs" not in capsys.readouterr().err
    (tmp_path / "learn.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 4)
    for path, out in ((adapter, "a"), (str(merged), "m")):
        given = ["--model", path, "--held-out", "0", "--warm-start.sft.steps", "2", "--out", str(tmp_path / out)]
        assert main(["sft", str(tmp_path / "learn.jsonl"), *given]) == 0
    learnt = [load_file(tmp_path / out / "model.safetensors") for out in ("a", "m")]
    assert all(torch.equal(tensor, learnt[1][name]) for name, tensor in learnt[0].items())
    adapted, plain = (HuggingFace(path).prepared(TASK).memory(Work(16, 16, 2, 8, 1)) for path in (adapter, str(merged)))
    assert adapted is not None
    assert adapted == plain


@pytest.mark.parametrize("path", ["https://me:s3cret@hub.example/Qwen/x", "me:s3cret@hub.example/x"])
def test_a_password_in_a_path_is_not_repeated(path: str) -> None:
    with pytest.raises(UserError, match="give the folder of a model") as raised:
        refuse_missing_model(path)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("count", [1e9, 10**9, 10**400])
@pytest.mark.parametrize("place", [(), ("text_config",)])
def test_a_configuration_of_countless_layers_is_refused_before_they_are_made(
    tmp_path: Path, count: float, place: tuple[str, ...]
) -> None:
    config: dict[str, object] = {"model_type": "qwen2", "num_hidden_layers": count}
    for name in place:
        config = {name: config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config.json has num_hidden_layers .*, more than 10,000: give another model"):
        refuse_missing_model(str(tmp_path))


@pytest.mark.parametrize("read", [refuse_missing_model, read_config, lambda name: judge_bytes(name, None, 1)])
def test_countless_layers_of_a_model_on_the_hub_are_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[str], object]
) -> None:
    """As the Hub's cache has it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(f"{0:040x}")
    (folder / "snapshots" / f"{0:040x}").mkdir(parents=True)
    config = {"model_type": "qwen2", "num_hidden_layers": 10**9}
    (folder / "snapshots" / f"{0:040x}" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config.json has num_hidden_layers .*, more than 10,000: give another model"):
        read("some/model")
