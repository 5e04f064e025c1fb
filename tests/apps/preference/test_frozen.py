"""A head on a frozen backbone: what is embedded, and that what is saved is what was trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tba.apps.preference.frozen import FACTS, CachedSentenceEncoder, FrozenRewardModel
from tba.apps.preference.reward_model import ModelScore
from tba.apps.preference.similarity import NAMES
from tba.errors import UserError
from tba.types import Completion, Prompt, StopReason, Version

WORDS = ["<pad>", "[CLS]", "[SEP]", "<unk>", "red", "green", "blue", "cat", "dog", "sat", "ran"]
SENTENCES = ["red cat sat", "green dog ran", "blue cat ran red green", "dog"]


@pytest.fixture(scope="module")
def encoder() -> CachedSentenceEncoder:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return CachedSentenceEncoder(BertModel(config), tokenizer)


def test_an_embedding_has_norm_1_and_is_the_same_alone_and_beside_longer_ones(encoder: CachedSentenceEncoder) -> None:
    together = CachedSentenceEncoder(encoder.model, encoder.tokenizer).embed(SENTENCES, 10_000)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    for sentence, beside in zip(SENTENCES, together, strict=True):
        (alone,) = CachedSentenceEncoder(encoder.model, encoder.tokenizer).embed([sentence], 1)
        assert np.allclose(alone, beside, atol=1e-5)


def test_what_is_saved_scores_as_before_and_an_answer_without_words_is_not_read(
    encoder: CachedSentenceEncoder, tmp_path: Path
) -> None:
    model = FrozenRewardModel.new(encoder)
    pairs = [("red cat sat. green dog ran.", answer) for answer in ("red cat sat.", "blue dog sat.", "...")]
    first, second, none = model.read_all(pairs, 64)
    assert none is None
    assert first is not None
    assert second is not None
    model.begin([first, second])
    model.weight_F.data = torch.linspace(-1, 1, len(NAMES))
    expected = model.all_scores([first, second])
    assert expected[0] != expected[1]
    model.save(tmp_path / "model")
    prompt = Prompt("task", np.array([1], np.int32), pairs[0][0], {})
    answers = [
        Completion(np.array([1], np.int32), answer, StopReason.EOS, (Version(), Version())) for _, answer in pairs
    ]
    marks = ModelScore(str(tmp_path / "model")).judge([(prompt, answer) for answer in answers])
    assert [mark.reward for mark in marks] == pytest.approx([*expected, -1.0], abs=1e-5)
    assert marks[2].parts == {"unread": 1.0}
    (tmp_path / "model" / FACTS).write_text('{"features": ["length"]}')
    with pytest.raises(UserError, match="has other features"):
        ModelScore(str(tmp_path / "model")).judge([(prompt, answers[0])])


def test_a_feature_far_outside_of_what_was_trained_on_counts_as_three_deviations(
    encoder: CachedSentenceEncoder,
) -> None:
    model = FrozenRewardModel.new(encoder)
    short = [r for r in model.read_all([("red cat sat.", "cat sat."), ("red cat sat.", "red cat sat.")], 64) if r]
    model.begin(short)
    model.weight_F.data[NAMES.index("log_words")] = 1.0
    (long,) = model.read_all([("red cat sat.", "cat " * 500)], 64)
    assert long is not None
    assert model.all_scores([long])[0] == pytest.approx(3.0)
