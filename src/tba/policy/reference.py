"""The reference policy on the searcher's side: log-probabilities of completions, without gradient.

Invariant: the same forward as the policy's own (`policy.causal`), so that at equal weights the log-ratio is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.batch import AnsweredPrompt, Batch, score_in_passes
from tba.policy.causal import CausalPolicy
from tba.policy.lora import copy_on_same_base, has_adapters, switch_adapters
from tba.policy.packed import ATTENTION
from tba.protocols import PolicyOutput
from tba.types import FloatArray, TopScores, Version

_Scores = TypeVar("_Scores", "FloatArray", TopScores)


class FrozenReference:
    """A model that only scores. It owns `model` (see `CausalPolicy`); `version` names its weights.

    first_weights: returns the model's weights as they are now, for `load_first`; of adapters it is never called: they
    are off until `load`, and off again after `load_first`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        version: Version,
        temperature: float = 1.0,
        tokens_per_pass: int = 8192,
        share_prompt: bool = True,
        first_weights: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._policy = CausalPolicy(model.requires_grad_(False), temperature, share_prompt)
        self._version = self._first_version = version
        self._first_weights = first_weights
        self._tokens_per_pass = tokens_per_pass
        self._stream = torch.cuda.Stream(model.device) if self.concurrent else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(model.device))  # the model is there before it is used

    @property
    def concurrent(self) -> bool:
        """Returns whether it has a stream of its own, so that another thread can generate meanwhile."""
        return self._policy.model.device.type == "cuda"

    @property
    def version(self) -> Version:
        return self._version

    def log_probabilities_of(self, answered_prompts: Sequence[AnsweredPrompt]) -> list[list[FloatArray]]:
        """Score completions of several prompts: [i][j] is of the i-th prompt's j-th completion, float32 [T], at the
        policy temperature; 0 where the policy did not sample.

        At most `tokens_per_pass` tokens go through the model at a time, as `micro_batches` counts them.
        """

        def scores_of(part: Batch) -> Iterator[FloatArray]:
            log_RT = self._policy.evaluate(part).log_policy_BT.cpu().numpy()
            yield from (log_T[:length].copy() for log_T, length in zip(log_RT, part.length_B.tolist(), strict=True))

        return self._scored(answered_prompts, scores_of)

    def with_top(self, count: int, below: int | None = None) -> TopTokenScorer:
        """Returns a scorer by this model that also gives the `count` most probable tokens at each place, of those with
        numbers `below` a bound (None: of all).
        """
        return TopTokenScorer(self, count, below)

    def top_scores_of(
        self, answered_prompts: Sequence[AnsweredPrompt], count: int, below: int | None = None
    ) -> list[list[TopScores]]:
        """Score completions as `log_probabilities_of` does, with the most probable tokens as `with_top` has them."""
        vocabulary = len(self._policy.model.get_output_embeddings().weight)
        dtype: type[np.generic] = np.uint16 if vocabulary <= 1 << 16 else np.int32

        def scores_of(part: Batch) -> Iterator[TopScores]:
            log_BT, ids_BTK, logs_BTC = (tensor.cpu().numpy() for tensor in self._policy.top_tokens(part, count, below))
            for row, (mask_T, length) in enumerate(zip(part.mask_BT.numpy(), part.length_B.tolist(), strict=True)):
                ids_MK, logs_MC = ids_BTK[row][mask_T].astype(dtype), logs_BTC[row][mask_T].astype(np.float16)
                yield TopScores(log_BT[row, :length].copy(), ids_MK, logs_MC)

        return self._scored(answered_prompts, scores_of)

    def _scored(
        self, answered_prompts: Sequence[AnsweredPrompt], scores_of: Callable[[Batch], Iterable[_Scores]]
    ) -> list[list[_Scores]]:
        """Returns the scores of completions of several prompts; `scores_of` gives those of one pass, row by row."""

        def inferred_scores_of(part: Batch) -> list[_Scores]:
            with torch.inference_mode(), self._stream_context():
                return list(scores_of(part))

        return score_in_passes(answered_prompts, inferred_scores_of, self._tokens_per_pass, self._policy.share_prompt)

    def model_on_same_weights(self) -> PreTrainedModel:
        """Returns a model of the same weights, whose memory it shares, for an engine; without adapters. It is as the
        reference is for as long as no other one is loaded.
        """
        model = copy_on_same_base(self._policy.model)
        if has_adapters(model):
            switch_adapters(model, enabled=False)
        if model.config._attn_implementation == ATTENTION:
            has_softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
            model.set_attn_implementation("eager" if has_softcap else "sdpa")
        return model

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy `weights` in, in place. Raises `KeyError` or `ValueError` on a name or shape mismatch."""
        switch_adapters(self._policy.model, enabled=True)
        if self._stream is not None:  # the weights may be a trainer's, whose update is not over
            self._stream.wait_stream(torch.cuda.current_stream(self._policy.model.device))
        with self._stream_context():  # with what it scores
            self._policy.load(weights)
        self._version = version

    def load_first(self) -> None:
        """Become what it was made as, again. Raises `ValueError` where it was made without its first weights."""
        if has_adapters(self._policy.model):
            switch_adapters(self._policy.model, enabled=False)
        elif self._first_weights is None:
            raise ValueError("this reference was made without `first_weights`: its first weights are gone")
        else:
            with self._stream_context():
                self._policy.load(self._first_weights())
        self._version = self._first_version

    def _stream_context(self) -> AbstractContextManager[object]:
        """Returns a context in which work on a GPU is done in the reference's own stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@dataclass(frozen=True)
class BasePolicy:
    """A policy with adapters as it is without them: its base, whose memory it shares."""

    policy: CausalPolicy

    @property
    def heads(self) -> torch.nn.ModuleDict:
        return self.policy.heads

    @property
    def share_prompt(self) -> bool:
        return self.policy.share_prompt

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Returns what the base gives for a batch."""
        switch_adapters(self.policy.model, enabled=False)
        try:
            return self.policy.evaluate(batch)
        finally:
            switch_adapters(self.policy.model, enabled=True)


@dataclass(frozen=True)
class TopTokenScorer:
    """Scores answers by a model, with its `count` most probable tokens at each place."""

    model: FrozenReference
    count: int
    below: int | None = None  # only tokens with smaller numbers are named

    @property
    def concurrent(self) -> bool:
        """Returns whether it can score in one thread while an engine samples in another."""
        return self.model.concurrent

    def log_probabilities_of(self, answered_prompts: Sequence[AnsweredPrompt]) -> list[list[TopScores]]:
        """Score completions of several prompts: [i][j] is of the i-th prompt's j-th completion."""
        return self.model.top_scores_of(answered_prompts, self.count, self.below)
