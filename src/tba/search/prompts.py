"""The prompt stream: a task's problems tokenised once, shuffled by epoch, leased by position.

Invariant: position -> prompt is a pure function of (prompts, seed), so any searcher on any machine, before or after a
restart, gets the same prompt for the same position; who works on which position is settled by the leases alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tba.errors import UserError
from tba.protocols import Tokenizer
from tba.types import Problem, Prompt

Lease = Callable[[int], list[int]]


@dataclass(frozen=True)
class PromptSettings:
    """How problems become prompts."""

    max_tokens: int = 512  # longest prompt
    overlong: Literal["drop", "truncate_left", "error"] = "drop"  # what happens to a longer one; drops are reported
    limit: int | None = None  # only the first so many problems of the training split

    def __post_init__(self) -> None:
        for name in ("max_tokens", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--prompts.{name.replace('_', '-')} is {value}, it must be at least 1")


@dataclass(frozen=True)
class Encoded:
    """Prompts of one split, and how many problems were dropped or truncated for being over-long."""

    prompts: list[Prompt]
    dropped: int = 0
    truncated: int = 0


def encode(problems: Sequence[Problem], task: str, tokenizer: Tokenizer, settings: PromptSettings) -> Encoded:
    """Problem -> Prompt, with the model's chat template where the problem is a chat.

    Raises `UserError` when nothing is left, when a chat meets a tokenizer without a template, or for an over-long
    prompt under `overlong="error"`.
    """
    prompts: list[Prompt] = []
    dropped = truncated = 0
    for problem in problems:
        text = problem.prompt if isinstance(problem.prompt, str) else _chat(problem, tokenizer)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) > settings.max_tokens:
            if settings.overlong == "error":
                raise UserError(
                    f"a prompt of task {task} has {len(tokens)} tokens, the limit is {settings.max_tokens}: "
                    f"raise --prompts.max-tokens, or set --prompts.overlong to drop or truncate_left"
                )
            if settings.overlong == "drop":
                dropped += 1
                continue
            truncated += 1
            tokens = tokens[-settings.max_tokens :]
        if not tokens:
            raise UserError(f"a prompt of task {task} is empty after tokenising ({text!r}): give it some text")
        prompts.append(Prompt(task, np.array(tokens, dtype=np.int32), text, dict(problem.fields)))
    if not prompts:
        raise UserError(
            f"task {task} has no prompts left ({dropped} of {len(problems)} were longer than "
            f"{settings.max_tokens} tokens): raise --prompts.max-tokens or give it more problems"
        )
    return Encoded(prompts, dropped, truncated)


def _chat(problem: Problem, tokenizer: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "this task gives chat messages, but the model's tokenizer has no chat template: "
            "use an instruction-tuned model, or a task that gives plain prompts"
        )
    return str(tokenizer.apply_chat_template(list(problem.prompt), tokenize=False, add_generation_prompt=True))


@dataclass
class PromptStream:
    """Endless: epoch after epoch, each a new permutation. `take` leases the next positions."""

    prompts: Sequence[Prompt]
    seed: int
    lease: Lease
    _epoch: int = field(default=-1, init=False)
    _order: Any = field(default=None, init=False)

    def at(self, position: int) -> Prompt:
        """The prompt of a position (0, 1, 2, ...)."""
        epoch, index = divmod(position, len(self.prompts))
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))
            self._epoch = epoch
        return self.prompts[int(self._order[index])]

    def take(self, count: int) -> tuple[list[int], list[Prompt]]:
        """The next positions and their prompts; give the positions back with their trajectories."""
        positions = self.lease(count)
        return positions, [self.at(p) for p in positions]
