"""`tba reward-model`, from a file to a reward."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tba.__main__ import main
from tba.apps.preference.reward_model import ModelScore
from tba.models.source import resolve_model_path
from tba.training.tiny_models import ScratchModel, train_bpe_tokenizer
from tba.types import Completion, Prompt, StopReason, Version

SIZE = ScratchModel(hidden_size=32, layers=2, heads=2, ff_size=64, max_positions=64)
TRAINING = ("--train.lr", "3e-3", "--train.epochs", "4", "--train.batch-size", "16")


@pytest.fixture
def backbone(tmp_path: Path) -> str:
    """A causal model from nothing."""
    tokenizer = train_bpe_tokenizer([f"{a} {b}" for a in "abc" for b in "xyz"], 280)
    folder = tmp_path / "backbone"
    SIZE.start(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Whoever has the x is preferred, whatever is around it; four pairs to a document."""
    rng = np.random.default_rng(0)
    lines = [{"prompt": "p", "chosen": "x", "rejected": "x"}]  # equal: refused
    for n in range(240):
        word = "".join(rng.choice(list("abc"), 3))
        lines.append({"prompt": f"ask {n // 4}", "chosen": f"{word} x", "rejected": f"{word} y", "doc_id": str(n // 4)})
    lines.append({"prompt": "ask " * 99, "chosen": "a x", "rejected": "a y", "doc_id": "0"})  # loses tokens
    lines.append({"prompt": "p", "chosen": "a x", "rejected": "q r " * 99, "doc_id": "0"})  # left out
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_reward_model_is_made_measured_and_used(
    tmp_path: Path, backbone: str, pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "reward"
    assert main(["reward-model", str(pairs), "--model", backbone, "--out", str(out), *TRAINING]) == 0
    said = capsys.readouterr().out
    assert "242 pairs in 243 lines" in said
    assert "refused: two equal answers, 1 (first: line 1)" in said
    assert "1 pairs with an answer longer than 64 tokens are left out; 2 of " in said
    facts = json.loads((out / "reward_model.json").read_text())
    assert facts["held_out"]["documents"] == 6
    assert (facts["refused"], facts["pairs_left_out"], facts["texts_cut"]) == ({"two equal answers": 1}, 1, 2)
    assert facts["held_out"]["accuracy"]["estimate"] > 0.9
    assert facts["held_out"]["length_accuracy"]["estimate"] == 0.5  # all pairs are of equal length
    prompt = Prompt("task", np.array([1], np.int32), "ask 7", {})
    answers = [
        Completion(np.array([1], np.int32), text, StopReason.EOS, (Version(), Version())) for text in ("abc x", "abc y")
    ]
    good, bad = ModelScore(str(out)).judge([(prompt, answer) for answer in answers])
    assert good.reward > bad.reward
    assert main(["reward-model", str(pairs), "--model", backbone, "--out", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_backbone_that_is_an_adapter_is_base_and_adapter_of_which_all_is_trained_and_saved(
    tmp_path: Path, backbone: str, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(backbone), LoraConfig(target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = load_file(Path(resolve_model_path(str(tmp_path / "adapter"), print)) / "model.safetensors")
    given = ["--model", str(tmp_path / "adapter"), "--train.lr", "1e-4", "--train.epochs", "1"]
    assert main(["reward-model", str(pairs), *given, "--out", str(tmp_path / "out")]) == 0
    ours, base = load_file(tmp_path / "out" / "model.safetensors"), load_file(Path(backbone) / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    # the adapter's change of an element is a sum of 8 numbers of up to 0.018; AdamW's, of less than 20 steps, 2e-3
    assert float((merged[name] - base[name]).abs().max()) > 0.02
    for name, tensor in merged.items():
        assert 0 < float((ours[name] - tensor).abs().max()) < 3e-3


def test_folds_measure_every_document_and_another_model_may_label(
    tmp_path: Path, backbone: str, pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gold, proxy = tmp_path / "gold", tmp_path / "proxy"
    folds = ("--folds", "2", *TRAINING)
    assert main(["reward-model", str(pairs), "--model", backbone, "--out", str(gold), *folds]) == 0
    assert json.loads((gold / "reward_model.json").read_text())["held_out"]["pairs"] == 241
    turned = tmp_path / "turned.jsonl"
    lines = [json.loads(line) for line in pairs.read_text().splitlines()]
    swapped = [{**line, "chosen": line["rejected"], "rejected": line["chosen"]} for line in lines]
    turned.write_text("".join(json.dumps(line) + "\n" for line in swapped))
    label = ("--label-with", str(gold), *TRAINING)
    assert main(["reward-model", str(turned), "--model", backbone, "--out", str(proxy), *label]) == 0
    said = capsys.readouterr().out
    assert "241 of 242 pairs, 0.0% as in the file" in " ".join(said.split())
    assert json.loads((proxy / "reward_model.json").read_text())["held_out"]["accuracy"]["estimate"] > 0.9


def test_a_head_on_a_frozen_backbone_learns_that_answers_are_to_be_of_the_prompt(
    tmp_path: Path, backbone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(60)]
    lines = []
    for _ in range(30):
        there, other = (" ".join(rng.choice(words, 6)) + "." for _ in range(2))
        lines.append({"prompt": f"{there} {other[::-1]}", "chosen": there, "rejected": other})
    path, out = tmp_path / "pairs.jsonl", tmp_path / "frozen"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    head = ("--frozen", "--train.lr", "0.05", "--train.epochs", "20", "--train.batch-size", "8")
    assert main(["reward-model", str(path), "--model", backbone, "--out", str(out), "--folds", "3", *head]) == 0
    assert "prompts are read whole" in capsys.readouterr().out
    facts = json.loads((out / "reward_model.json").read_text())
    assert facts["frozen"]
    assert facts["held_out"]["accuracy"]["estimate"] > 0.9
    scores = ModelScore(str(out)).scores([(lines[0]["prompt"], lines[0][side]) for side in ("chosen", "rejected")])
    assert scores[0] > scores[1]


def test_what_is_missing_is_said_in_one_sentence(
    tmp_path: Path, pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps({"prompt": "p", "chosen": "x", "rejected": "y"}) + "\n")
    for arguments, said in (
        (["reward-model", str(one), "--out", str(tmp_path / "o"), "--model", "x"], "about one document"),
        (["reward-model", str(pairs)], "needs --out DIR"),
        (["reward-model", str(pairs), "--out", str(tmp_path / "o")], "needs a backbone"),
        (["reward-model", str(pairs), "--out", str(tmp_path / "o"), "--folds", "1"], "at least 2 folds"),
        (["reward-model", str(tmp_path / "none"), "--out", str(tmp_path / "o"), "--model", "x"], "cannot be read"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_pairs_that_cannot_be_had_or_read_are_said_to_be_so_before_anything_is_trained(
    tmp_path: Path, backbone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "reward"))
    assert main(["reward-model", "nobody/has-this", "--model", backbone, *out]) == 2
    assert "nobody/has-this" in capsys.readouterr().err
    path = tmp_path / "long.jsonl"
    lines = [{"prompt": f"ask {n}", "chosen": "x " * 99, "rejected": "y " * 99} for n in range(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["reward-model", str(path), "--model", backbone, *out]) == 2
    assert "none of 1 held-out pairs can be read" in capsys.readouterr().err
    assert not (tmp_path / "reward").exists()
