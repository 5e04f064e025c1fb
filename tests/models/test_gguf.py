"""A GGUF file is the model that its folder is: stories260K, written as both from llama2.c's file."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch

from tba.errors import UserError
from tba.models.gguf import convert_once
from tba.models.huggingface import HuggingFace
from tba.policy.loading import load_model
from tba.tasks.arithmetic import Arithmetic

STORIES = Path(__file__).parents[1] / "fixtures" / "stories260K"
FILE = STORIES / "stories260K.gguf"
NO_TASK = Arithmetic()  # it is asked only where there are no weights
TEXT = "Once upon a time, a cat named Zoë had 3 red balls.\nShe said: "


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits(folder: Path) -> torch.Tensor:
    model, tokenizer = load_model(folder, "cpu", torch.float32)
    with torch.no_grad():
        return model(**tokenizer(TEXT, return_tensors="pt")).logits


def test_the_file_and_the_folder_give_equal_tokens_and_equal_logits(cache: Path) -> None:
    made = convert_once(FILE, print)
    tokenizers = [load_model(folder, "cpu", torch.float32)[1] for folder in (STORIES, made)]
    assert tokenizers[0](TEXT)["input_ids"] == tokenizers[1](TEXT)["input_ids"]
    assert torch.equal(logits(STORIES), logits(made))
    assert "quantization_config" not in json.loads((made / "config.json").read_text())


def test_the_folder_knows_the_story_that_the_model_was_pretrained_on() -> None:
    """Llama2.c's own greedy continuation: a wrong order of rows in a head, or of merges, gives no English."""
    model, tokenizer = load_model(STORIES, "cpu", torch.float32)
    begun = tokenizer("<s>Once upon a time, there was a little girl named Lily.", return_tensors="pt")
    found = model.generate(**begun, max_new_tokens=30, do_sample=False)[0, begun["input_ids"].shape[1] :]
    assert tokenizer.decode(found).strip().startswith("She loved to play outside in the park. One day, she saw a big")


def test_a_file_is_converted_once_for_all_that_name_it(cache: Path, tmp_path: Path) -> None:
    said: list[str] = []
    made = HuggingFace(path=str(FILE)).prepared(NO_TASK, said.append).path
    again = HuggingFace(path=str(shutil.copy(FILE, tmp_path / "other.gguf"))).prepared(NO_TASK, said.append).path
    assert made == again
    assert len(said) == 1
    assert [p.name for p in (cache / "gguf").iterdir()] == [Path(made).name]


def test_without_the_package_the_error_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"install the package gguf: pip install 'tba-rl\[gguf\]'"):
        convert_once(FILE, print)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model", FILE.read_bytes()[:5000]])
def test_what_is_no_gguf_file_is_one_sentence_and_leaves_nothing(cache: Path, tmp_path: Path, content: bytes) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content)
    with pytest.raises(UserError, match=r"transformers cannot read the GGUF file .*broken\.gguf"):
        convert_once(broken, print)
    assert list((cache / "gguf").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "other"),
    [(b"blk.1.attn_q.weight", b"blk.9.attn_q.weight"), (b"output_norm.weight", b"output_gone.weight")],
)
def test_a_file_without_one_of_the_weights_is_refused_and_leaves_nothing(
    cache: Path, tmp_path: Path, name: bytes, other: bytes
) -> None:
    broken = tmp_path / "broken.gguf"
    content = FILE.read_bytes()
    assert name in content
    broken.write_bytes(content.replace(name, other))
    with pytest.raises(UserError, match="do not hold the weights of a LlamaForCausalLM: 1 tensor is missing"):
        convert_once(broken, print)
    assert list((cache / "gguf").iterdir()) == []


def counting(place: bytes | int, form: str, number: int) -> bytes:
    """The file with another number, at a place or behind that text."""
    at = FILE.read_bytes().index(place) + len(place) if isinstance(place, bytes) else place
    content = bytearray(FILE.read_bytes())
    struct.pack_into(f"<{form}", content, at, number)
    return bytes(content)


@pytest.mark.parametrize(
    ("place", "form", "number", "reason"),
    [
        (8, "Q", 10**12, "its header counts 1,000,000,000,000 parts, and it has 1,"),  # tensors
        (16, "Q", 10**12, "its header counts 1,000,000,000,000 parts, and it has 1,"),  # fields
        (24, "Q", 10**12, "its header counts 1,000,000,000,000 parts, and it has 1,"),  # bytes of a name
        (b"tokenizer.ggml.tokens\x09\0\0\0\x08\0\0\0", "Q", 10**12, "its header counts 1,000,000,000,000 parts"),
        (b"tokenizer.ggml.scores\x09\0\0\0\x06\0\0\0", "Q", 10**12, "its header counts 1,000,000,000,000 parts"),
        (b"general.name\x08\0\0\0", "Q", 2**64 - 1, "its header counts 18,446,744,073,709,551,615 parts"),
        (b"token_embd.weight", "I", 2**31, "its tensor 'token_embd.weight' has 2,147,483,648 axes"),
        (b"token_embd.weight\x02\0\0\0", "Q", 2**62, "its tensor 'token_embd.weight' is .46116860"),
        (b"llama.block_count\x04\0\0\0", "I", 10**9, "its 'llama.block_count' is 1000000000, more than 10,000"),
        (b"llama.attention.head_count\x04\0\0\0", "I", 10**9, "its 'llama.attention.head_count' is 1000000000"),
        (b"llama.embedding_length\x04\0\0\0", "I", 10**9, "its 'llama.embedding_length' is 1000000000, more than 512"),
        (b"llama.vocab_size\x04\0\0\0", "I", 10**9, "its 'llama.vocab_size' is 1000000000, more than 512"),
    ],
)
def test_a_header_that_counts_what_the_file_cannot_hold_is_refused_before_anything_is_made(
    cache: Path,
    tmp_path: Path,
    place: bytes | int,
    form: str,
    number: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(counting(place, form, number))
    monkeypatch.setattr("tba.models.gguf.AutoTokenizer", None)  # which would read all of it
    with pytest.raises(UserError, match=rf"cannot read the GGUF file .*broken\.gguf \({reason}"):
        convert_once(broken, print)
    assert list((cache / "gguf").iterdir()) == []


def test_a_file_that_is_not_there_is_one_sentence(cache: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder ./no\.gguf|cannot be read"):
        HuggingFace(path="./no.gguf").prepared(NO_TASK)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(cache: Path) -> None:
    """No file of this process may be larger than 100 kB: the weights, of 1 MB, cannot be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match=r"the model cannot be written to .*make room"):
            convert_once(FILE, print)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((cache / "gguf").iterdir()) == []
