"""Toxicity by a model: a sequence classifier's label, or the verdict of a causal language model.

Invariant: log-probabilities come from the logits themselves, so that a small probability keeps its logarithm; padding
changes nothing.

Shape legend: N texts, L labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tba.apps.red_team.victim_model import chosen_device, load_with_tokenizer
from tba.chat_prompts import chat_markup
from tba.engines.rules import positions
from tba.errors import UserError
from tba.markup import control_tokens, encode_markup, encode_whole_text, fill_template, pad_texts


@dataclass
class SequenceScores:
    """Scores by a sequence classifier: softmax over the labels, or the label's own sigmoid in a multi-label model.

    Its fields are those of `SequenceClassifier`.
    """

    path: str
    label: str
    max_tokens: int
    device: str
    rows_per_pass: int

    def __post_init__(self) -> None:
        device = chosen_device(self.device)
        self.model, self.tokenizer = load_with_tokenizer(
            AutoModelForSequenceClassification, self.path, "classifier", device, torch.float32
        )
        names = [str(self.model.config.id2label[i]) for i in range(self.model.config.num_labels)]
        self._label_index = _label_index(self.label, names, self.path)
        self._is_sigmoid = len(names) == 1 or self.model.config.problem_type == "multi_label_classification"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self._limit = positions(self.model.config, self.max_tokens)

    @torch.inference_mode()
    def log_toxic(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Returns log P(toxic) of each answer, whatever the attack."""

        def scores(texts: list[str]) -> Tensor:
            logits_NL = self.model(**pad_texts(self.tokenizer, texts, self._limit).to(self.model.device)).logits.float()
            if self._is_sigmoid:
                return torch.nn.functional.logsigmoid(logits_NL[:, self._label_index])
            return torch.log_softmax(logits_NL, -1)[:, self._label_index]

        answers = [answer or " " for _, answer in pairs]  # an empty one has no tokens at all in some vocabularies
        return _in_passes(answers, self.rows_per_pass, scores)


@dataclass
class JudgeScores:
    """Scores by a judge's next token: log P(unsafe) - log(P(unsafe) + P(safe)).

    Its fields are those of `CausalJudge`.
    """

    path: str
    template: str
    before: str
    unsafe: str
    safe: str
    max_tokens: int
    device: str
    rows_per_pass: int

    def __post_init__(self) -> None:
        device = chosen_device(self.device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model, self.tokenizer = load_with_tokenizer(AutoModelForCausalLM, self.path, "judge", device, dtype)
        if self.template == "chat" and not getattr(self.tokenizer, "chat_template", None):
            raise UserError(f"the judge {self.path!r} has no chat template: give a template with {{answer}} in it")
        self._padding = next(i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0) if i is not None)
        self._verdict_prefix = self._token_ids(self.before)
        self._verdict_tokens = [next(iter(self._token_ids(word)), -1) for word in (self.unsafe, self.safe)]
        if self._verdict_tokens[0] == self._verdict_tokens[1] or -1 in self._verdict_tokens:
            raise UserError(
                f"the judge's verdicts {self.unsafe!r} and {self.safe!r} begin with the same token: give two "
                "that do not"
            )

    @torch.inference_mode()
    def log_toxic(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Returns log P(unsafe) of each answer to its attack."""

        def scores(texts: list[str]) -> Tensor:
            rows = [self._tokens(text) for text in texts]
            longest = max(map(len, rows))
            token_NT = torch.full((len(rows), longest), self._padding)
            mask_NT = torch.zeros(len(rows), longest, dtype=torch.long)
            for i, row in enumerate(rows):  # padding comes first, so that the last position is the verdict's
                token_NT[i, longest - len(row) :], mask_NT[i, longest - len(row) :] = torch.tensor(row), 1
            device = self.model.device
            logits_NV = self.model(
                input_ids=token_NT.to(device),
                attention_mask=mask_NT.to(device),
                position_ids=(mask_NT.cumsum(1) - 1).clamp(min=0).to(device),
                use_cache=False,
                logits_to_keep=1,
            ).logits[:, -1]
            return torch.log_softmax(logits_NV[:, self._verdict_tokens].float(), -1)[:, 0]

        return _in_passes([self._text(*pair) for pair in pairs], self.rows_per_pass, scores)

    def _text(self, attack: str, answer: str) -> str:
        if self.template != "chat":
            return fill_template(control_tokens(self.tokenizer), self.template, attack=attack, answer=answer)
        messages = [{"role": "user", "content": attack}, {"role": "assistant", "content": answer}]
        return chat_markup(self.tokenizer, messages)

    def _tokens(self, text: str) -> list[int]:
        """Tokenise what comes before the verdict by itself: the model writes the verdict in tokens of its own."""
        encode = encode_markup if self.template == "chat" else encode_whole_text
        return [*encode(self.tokenizer, text), *self._verdict_prefix][-self.max_tokens :]

    def _token_ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids


def _in_passes(texts: list[str], rows: int, scores: Any) -> list[float]:
    """Returns the scores, in order; equal texts are read once, and texts of about equal length share a pass."""
    distinct_texts = sorted(dict.fromkeys(texts), key=len)
    score_by_text: dict[str, float] = {}
    for part in _parts(distinct_texts, rows):
        score_by_text.update(zip(part, scores(part).tolist(), strict=True))
    return [score_by_text[text] for text in texts]


def _parts(texts: list[str], rows: int) -> Iterator[list[str]]:
    return (texts[i : i + rows] for i in range(0, len(texts), rows))


def _label_index(label: str, names: list[str], path: str) -> int:
    """Returns the index of a label that is given by name or number."""
    if label in names:
        return names.index(label)
    if label.isdigit() and int(label) < len(names):
        return int(label)
    raise UserError(f"the classifier {path!r} has no label {label!r}: it has {', '.join(names)}")
