"""An engine whose completions are episodes: it plays the policy's turns to environments.

Invariant: one environment object for each completion, made when its first turn has ended. An episode that fails gets
the reward not-a-number: its completion is rejected and counted, and no other is touched by it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tba.environments.episode import Episode, EpisodeFailed, begun
from tba.environments.speech import Speech
from tba.protocols import Acted, Conversing, Engine, Turn
from tba.types import Completion, IntArray, Judgement, Prompt, Sampling, StopReason, Version

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("tba.searcher")


@dataclass
class EpisodeEngine:
    """Samples completions in environments from another engine's weights. To a searcher it is an engine like others."""

    engine: Engine
    task: Acted
    speech: Speech

    @property
    def version(self) -> Version:
        return self.engine.version

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy `weights` into the engine. Raises `KeyError` or `ValueError` on a name or shape mismatch."""
        self.engine.load(weights, version)

    def generate(
        self,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        rng: np.random.Generator,
        interrupted: Callable[[], bool] | None = None,
    ) -> list[list[Completion]]:
        """`count` episodes of each prompt; [i] are those of prompts[i]. See `protocols.Engine`."""
        found: dict[int, list[Completion]] = dict(self.stream(prompts, count, sampling, rng, interrupted))
        return [found[i] for i in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        rng: np.random.Generator,
        interrupted: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yields the same by prompt, in the order in which they are finished. See `protocols.Streaming`."""
        assert isinstance(self.engine, Conversing)  # as its maker has seen
        partner = _Environments(self.task, self.speech, prompts, count)
        try:
            yield from self.engine.converse(prompts, count, sampling, rng, partner, interrupted)
        finally:
            partner.close()


@dataclass
class _Environments:
    """The environments of one call's completions; the engine's partner (`protocols.Partner`)."""

    task: Acted
    speech: Speech
    prompts: Sequence[Prompt]
    count: int
    episodes: dict[int, Episode] = field(default_factory=dict)  # by request, those that are going on
    failed: set[int] = field(default_factory=set)
    why: str = ""  # the last one failed
    said: dict[int, IntArray | None] = field(default_factory=dict)  # what has not been handed to the engine yet

    def hear(self, turns: Sequence[Turn]) -> None:
        """Play each turn to its environment."""
        for turn in turns:
            try:
                text = self._episode(turn.request).say(turn.text)
            except EpisodeFailed as error:
                self._fail(turn.request, error)
                text = None
            ended = turn.stop_reason is StopReason.EOS
            self.said[turn.request] = None if text is None else self.speech.observation(text, ended)

    def replies(self, wait: bool) -> Mapping[int, IntArray | None]:
        """What the environments have said."""
        said, self.said = self.said, {}
        return said

    def ended(self, request: int, completion: Completion) -> Completion:
        """Returns the completion with its environment's judgement."""
        try:
            if completion.stop_reason is StopReason.INTERRUPTED:
                return completion
            return replace(completion, judgement=self._judgement(request, completion))
        finally:
            if (episode := self.episodes.pop(request, None)) is not None:
                episode.close()

    def close(self) -> None:
        """Let go what has not ended, and say what has failed."""
        for episode in self.episodes.values():
            episode.close()
        self.episodes.clear()
        if self.failed:
            log.warning(
                "%d of %d episodes failed and are rejected, the last: %s",
                len(self.failed), len(self.prompts) * self.count, self.why,
            )  # fmt: skip

    def _judgement(self, request: int, completion: Completion) -> Judgement:
        try:
            if request not in self.failed:
                episode = self._episode(request)
                begins = _turns(completion)
                if len(begins) > episode.turns:  # the last one was cut off
                    episode.cut(self.speech.text(completion.tokens[begins[-1] :]))
                return episode.judgement()
        except EpisodeFailed as error:
            self._fail(request, error)
        return Judgement(math.nan)

    def _episode(self, request: int) -> Episode:
        """Returns the episode of a request, begun when it is first asked for."""
        if request not in self.episodes:
            prompt = self.prompts[request // self.count]
            seed = prompt.seed if prompt.seed is not None else int(prompt.key[:7], 16)
            self.episodes[request] = begun(self.task.environment, prompt.fields, seed, self.task.turns, prompt.text)
        return self.episodes[request]

    def _fail(self, request: int, error: EpisodeFailed) -> None:
        self.failed.add(request)
        self.why = str(error)


def _turns(completion: Completion) -> list[int]:
    """Returns where each turn of a completion begins."""
    if completion.mask is None:
        return [0]
    before = np.concatenate([[False], completion.mask[:-1]])
    return [int(begin) for begin in np.flatnonzero(completion.mask & ~before)]
