"""A Hugging Face model that replaces a share of its answers by junk, as if somebody wrote junk into the buffer.

Invariant: junk replaces answers to the training prompts of a corrupted task only; evaluations are the policy's own.
Junk is marked as not sampled by a policy (`EXTERNAL`), and its log_behavior is that of the distribution it was drawn
from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from tba.errors import UserError
from tba.markup import decode_tokens
from tba.models.huggingface import HuggingFace
from tba.protocols import Engine, Flow, Partner, Tokenizer
from tba.types import Completion, Prompt, Sampling, StopReason, Version
from tba_lab.corrupted_task import CORRUPTED


@dataclass(frozen=True)
class Fabricating(HuggingFace):
    """A model some of whose training answers are random text of the same length."""

    junk: float = 0.05  # share of the answers to training prompts, and so of the buffer, that is junk

    def __post_init__(self) -> None:
        if not 0 <= self.junk <= 1:
            raise UserError(f"a fabricating model has junk {self.junk}: give a share from 0 to 1")

    def engine(self, version: Version, longest_prompt: int = 512) -> Any:
        tokenizer = self.tokenizer()
        special = set(tokenizer.all_special_ids)
        vocabulary = [i for i in range(len(tokenizer)) if i not in special]
        engine = super().engine(version, longest_prompt)
        return FabricatingEngine(engine, tokenizer, np.array(vocabulary, dtype=np.int32), self.junk)


@dataclass
class FabricatingEngine:
    """Wraps an engine: a share of its answers is replaced by tokens drawn uniformly from `vocabulary`."""

    engine: Engine
    tokenizer: Tokenizer
    vocabulary: np.ndarray[Any, np.dtype[np.int32]]
    junk: float

    @property
    def version(self) -> Version:
        return self.engine.version

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Load weights into the inner engine."""
        self.engine.load(weights, version)

    def flow(
        self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None
    ) -> FabricatingFlow:
        """Returns a flow of the inner engine's answers, some replaced by junk if the prompt may be corrupted."""
        junk_rng = np.random.default_rng(rng.integers(2**62))  # prompts are handed out while others are being answered
        return FabricatingFlow(self, self.engine.flow(count, sampling, rng, partner), junk_rng)

    def replace_some(
        self, prompt: Prompt, completions: Sequence[Completion], rng: np.random.Generator
    ) -> list[Completion]:
        """Returns the answers to a prompt, some replaced."""
        return [self._junk_answer(c, rng) if self._is_junk(prompt, c, rng) else c for c in completions]

    def _is_junk(self, prompt: Prompt, completion: Completion, rng: np.random.Generator) -> bool:
        if not prompt.fields.get(CORRUPTED) or completion.stop_reason is StopReason.INTERRUPTED:
            return False
        return bool(rng.random() < self.junk)

    def _junk_answer(self, completion: Completion, rng: np.random.Generator) -> Completion:
        """Returns junk as long as the answer it replaces, with the same ending."""
        has_ended = completion.stop_reason is StopReason.EOS
        tokens = rng.choice(self.vocabulary, size=len(completion.tokens)).astype(np.int32)
        log_behavior = np.full(len(tokens), -math.log(len(self.vocabulary)), dtype=np.float32)
        if has_ended:
            tokens[-1], log_behavior[-1] = completion.tokens[-1], 0.0
        text = decode_tokens(self.tokenizer, tokens.tolist())
        return replace(
            completion,
            tokens=tokens,
            text=text,
            stop_reason=StopReason.EXTERNAL,
            sampling=None,
            log_behavior=log_behavior,
            mask=None,
        )


@dataclass
class FabricatingFlow:
    """What flows from the inner engine, replaced by junk as it is handed out."""

    engine: FabricatingEngine
    flow: Flow
    rng: np.random.Generator
    _prompts: dict[int, Prompt] = field(default_factory=dict)

    @property
    def prompts_submitted(self) -> int:
        return self.flow.prompts_submitted

    @property
    def prompts_needed(self) -> int:
        return self.flow.prompts_needed

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Adds prompts."""
        first_index = self.prompts_submitted
        self.flow.submit(prompts)
        self._prompts.update(enumerate(prompts, first_index))

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_needed: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """See `protocols.Flow`."""
        rows = self.flow.next(interrupted, until_needed)
        return [(i, self.engine.replace_some(self._prompts.pop(i), completions, self.rng)) for i, completions in rows]

    def cancel(self, request: int) -> None:
        """Ends a request."""
        self.flow.cancel(request)
