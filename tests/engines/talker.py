"""Somebody to talk with: a partner whose answers follow from what was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tba.protocols import Turn
from tba.types import Completion, IntArray, StopReason


@dataclass
class Talker:
    """Answers a turn with letters that follow from its text; after `most` turns it says nothing more.

    With `late` an answer comes after so many other calls as its request's number says.
    """

    most: int = 3
    late: bool = False
    letters: int = 26  # it answers with the tokens from 2 on
    turns: dict[int, list[str]] = field(default_factory=dict)
    reasons: list[StopReason] = field(default_factory=list)
    waiting: list[tuple[int, int, IntArray | None]] = field(default_factory=list)
    ends: dict[int, Completion] = field(default_factory=dict)

    def hear(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            said = self.turns.setdefault(turn.request, [])
            said.append(turn.text)
            self.reasons.append(turn.stop_reason)
            answer = None if len(said) == self.most else np.array(self.answer(turn.text), dtype=np.int32)
            self.waiting.append((7 * turn.request % 5 if self.late else 0, turn.request, answer))

    def answer(self, text: str) -> list[int]:
        return [2 + (sum(map(ord, text)) + i) % self.letters for i in range(1 + len(text) % 4)]

    def replies(self, wait: bool) -> Mapping[int, IntArray | None]:
        ready = {request: answer for calls, request, answer in self.waiting if calls <= 0}
        self.waiting = [(calls - 1, request, answer) for calls, request, answer in self.waiting if calls > 0]
        return ready

    def ended(self, request: int, completion: Completion) -> Completion:
        self.ends[request] = completion
        return completion
