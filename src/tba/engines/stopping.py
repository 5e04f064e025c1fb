"""Finds where a completion ends: which tokens end it, and at which token a stop string is complete.

Invariant: whether there is a stop string is always decided from the decoded text of the whole completion; checking its
last few tokens while it grows only saves computing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tba.assistant_turns import assistant_turn, special_id
from tba.errors import UserError
from tba.markup import decode_tokens
from tba.protocols import Tokenizer
from tba.types import StopReason

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger("tba.searcher")


def find_stops(
    stops: Sequence[int | str], tokenizer: Tokenizer, config: PretrainedConfig, generation_config: Any = None
) -> tuple[frozenset[int], StopStrings]:
    """Returns every token that ends a completion, and the stop strings, with those tokens that stand for one.

    Tokens are those of the generation settings, the model configuration and the tokenizer, what ends a turn in its chat
    template, and of `stops` the ids and the texts that are special tokens. Raises `UserError` for an id that is none.
    """
    vocabulary = int(config.get_text_config().vocab_size)
    eos: set[int] = set()
    for owner in (generation_config, config, config.get_text_config(), tokenizer):
        ids: Any = getattr(owner, "eos_token_id", None)
        eos.update(i for i in (ids if isinstance(ids, list | tuple) else [ids]) if _is_token(i, vocabulary))
    turn_ids = {i for i in assistant_turn(tokenizer).end_tokens - eos if _is_token(i, vocabulary)}
    if turn_ids:
        log.info("an answer ends at %s, too, which ends a turn in the chat template", _describe(turn_ids, tokenizer))
    strings, mark_ids = [], set()
    for stop in stops:
        token = stop if isinstance(stop, int) else special_id(tokenizer, stop)
        if token is None:
            strings.append(str(stop))
        elif not _is_token(token, vocabulary):
            raise UserError(
                f"the engine's stop_strings have the token {token}, and the model's are 0 to {vocabulary - 1}: give "
                "one of them"
            )
        else:
            mark_ids.add(token)
    stop_ids = frozenset(mark_ids - eos - turn_ids)
    return frozenset(eos | turn_ids | mark_ids), StopStrings(tuple(strings), tokenizer, stop_ids)


def _is_token(number: object, vocabulary: int) -> bool:
    """Returns whether a number is a token's id: some files have -1 where there is no token."""
    return type(number) is int and 0 <= number < vocabulary


def _describe(tokens: Collection[int], tokenizer: Tokenizer) -> str:
    return " and ".join(f"{tokenizer.decode([i], skip_special_tokens=False)!r} ({i})" for i in sorted(tokens))


@dataclass(frozen=True)
class StopStrings:
    """Finds the first stop string in the text of a completion."""

    strings: tuple[str, ...]
    tokenizer: Tokenizer
    ids: frozenset[int] = frozenset()  # the tokens that count as one

    def with_strings(self, strings: tuple[str, ...]) -> StopStrings:
        """Returns the same with further stop strings."""
        return replace(self, strings=(*self.strings, *strings)) if strings else self

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the decoded tokens without special ones, but with the marks of thoughts and calls."""
        return decode_tokens(self.tokenizer, tokens)

    def _find(self, text: str) -> int:
        """Returns where the earliest stop string begins; -1 if there is none."""
        return min((at for s in self.strings if (at := text.find(s)) >= 0), default=-1)

    def may_be_near(self, tokens: Sequence[int], new_count: int) -> bool:
        """Returns whether a stop string appears to end within the `new_count` last tokens."""
        return self._find(self.text(tokens[-self.reach(new_count) :])) >= 0

    def reach(self, new_count: int) -> int:
        """Returns how many of the last tokens reach back to the beginning of a stop string that ends within the
        `new_count` last ones; 0 where there is no stop string.
        """
        # a token is at least one byte
        return new_count + max(len(s.encode()) for s in self.strings) if self.strings else 0

    def cut(self, tokens: Sequence[int]) -> tuple[int, str, bool]:
        """Returns (tokens up to the one that completes the first stop string, the text before it, if there is one)."""
        text = self.text(tokens)
        start = self._find(text) if self.strings else -1
        if start < 0:
            return len(tokens), text, False
        low, high = 1, len(tokens)  # the fewest tokens whose text holds a stop string
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._find(self.text(tokens[:middle])) >= 0 else (middle + 1, high)
        return low, text[:start], True

    def cut_at_end(self, tokens: Sequence[int], eos: frozenset[int], interrupted: bool) -> tuple[int, str, StopReason]:
        """Returns where a completion whose generation is over ends: (its tokens, its text, why)."""
        eos_end = next((i + 1 for i, token in enumerate(tokens) if token in eos), None)
        if self.strings or eos_end is None:
            n, text, has_stop_string = self.cut(tokens[:eos_end])
            if has_stop_string:
                return n, text, StopReason.STOP_STRING
            if eos_end is None:
                return n, text, StopReason.INTERRUPTED if interrupted else StopReason.LENGTH
        # the token that ends it may have been added without being special, and is no part of the text
        reason = StopReason.STOP_STRING if tokens[eos_end - 1] in self.ids else StopReason.EOS
        return eos_end, self.text(tokens[: eos_end - 1]), reason
