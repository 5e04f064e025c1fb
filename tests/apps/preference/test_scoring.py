"""Reward models: what is read, and that a score depends on its own text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tba.apps.preference.frozen import load_scorer
from tba.apps.preference.reward_model import ModelScore, Win
from tba.apps.preference.scoring import RewardModel, length_batches
from tba.errors import UserError
from tba.types import Completion, Prompt, StopReason, Version

WORDS = ["<pad>", "<eos>", "[CLS]", "[SEP]", "<unk>", *"abcdefgh"]


def tokenizer(encoder: bool) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]"} if encoder else {"eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", **names)


def model(encoder: bool, **more: Any) -> RewardModel:
    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 32, "num_labels": 1}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    if encoder:
        network = BertForSequenceClassification(BertConfig(**size))
    else:
        network = LlamaForSequenceClassification(LlamaConfig(**size))
    return RewardModel(network, tokenizer(encoder), **{"max_tokens": 16, "keep": "end", **more})


TEXT = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6).map(" ".join)


@settings(deadline=None, max_examples=30)
@given(st.booleans(), st.lists(st.tuples(TEXT, TEXT), min_size=2, max_size=6))
def test_a_score_is_the_same_alone_and_beside_others_of_any_length(encoder: bool, pairs: list[tuple[str, str]]) -> None:
    own = model(encoder)
    texts = [own.read(*pair) for pair in pairs]
    assert all(texts)
    alone = np.array([own.all_scores([text])[0] for text in texts if text])
    for tokens in (1, 24, 10_000):
        found = own.all_scores([text for text in texts if text], max_tokens_per_pass=tokens)
        assert np.allclose(found, alone, atol=1e-5)


def test_the_response_is_read_whole_and_the_prompt_is_cut_at_the_side_that_is_wanted() -> None:
    long = " ".join("abcdefgh" * 4)  # 32 tokens
    for keep, first in (("end", "f"), ("beginning", "a")):
        own = model(False, keep=keep)
        text = own.read(long, "a b c d")
        assert text is not None
        words = [WORDS[i] for i in text.tokens]
        assert words[-5:] == ["a", "b", "c", "d", "<eos>"]
        assert (len(words), text.cut, words[0]) == (16, 21, first)
        assert own.read("a", long) is None
    text = model(True).read("a b", "c")
    assert text is not None
    assert [WORDS[i] for i in text.tokens] == ["[CLS]", "a", "b", "[SEP]", "c", "[SEP]"]


def test_the_score_is_read_at_eos_though_padding_may_have_its_id() -> None:
    own = model(False)
    own.tokenizer.pad_token = "<eos>"
    again = RewardModel(own.model, own.tokenizer, 16, "end")
    text = again.read("a b", "c")
    assert text is not None
    hidden = again.model.model(torch.tensor([text.tokens])).last_hidden_state[0, -1]
    assert again.all_scores([text])[0] == pytest.approx(again.model.score(hidden).item(), abs=1e-6)
    assert again.pad != again.tokenizer.eos_token_id


@given(st.lists(st.integers(1, 9), min_size=1), st.integers(1, 30))
def test_parts_are_a_partition_within_the_bound(lengths: list[int], most: int) -> None:
    from tba.apps.preference.scoring import TokenisedText

    texts = [TokenisedText(tuple(range(n)), 0, 0) for n in lengths]
    found = length_batches(texts, most)
    assert sorted(i for part in found for i in part) == list(range(len(texts)))
    assert all(len(part) == 1 or len(part) * max(lengths[i] for i in part) <= most for part in found)


def completion(text: str, reason: StopReason) -> Completion:
    return Completion(np.array([1], np.int32), text, reason, (Version(), Version()))


def test_a_truncated_answer_gets_the_penalty_and_its_score_is_seen(tmp_path: Path) -> None:
    model(False).save(tmp_path / "model")
    prompt = Prompt("task", np.array([1], np.int32), "a b", {})
    answers = [
        completion("c d", StopReason.EOS),
        completion("c d", StopReason.LENGTH),
        completion(" ".join("a" * 40), StopReason.EOS),
    ]
    marks = ModelScore(str(tmp_path / "model"), max_tokens=16).judge([(prompt, a) for a in answers])
    assert marks[0].reward == marks[0].parts["score"] == marks[1].parts["score"]
    assert (marks[1].reward, marks[1].parts["cut"]) == (-1.0, 1.0)
    assert (marks[2].reward, marks[2].parts) == (-1.0, {"unread": 1.0})
    kept = ModelScore(str(tmp_path / "model"), without_eos=None, max_tokens=16).judge(
        [(prompt, a) for a in answers[1:]]
    )
    assert kept[0].reward == marks[0].reward
    assert np.isnan(kept[1].reward)  # which a searcher rejects and counts


def test_an_answer_wins_when_it_is_scored_above_the_persons(tmp_path: Path) -> None:
    own = model(False)
    own.save(tmp_path / "model")
    texts = {text: own.read("a b", text) for text in ("c", "d e", "f")}
    scores = {text: float(own.all_scores([read])[0]) for text, read in texts.items() if read}
    low, middle, high = sorted(scores, key=lambda text: scores[text])
    prompt = Prompt("task", np.array([1], np.int32), "a b", {"reference": middle})
    win = Win(ModelScore(str(tmp_path / "model"), max_tokens=16))
    answers = [completion(text, StopReason.EOS) for text in (low, middle, high)]
    marks = win.judge([(prompt, answer) for answer in answers])
    assert [mark.reward for mark in marks] == [0.0, 0.0, 1.0]
    assert win.judge([(prompt, completion(" ".join("a" * 40), StopReason.LENGTH))])[0].reward == 0.0
    unread = Prompt("task", np.array([1], np.int32), "a b", {"reference": " ".join("a" * 40)})
    assert (mark := win.judge([(unread, answers[2])])[0]).reward == 0.0  # nothing to win against
    assert mark.parts["reference_unread"] == 1.0
    with pytest.raises(UserError, match="no field 'reference'"):
        win.judge([(Prompt("task", np.array([1], np.int32), "a b", {}), answers[0])])


def test_backbones_without_token_types_or_with_another_head_are_read(tmp_path: Path) -> None:
    size: dict[str, Any] = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 32, "pad_token_id": 0}
    size |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 18, "num_labels": 3}
    torch.manual_seed(0)
    RobertaForSequenceClassification(RobertaConfig(type_vocab_size=1, **size)).save_pretrained(tmp_path)
    tokenizer(True).save_pretrained(tmp_path)
    own = RewardModel.load(str(tmp_path), max_tokens=100, has_head=False)
    assert own.max_tokens == 17  # positions begin after padding's
    read = own.read(" ".join("a" * 40), "b c")
    assert read is not None
    assert len(read.tokens) == 17
    assert np.isfinite(own.all_scores([read])).all()


def test_a_model_reads_as_it_was_trained_to_read(tmp_path: Path) -> None:
    model(False).save(tmp_path)
    report = tmp_path / "reward_model.json"
    report.write_text('{"reads": {"max_tokens": 7, "keep": "beginning"}}')
    found = load_scorer(str(tmp_path), 640, "end", "cpu", 1000).model
    assert (found.max_tokens, found.keep) == (7, "beginning")
    report.write_text('{"reads": {"max_tokens": 7}}')
    with pytest.raises(UserError, match="keep of reads is missing or null"):
        load_scorer(str(tmp_path), 640, "end", "cpu", 1000)
    report.write_text('{"frozen": false}')  # of an earlier version
    assert load_scorer(str(tmp_path), 13, "end", "cpu", 1000).model.max_tokens == 13


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="no reward model can be loaded from"):
        RewardModel.load("/no/such/folder")
    with pytest.raises(UserError, match="needs a reward model"):
        ModelScore("")
