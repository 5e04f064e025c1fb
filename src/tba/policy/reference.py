"""The reference policy on the searcher's side: log-probabilities of completions, without gradient.

Invariant: the same forward as the policy's own (`policy.causal`), so that at equal weights the log-ratio is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.batch import Batch
from tba.policy.causal import CausalPolicy
from tba.policy.lora import switch_adapters
from tba.types import Completion, FloatArray, Prompt, Version

Answered = tuple[Prompt, Sequence[Completion]]


class FrozenReference:
    """A model that only scores. It owns `model` (see `CausalPolicy`); `version` names its weights."""

    def __init__(
        self, model: PreTrainedModel, version: Version, temperature: float = 1.0, tokens_per_pass: int = 8192
    ) -> None:
        self._policy = CausalPolicy(model.requires_grad_(False), temperature)
        self._version = version
        self._tokens_per_pass = tokens_per_pass

    @property
    def version(self) -> Version:
        return self._version

    def log_probabilities(self, prompt: Prompt, completions: Sequence[Completion]) -> list[FloatArray]:
        """One float32 [T] array per completion, at the policy temperature."""
        return self.log_probabilities_of([(prompt, completions)])[0]

    def log_probabilities_of(self, answered: Sequence[Answered]) -> list[list[FloatArray]]:
        """Does the same for several prompts at once: [i][j] is of the j-th completion of the i-th prompt.

        At most `tokens_per_pass` tokens go through the model at a time (a single longer row goes alone).
        """
        scored: list[list[FloatArray]] = [[] for _ in answered]
        for places in _passes(answered, self._tokens_per_pass):
            batch = _batch([(answered[i][0], answered[i][1][first:last]) for i, first, last in places])
            with torch.inference_mode():
                log_BT = self._policy.evaluate(batch.to(self._policy.model.device)).log_policy_BT.cpu().numpy()
            rows = iter(zip(log_BT, batch.length_B.tolist(), strict=True))
            for i, first, last in places:
                scored[i] += [row[:length].copy() for row, length in (next(rows) for _ in range(first, last))]
        return scored

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy `weights` in, in place. Raises `KeyError` or `ValueError` on a name or shape mismatch."""
        switch_adapters(self._policy.model, on=True)
        self._policy.load(weights)
        self._version = version


def _passes(answered: Sequence[Answered], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Runs (i, first, last) of completions first..last - 1 of prompt i, in order, at most `limit` tokens together."""
    places: list[tuple[int, int, int]] = []
    used = 0
    for i, (prompt, completions) in enumerate(answered):
        first, counted = 0, False
        for j, completion in enumerate(completions):
            cost = len(completion.tokens) + (0 if counted else len(prompt.tokens))
            if used and used + cost > limit:
                yield [*places, (i, first, j)] if j > first else places
                places, used, first = [], 0, j
                cost = len(completion.tokens) + len(prompt.tokens)
            used += cost
            counted = True
        if len(completions) > first:
            places.append((i, first, len(completions)))
    if places:
        yield places


def _batch(answered: Sequence[Answered]) -> Batch:
    """Returns a batch to be scored: its rewards and reference log-probabilities are not known yet, so these are 0."""
    completions = [c for _, completions in answered for c in completions]
    length_B = np.array([len(c.tokens) for c in completions], dtype=np.int64)
    prompt_length_G = np.array([len(prompt.tokens) for prompt, _ in answered], dtype=np.int64)
    prompt_GP = np.zeros((len(answered), prompt_length_G.max()), dtype=np.int64)
    completion_BT = np.zeros((len(completions), length_B.max()), dtype=np.int64)
    for row, (prompt, _) in zip(prompt_GP, answered, strict=True):
        row[: len(prompt.tokens)] = prompt.tokens
    for row, completion in zip(completion_BT, completions, strict=True):
        row[: len(completion.tokens)] = completion.tokens
    return Batch(
        prompt_GP=torch.from_numpy(prompt_GP),
        prompt_length_G=torch.from_numpy(prompt_length_G),
        completion_BT=torch.from_numpy(completion_BT),
        length_B=torch.from_numpy(length_B),
        mask_BT=torch.from_numpy(np.arange(length_B.max()) < length_B[:, None]),
        log_reference_BT=torch.zeros(completion_BT.shape),
        reward_B=torch.zeros(len(completions)),
        group_B=torch.from_numpy(np.repeat(np.arange(len(answered)), [len(c) for _, c in answered])),
    )
