"""An engine whose completions are episodes: it plays the policy's turns to environments.

Invariant: one environment object for each completion, made when its first turn has ended. An episode that fails gets
the reward not-a-number: its completion is rejected and counted, and no other is touched by it. What is handed out has
been judged; while that is awaited, others are generated.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tba.environments.episode import EpisodeFailed
from tba.environments.hosts import Answer, Beginning, Here, Hosts, Question
from tba.environments.speech import Speech
from tba.protocols import Acted, Engine, Flow, Partner, Turn
from tba.types import Completion, IntArray, Judgement, Prompt, Sampling, StopReason, Version

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("tba.searcher")
_BETWEEN_REPORTS = 60.0  # seconds between two lines of the log on episodes that failed


@dataclass
class EpisodeEngine:
    """Samples completions in environments from another engine's weights. To a searcher it is an engine like others."""

    engine: Engine
    task: Acted
    speech: Speech
    worlds: Here | Hosts | None = None  # where episodes are played; None: in this process
    still: Callable[[], AbstractContextManager[None]] = nullcontext  # around what keeps it from generating

    @property
    def version(self) -> Version:
        return self.engine.version

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy `weights` into the engine. Raises `KeyError` or `ValueError` on a name or shape mismatch."""
        self.engine.load(weights, version)

    def flow(
        self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None
    ) -> Episodes:
        """Returns an empty flow of `count` episodes of each prompt, in which only the environment speaks."""
        assert partner is None
        worlds = Here(self.task) if self.worlds is None else self.worlds
        worlds.close()  # of an earlier flow that was not played to its end
        episodes = Episodes(worlds, self.speech, count, self.still)
        episodes.flow = self.engine.flow(count, sampling, rng, episodes)
        return episodes


@dataclass
class Episodes:
    """Prompts that are being answered in environments: a flow (`protocols.Flow`), and the partner of the one within."""

    worlds: Here | Hosts
    speech: Speech
    count: int  # requests of each prompt
    still: Callable[[], AbstractContextManager[None]] = nullcontext
    flow: Flow = field(init=False)  # of the turns
    _prompts: dict[int, Prompt] = field(default_factory=dict)  # those that have not been handed out
    _begun: set[int] = field(default_factory=set)  # requests
    _heard: dict[int, int] = field(default_factory=dict)  # turns that the environment was told, by request
    # by request: whether its turn has a token that ended it, and which, as far as the engine says
    _ended: dict[int, tuple[bool, int | None]] = field(default_factory=dict)
    _said: dict[int, IntArray | None] = field(default_factory=dict)  # what has not been handed to the engine yet
    _judgements: dict[int, Judgement] = field(default_factory=dict)
    _unjudged: dict[int, int] = field(default_factory=dict)  # request, by the identity of its completion
    _held: dict[int, list[Completion]] = field(default_factory=dict)  # finished prompts with an unjudged completion
    _failures: list[int] = field(default_factory=lambda: [0, 0])  # those that failed and all, since the last report
    _why: str = ""  # the last one failed
    _reported: float = field(default_factory=time.monotonic)

    @property
    def prompts_submitted(self) -> int:
        """Returns how many prompts there have been."""
        return self.flow.prompts_submitted

    @property
    def prompts_needed(self) -> int:
        """Returns how many more prompts could begin to be answered now."""
        return self.flow.prompts_needed

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Adds prompts, numbered in the order of submission."""
        first = self.prompts_submitted
        self.flow.submit(prompts)
        self._prompts.update(enumerate(prompts, first))

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_needed: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """Computes until prompts are finished and judged, or (`until_needed`) more are needed; returns the former."""
        judged: list[tuple[int, list[Completion]]] = []
        try:
            while self._prompts and not judged:
                found: list[tuple[int, list[Completion]]] = []
                if len(self._held) < len(self._prompts):
                    found = self.flow.next(interrupted, until_needed)
                else:
                    self._listen(wait=True)
                judged = list(self._judged(found, interrupted is not None and interrupted()))
                if until_needed and self.prompts_needed:
                    break
        except BaseException:
            self._close()
            raise
        if not self._prompts:
            self._close()
        return judged

    def hear(self, turns: Sequence[Turn]) -> None:
        """Play each turn to its environment."""
        for turn in turns:
            self._heard[turn.request] = self._heard.get(turn.request, 0) + 1
            self._ended[turn.request] = (turn.stop_reason is StopReason.EOS, turn.tokens[-1] if turn.tokens else None)
            self._ask(turn.request, self.speech.said(turn.tokens, turn.text))

    def replies(self, wait: bool) -> Mapping[int, IntArray | None]:
        """Returns what the environments have said."""
        self._listen(wait and not self._said)
        said, self._said = self._said, {}
        return said

    def ended(self, request: int, completion: Completion) -> Completion:
        """Returns the completion, with its environment's judgement if that is known by now."""
        self._ended.pop(request, None)
        if completion.stop_reason is StopReason.INTERRUPTED:
            self._leave(request)
            return completion
        if request not in self._judgements:
            turns = completion.turns
            was_cut = len(turns) > self._heard.get(request, 0)
            self._ask(request, None, self.speech.text(completion.tokens[turns[-1][0] :]) if was_cut else None)
            self._listen(wait=False)
        if request not in self._judgements:
            self._unjudged[id(completion)] = request
            return completion
        return self._with_judgement(request, completion)

    def _listen(self, wait: bool) -> None:
        """Take in what the environments have answered; with `wait` at least one of them, but only for a moment."""
        with self.still() if wait else nullcontext():
            answers = self.worlds.answers(wait)
        for request, answer in answers.items():
            self._take(request, answer)

    def _judged(
        self, finished: Sequence[tuple[int, list[Completion]]], interrupted: bool = False
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Takes prompts that an engine has finished; yields those that have been judged, these and earlier ones.

        interrupted: all of them, and what has not been judged as interrupted.
        """
        self._held |= dict(finished)
        for number in list(self._held):
            completions = [self._final(c, interrupted) for c in self._held[number]]
            self._held[number] = completions
            if not any(id(c) in self._unjudged for c in completions):
                del self._held[number], self._prompts[number]
                yield number, completions
        if time.monotonic() - self._reported > _BETWEEN_REPORTS:
            self._report()

    def _close(self) -> None:
        """Let go what has not ended, and say what has failed."""
        self.worlds.close()
        self._report()

    def _final(self, completion: Completion, interrupted: bool) -> Completion:
        request = self._unjudged.get(id(completion))
        if request is None or not (interrupted or request in self._judgements):
            return completion
        del self._unjudged[id(completion)]
        if request in self._judgements:
            return self._with_judgement(request, completion)
        self._leave(request)
        return replace(completion, stop_reason=StopReason.INTERRUPTED)

    def _with_judgement(self, request: int, completion: Completion) -> Completion:
        judgement = self._judgements.pop(request)
        self._leave(request)
        self._failures[1] += 1
        return replace(completion, judgement=judgement)

    def _ask(self, request: int, turn: str | None, cut: str | None = None) -> None:
        begin = None
        if request not in self._begun:
            self._begun.add(request)
            prompt = self._prompts[request // self.count]
            begin = Beginning(prompt.fields, prompt.world, prompt.text, prompt.said)
        with self.still() if isinstance(self.worlds, Here) else nullcontext():
            self.worlds.ask(request, Question(begin, turn, cut))

    def _take(self, request: int, answer: Answer) -> None:
        said = None
        if answer.failed:
            self._fail(request, answer.failed)
        elif answer.said is None:
            assert answer.judgement is not None
            self._judgements[request] = answer.judgement
        else:
            try:
                said = self.speech.observation(answer.said, *self._ended[request])
            except EpisodeFailed as error:
                self._fail(request, str(error))
        if request in self._ended:  # else the engine has ended it before
            self._said[request] = said

    def _fail(self, request: int, why: str) -> None:
        self._judgements[request] = Judgement(math.nan)
        self._failures[0] += 1
        self._why = why

    def _leave(self, request: int) -> None:
        self._begun.discard(request)
        self._heard.pop(request, None)
        self.worlds.leave(request)

    def _report(self) -> None:
        failed, played = self._failures
        if failed:
            log.warning("%d of %d episodes failed and are rejected, the last: %s", failed, played, self._why)
        self._failures, self._reported = [0, 0], time.monotonic()
