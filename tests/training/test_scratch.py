"""Models and tokenizers from nothing, and results that are computed once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.errors import UserError
from tba.training.cache import cached_folder, supervised_key
from tba.training.supervised import Pair, SupervisedSettings
from tba.training.tiny_models import ScratchModel, train_bpe_tokenizer

TEXTS = ["Natalia sold 48 clips in April, and then 24 in May.\n#### 72", "How many clips did Natalia sell in all?"] * 4
TOKENIZER = train_bpe_tokenizer(TEXTS, 300)


@settings(deadline=None)
@given(st.text())
def test_decoding_gives_the_text_back_whatever_it_was(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    if "<eos>" not in text and "<pad>" not in text:
        assert TOKENIZER.decode(ids) == text


def test_every_digit_is_a_token_and_frequent_words_are_merged() -> None:
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("4872")) == ["4", "8", "7", "2"]
    assert len(TOKENIZER.encode("clips")) < 5
    assert 258 < len(TOKENIZER) <= 300
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token) == ("<pad>", "<eos>")
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id


def test_equal_texts_give_equal_tokenizers() -> None:
    assert train_bpe_tokenizer(iter(TEXTS), 300).get_vocab() == TOKENIZER.get_vocab()
    with pytest.raises(UserError, match="cannot have 200 tokens"):
        train_bpe_tokenizer(TEXTS, 200)


def test_a_model_has_the_sizes_asked_for_and_the_tokenizers_ids() -> None:
    sizes = ScratchModel(hidden_size=32, layers=2, heads=4, kv_heads=2, ff_size=40, max_positions=64)
    model, v = sizes.start(TOKENIZER), len(TOKENIZER)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 40 + 2 * 32  # queries and outputs, keys and values, gates, norms
    assert sum(p.numel() for p in model.parameters()) == v * 32 + 2 * layer + 32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (model.config.eos_token_id, model.config.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)
    assert not model.training
    assert model.dtype == torch.float32


def test_equal_seeds_give_equal_models_and_leave_torchs_generator_alone() -> None:
    sizes, state = ScratchModel(hidden_size=16, layers=1, heads=2), torch.get_rng_state()
    model, again = sizes.start(TOKENIZER), sizes.start(TOKENIZER)
    other_model = ScratchModel(hidden_size=16, layers=1, heads=2, seed=1).start(TOKENIZER)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(model.parameters()), next(other_model.parameters()))


@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 100, "heads": 3}, {"heads": 4, "kv_heads": 3}, {"layers": 0}, {"heads": 0}]
)
def test_sizes_that_do_not_go_together_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UserError):
        ScratchModel(**sizes)


def test_a_result_is_made_once_and_stays(tmp_path: Path) -> None:
    calls = []

    def make(path: Path) -> None:
        calls.append(path)
        (path / "model.safetensors").write_bytes(b"weights")

    paths = {cached_folder(tmp_path, "abc", make) for _ in range(3)}
    assert paths == {tmp_path / "abc"}
    assert len(calls) == 1
    assert (tmp_path / "abc" / "model.safetensors").read_bytes() == b"weights"


def test_a_result_that_fails_leaves_nothing_and_is_made_again(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        (path / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder(tmp_path, "abc", fail)
    assert list(tmp_path.iterdir()) == []
    assert cached_folder(tmp_path, "abc", lambda path: None) == tmp_path / "abc"


def test_of_two_who_make_the_same_at_once_the_first_wins(tmp_path: Path) -> None:
    def overtaken(path: Path) -> None:
        (path / "by").write_text("second")
        cached_folder(tmp_path, "abc", lambda other: (other / "by").write_text("first") and None)

    assert (cached_folder(tmp_path, "abc", overtaken) / "by").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_key_changes_with_anything_that_changes_the_result() -> None:
    pairs = [Pair([1, 2], [3]), Pair([4], [5])]
    weights = {"a": torch.zeros(2), "b": torch.ones(3)}
    base = (ScratchModel(), SupervisedSettings())
    keys = [
        supervised_key(base, pairs, weights),
        supervised_key((ScratchModel(seed=1), SupervisedSettings()), pairs, weights),
        supervised_key((ScratchModel(), SupervisedSettings(lr=2e-3)), pairs, weights),
        supervised_key(base, pairs[::-1], weights),
        supervised_key(base, [Pair([1], [2, 3]), Pair([4], [5])], weights),
        supervised_key(base, pairs, {"a": torch.zeros(2), "b": torch.tensor([1.0, 1.0, 2.0])}),
        supervised_key(base, pairs),
        supervised_key((*base, {"vocabulary": ["a", "b"]}), pairs, weights),
    ]
    assert len(set(keys)) == len(keys)
    assert supervised_key((ScratchModel(), SupervisedSettings()), list(pairs), dict(weights)) == keys[0]
    assert json.dumps(keys[0]).strip('"').isalnum()
