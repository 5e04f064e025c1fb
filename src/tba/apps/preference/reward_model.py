"""The score of a reward model as the reward of a response.

Invariant: a truncated response gets `without_eos` instead of its score (the paper's penalty: -1, in units of the
model's score); the score itself stays among the reward's parts. Libraries and the model are loaded with the first
answer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tba.errors import UserError
from tba.types import Completion, Judgement, Prompt, StopReason

log = logging.getLogger("tba.reward")
_UNFINISHED = (StopReason.LENGTH, StopReason.INTERRUPTED)


class _TextScorer(Protocol):
    def judge(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float | None]: ...


@dataclass(frozen=True)
class ModelScore:
    """The score of the reward model at `path`: a folder that `tba reward-model` made, or any model with one output.

    It reads the prompt's field `document`, where a prompt has one, in the place of its text: what is to be summarised
    without what a chat template says around it.
    """

    path: str
    without_eos: float | None = -1.0  # the reward of a response without EOS; None: its score
    max_tokens: int = 640  # of prompt and response together; longer ones lose tokens of the prompt
    keep: Literal["beginning", "end"] = "end"  # which part of such a prompt stays
    device: str = "cpu"
    max_tokens_per_pass: int = 16384  # padded
    _scorers: list[_TextScorer] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("the reward needs a reward model: give the folder that `tba reward-model --out` made")

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Returns one judgement for each, in order. Raises `UserError` when the model cannot be loaded."""
        scores = self.scores([(_document(prompt), prompt.answer_in(c.text)) for prompt, c in answered])
        return [self._to_judgement(completion, score) for (_, completion), score in zip(answered, scores, strict=True)]

    def scores(self, pairs: Sequence[tuple[str, str]]) -> Sequence[float | None]:
        """Returns the score of each (prompt, response), None if the response is too long. Raises as `judge` does."""
        if not self._scorers:
            self._scorers.append(self._load())
        return self._scorers[0].judge(pairs)

    def _to_judgement(self, completion: Completion, score: float | None) -> Judgement:
        is_unfinished = completion.stop_reason in _UNFINISHED
        if score is None:  # longer than the model reads: as bad as one that did not end, or else rejected and counted
            return Judgement(math.nan if self.without_eos is None else self.without_eos, {"unread": 1.0})
        reward = self.without_eos if is_unfinished and self.without_eos is not None else score
        return Judgement(reward, {"score": score, "cut": float(is_unfinished)})

    def _load(self) -> _TextScorer:
        from tba.apps.preference.frozen import load_scorer

        return load_scorer(self.path, self.max_tokens, self.keep, self.device, self.max_tokens_per_pass)


@dataclass(frozen=True)
class LengthPricedScore:
    """Takes `price` x |log(words of the answer / `words`)| off a score, so that no answer gains by its length.

    Without it a policy learns the cheapest thing that people's marks reward, which is more words. An answer without
    words counts as one of half a word. Parts: those of the score, and `words`.
    """

    score: ModelScore
    words: int
    price: float

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Returns one judgement for each, in order. Raises `UserError` when the model cannot be loaded."""
        return [
            self._priced(judgement, len(completion.text.split()))
            for judgement, (_, completion) in zip(self.score.judge(answered), answered, strict=True)
        ]

    def _priced(self, judgement: Judgement, words: int) -> Judgement:
        length_price = self.price * abs(math.log(max(words, 0.5) / self.words))
        return Judgement(judgement.reward - length_price, {**judgement.parts, "words": float(words)})


@dataclass(frozen=True)
class Win:
    """Gives 1 if a model scores an answer above the prompt's field `reference`, else 0: the mean is the win rate.

    An answer without EOS is scored as it is. One that the model cannot read loses; so does every answer to a
    prompt whose reference it cannot read, and the log says how many of these there are.
    """

    model: ModelScore
    _scores: dict[tuple[str, str], float | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        """Returns one judgement for each, in order. Raises `UserError` for a prompt without a reference."""
        reference_pairs = [(_document(prompt), _reference(prompt)) for prompt, _ in answered]
        new_pairs = [pair for pair in dict.fromkeys(reference_pairs) if pair not in self._scores]
        self._scores.update(zip(new_pairs, self.model.scores(new_pairs) if new_pairs else [], strict=True))
        unread_count = sum(self._scores[pair] is None for pair in new_pairs)
        if unread_count:
            log.warning(
                "%d references cannot be read by the model at %s: no answer wins there", unread_count, self.model.path
            )
        scores = self.model.scores([(_document(prompt), prompt.answer_in(c.text)) for prompt, c in answered])
        return [_win(score, self._scores[pair]) for score, pair in zip(scores, reference_pairs, strict=True)]


def _win(score: float | None, reference: float | None) -> Judgement:
    if score is None:
        return Judgement(0.0, {"unread": 1.0})
    if reference is None:
        return Judgement(0.0, {"score": score, "reference_unread": 1.0})
    return Judgement(float(score > reference), {"score": score})


def _document(prompt: Prompt) -> str:
    document = prompt.fields.get("document")
    return document if isinstance(document, str) else prompt.text


def _reference(prompt: Prompt) -> str:
    reference = prompt.fields.get("reference")
    if not isinstance(reference, str):
        raise UserError(f"a prompt of {prompt.task} has no field 'reference' to win against: give each problem one")
    return reference
