"""Sentence embeddings: a model of sentence-transformers is read as it says, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tba.apps.red_team.embedding import SentenceEmbedder
from tba.errors import UserError

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcd"]
STAGES = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(tmp_path)
    torch.manual_seed(0)
    size = {"vocab_size": len(WORDS), "hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 16}
    BertModel(BertConfig(num_hidden_layers=1, num_attention_heads=2, **size)).save_pretrained(tmp_path)
    return tmp_path


def says(folder: Path, pooling: dict[str, object], stages: list[str]) -> None:
    places = zip(stages, ["", "1_Pooling", "2_More"], strict=False)
    (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": path} for kind, path in places]))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_the_mean_or_the_first_tokens_state_is_taken_as_the_model_says(folder: Path) -> None:
    plain = SentenceEmbedder.load(str(folder)).embed(["a b", "c"])
    says(folder, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, STAGES)
    mean = SentenceEmbedder.load(str(folder)).embed(["a b", "c"])
    says(folder, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, STAGES)
    first = SentenceEmbedder.load(str(folder)).embed(["a b", "c", "a"])
    assert np.array_equal(plain, mean)
    assert np.allclose(np.linalg.norm(first, axis=1), 1.0, atol=1e-6)
    assert np.allclose(first[1], mean[1], atol=1e-6)  # of one token both are the same
    assert not np.allclose(first[0], mean[0], atol=1e-3)
    says(folder, {"pooling_mode": "cls"}, [*STAGES, "sentence_transformers.models.Normalize"])
    assert np.array_equal(SentenceEmbedder.load(str(folder)).embed(["a b", "c", "a"]), first)


@pytest.mark.parametrize(
    ("pooling", "stages"),
    [
        ({"pooling_mode_max_tokens": True}, STAGES),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, STAGES),
        ({"pooling_mode_mean_tokens": True}, [*STAGES, "sentence_transformers.models.Dense"]),
    ],
)
def test_what_does_more_is_refused(folder: Path, pooling: dict[str, object], stages: list[str]) -> None:
    says(folder, pooling, stages)
    with pytest.raises(UserError, match="give a model that takes the mean or the first token's state"):
        SentenceEmbedder.load(str(folder))
