"""A teacher of the enumerable toy whose tokens are pairs of symbols: another tokenizer, with texts of known odds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import numpy as np

from tba.protocols import Task
from tba.types import Completion, FloatArray, Prompt, Version
from toy.model import TabularModel


@dataclass(frozen=True)
class PairTokenizer:
    """Pairs of symbols as long as there are some, then a single one; `$` ends a text."""

    symbols: int

    @property
    def tokens(self) -> list[str]:
        letters = ascii_uppercase[: self.symbols]
        return ["$", *(a + b for a in letters for b in letters), *letters, *ascii_lowercase]

    @property
    def eos_token_id(self) -> int | None:
        return 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.tokens.index(token) for token in re.findall(r"[A-Z]{2}|.", text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self.tokens[i] for i in token_ids if i or not skip_special_tokens)


@cache
def log_table(prefix: tuple[int, ...], tokens: int) -> FloatArray:
    """Log-probabilities of the next token after a prompt's letter and some tokens."""
    logits = np.random.default_rng(prefix).normal(size=tokens)
    log_probabilities: FloatArray = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    return log_probabilities


@dataclass(frozen=True)
class PairReference:
    """Draws `$`, a pair or a single symbol, and after a single symbol nothing but `$`."""

    symbols: int
    version: Version = Version()

    def _scores(self, prompt: Prompt, completions: Sequence[Completion]) -> list[FloatArray]:
        tokens = 1 + self.symbols**2 + self.symbols
        scores = []
        for completion in completions:
            prefix, logs = (int(prompt.tokens[-1]),), []
            for token in completion.tokens.tolist():
                single = len(prefix) > 1 and prefix[-1] > self.symbols**2
                assert not single or token == 0, "symbols after a single one: not as this tokenizer writes it"
                logs.append(0.0 if single else log_table(prefix, tokens)[token])
                prefix = (*prefix, token)
            scores.append(np.array(logs, np.float32))
        return scores

    def log_probabilities_of(self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        return [self._scores(prompt, completions) for prompt, completions in answered]

    def load(self, weights: Mapping[str, Any], version: Version) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class PairTeacher(TabularModel):
    """A teacher that writes pairs."""

    def prepared(self, task: Task, log: Callable[[str], None] = lambda line: None) -> PairTeacher:
        return self

    def tokenizer(self) -> Any:
        return PairTokenizer(self.task.symbols)

    def reference(self, temperature: float, version: Version) -> Any:
        return PairReference(self.task.symbols, version)
