"""Features of an answer against its document, worked out by hand on embeddings along axes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.apps.preference.similarity import LONGEST_SENTENCE, NAMES, features, split_sentences

AXES = np.eye(4, dtype=np.float32)
DOCUMENT = "Alpha beta gamma. Delta epsilon zeta. Theta kappa lambda."


def named(document: str, answer: str, document_DH: np.ndarray, answer_AH: np.ndarray) -> dict[str, float]:
    found = features(document, answer, document_DH, answer_AH)
    return dict(zip(NAMES, found.tolist(), strict=True))


def test_sentences_end_at_full_stops_and_lines_and_are_cut_where_there_are_none() -> None:
    assert split_sentences('He said "go now please." She went there. ok') == [
        'He said "go now please."',
        "She went there.",
    ]
    assert split_sentences("one two three\nfour five six") == ["one two three", "four five six"]
    assert split_sentences("a b c . d e f .") == ["a b c .", "d e f ."]
    assert split_sentences("yes") == ["yes"]
    assert split_sentences(" ...\n!!") == []
    n = LONGEST_SENTENCE
    assert [len(s.split()) for s in split_sentences("word " * (2 * n + 5))] == [n, n, 5]


def test_an_answer_that_is_the_first_sentence_covers_that_and_nothing_else() -> None:
    found = named(DOCUMENT, "Alpha beta gamma.", AXES[:3], AXES[:1])
    assert found["support"] == found["least_support"] == found["coverage_first"] == found["coverage_best"] == 1.0
    assert found["coverage"] == found["coverage_three"] == pytest.approx(1 / 3)
    assert (found["place"], found["repeated"], found["words_there"], found["bigrams_there"]) == (0.0, 0.0, 1.0, 1.0)
    assert found["words_covered"] == pytest.approx(3 / 9, abs=1e-6)
    assert found["whole"] == pytest.approx(1 / np.sqrt(3), abs=1e-6)
    assert found["log_words"] == pytest.approx(np.log(4), abs=1e-6)


def test_what_is_said_twice_or_not_in_the_document_is_seen() -> None:
    twice = named(DOCUMENT, "Theta kappa lambda. Theta kappa lambda.", AXES[:3], AXES[[2, 2]])
    assert (twice["repeated"], twice["place"], twice["different"]) == (1.0, 1.0, 0.5)
    other = named(DOCUMENT, "Something else entirely.", AXES[:3], AXES[3:])
    assert [other[name] for name in ("support", "coverage", "whole", "words_there", "words_covered")] == [0.0] * 5


@given(st.text(), st.text(), st.integers(0, 99))
def test_features_are_finite_whatever_the_texts(document: str, answer: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    split = [split_sentences(text) for text in (document, answer)]
    embedded = [rng.normal(size=(len(found), 8)).astype(np.float32) for found in split]
    normed = [matrix / np.linalg.norm(matrix, axis=1, keepdims=True) for matrix in embedded]
    if not all(split):
        with pytest.raises(ValueError, match="a sentence of the document"):
            features(document, answer, *normed)
        return
    found = features(document, answer, *normed)
    assert found.shape == (len(NAMES),)
    assert np.isfinite(found).all()
