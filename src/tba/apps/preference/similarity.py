"""Features that compare an answer with its document, for a reward model on a frozen sentence encoder.

Invariant: all are functions of the two texts and their sentences' embeddings alone, finite, and of order one; none
depends on which system wrote the answer, or on other answers.

Shape legend: D sentences of the document, A of the answer, H numbers of an embedding (of norm 1), F features.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

NAMES = (
    "log_words",  # log(1 + words of the answer)
    "log_sentences",
    "different",  # share of the answer's words that are different ones
    "repeated",  # how near a sentence of the answer is to its nearest other one, on average
    "support",  # how near a sentence of the answer is to its nearest of the document, on average
    "least_support",
    "coverage",  # how near a sentence of the document is to its nearest of the answer, on average
    "coverage_first",  # of the first sentence, of the first three, and falling off by the place in the document
    "coverage_three",
    "coverage_early",
    "coverage_central",  # weighted by how near a sentence is to the rest of its document
    "coverage_best",
    "whole",  # of the mean of all sentences, each side
    "place",  # where in the document (0 to 1) the answer's sentences have their nearest, on average
    "words_there",  # share of the answer's different words that the document has
    "bigrams_there",
    "words_covered",  # share of the document's longer words, as often as they occur, that the answer has
    "words_covered_early",  # the same of the first hundred words
)
LONGEST_SENTENCE = 40  # words of a sentence: text without full stops is cut
MOST_SENTENCES = 500  # sentences of a text that are read: each is compared with each
_EARLY_SENTENCES = 4.0  # sentences after which the weight of a place has fallen by e
_CENTRAL_WEIGHT = 10.0  # how much centrality decides: softmax(this x mean similarity)
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]\u201d\u2019]))\s+|\n+")
_WORD = re.compile(r"[^\W_]+")


def split_sentences(text: str) -> list[str]:
    """Returns at most `MOST` non-empty sentences in order; those under three words only if there are no others."""
    parts = [
        " ".join(words[i : i + LONGEST_SENTENCE])
        for piece in [piece.strip() for piece in _SENTENCE_END.split(text)]
        if (words := piece.split()) and _WORD.search(piece)
        for i in range(0, len(words), LONGEST_SENTENCE)
    ]
    return ([sentence for sentence in parts if len(_words(sentence)) >= 3] or parts)[:MOST_SENTENCES]


def features(document: str, answer: str, document_DH: Floats, answer_AH: Floats) -> Floats:
    """Returns [F] in the order of `NAMES`. Raises `ValueError` if either text has no sentence."""
    if not (len(document_DH) and len(answer_AH)):
        raise ValueError("features need a sentence of the document and one of the answer")
    near_DA = document_DH @ answer_AH.T
    cover_D, support_A = near_DA.max(1), near_DA.max(0)
    early_D = np.exp(-np.arange(len(cover_D)) / _EARLY_SENTENCES)
    central_D = np.exp(_CENTRAL_WEIGHT * (document_DH @ _mean(document_DH)))
    place_A = near_DA.argmax(0) / max(1, len(cover_D) - 1)
    words = _words(answer)
    values = (
        math.log1p(len(words)),
        math.log1p(len(answer_AH)),
        len(set(words)) / max(1, len(words)),
        _repetition(answer_AH),
        support_A.mean(),
        support_A.min(),
        cover_D.mean(),
        cover_D[0],
        cover_D[:3].mean(),
        np.average(cover_D, weights=early_D),
        np.average(cover_D, weights=central_D),
        cover_D.max(),
        _mean(document_DH) @ _mean(answer_AH),
        place_A.mean(),
        *_overlap(_words(document), words),
    )
    return np.array(values, np.float32)


def _mean(sentences_AH: Floats) -> Floats:
    """Returns the mean direction [H], of norm 1."""
    mean_H = sentences_AH.mean(0)
    return mean_H / max(float(np.linalg.norm(mean_H)), 1e-6)


def _repetition(answer_AH: Floats) -> float:
    if len(answer_AH) < 2:
        return 0.0
    near_AA = answer_AH @ answer_AH.T
    np.fill_diagonal(near_AA, -1.0)
    return float(near_AA.max(1).mean())


def _overlap(document: Sequence[str], answer: Sequence[str]) -> tuple[float, float, float, float]:
    """Returns the last four features."""
    answer_words, answer_pairs, document_pairs = set(answer), set(pairwise(answer)), set(pairwise(document))
    return (
        len(answer_words & set(document)) / max(1, len(answer_words)),
        len(answer_pairs & document_pairs) / max(1, len(answer_pairs)),
        _covered_share(document, answer_words),
        _covered_share(document[:100], answer_words),
    )


def _covered_share(document: Sequence[str], answer_words: set[str]) -> float:
    longer_words = Counter(word for word in document if len(word) > 3)
    return sum(count for word, count in longer_words.items() if word in answer_words) / max(1, longer_words.total())


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
