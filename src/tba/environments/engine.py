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
from tba.environments.hosts import Beginning, EpisodeReply, Hosts, InProcessHost, Question
from tba.environments.turn_encoding import TurnEncoder
from tba.protocols import Acted, Engine, Flow, Partner, ReportsFaults, StagesWeights, Turn
from tba.types import Completion, IntArray, Judgement, Prompt, Sampling, StopReason, Version

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("tba.searcher")
_REPORT_SECONDS = 60.0  # seconds between two lines of the log on episodes that failed


@dataclass
class EpisodeEngine:
    """Samples completions in environments from another engine's weights. To a searcher it is an engine like others."""

    engine: Engine
    task: Acted
    turn_encoder: TurnEncoder
    hosts: InProcessHost | Hosts | None = None  # where episodes are played; None: in this process
    idle_timer: Callable[[], AbstractContextManager[None]] = nullcontext  # around whatever keeps it from generating

    @property
    def version(self) -> Version:
        return self.engine.version

    @property
    def fault(self) -> str:
        """Returns what is wrong with the engine, in words; empty: nothing."""
        return self.engine.fault if isinstance(self.engine, ReportsFaults) else ""

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy `weights` into the engine. Raises `KeyError` or `ValueError` on a name or shape mismatch."""
        self.engine.load(weights, version)

    def stage(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Begin to copy `weights` to the engine's device, if it does that; returns what is to be given to `load`."""
        return self.engine.stage(weights) if isinstance(self.engine, StagesWeights) else weights

    def flow(
        self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None
    ) -> Episodes:
        """Returns an empty flow of `count` episodes of each prompt, in which only the environment speaks."""
        assert partner is None
        hosts = InProcessHost(self.task) if self.hosts is None else self.hosts
        hosts.close()  # of an earlier flow that was not played to its end
        episodes = Episodes(hosts, self.turn_encoder, count, self.idle_timer)
        episodes.flow = self.engine.flow(count, sampling, rng, episodes)
        return episodes


@dataclass
class Episodes:
    """Prompts that are being answered in environments: a flow (`protocols.Flow`), and the partner of the one within."""

    hosts: InProcessHost | Hosts
    turn_encoder: TurnEncoder
    count: int  # requests of each prompt
    idle_timer: Callable[[], AbstractContextManager[None]] = nullcontext
    flow: Flow = field(init=False)  # of the turns
    _prompts: dict[int, Prompt] = field(default_factory=dict)  # those that have not been handed out
    _begun_requests: set[int] = field(default_factory=set)
    _turn_counts: dict[int, int] = field(default_factory=dict)  # turns that the environment was told, by request
    # by request: whether its turn has a token that ended it, and which, as far as the engine says
    _turn_ends: dict[int, tuple[bool, int | None]] = field(default_factory=dict)
    _unread_replies: dict[int, IntArray | None] = field(default_factory=dict)  # not handed to the engine yet
    _judgements: dict[int, Judgement] = field(default_factory=dict)
    _request_of: dict[int, int] = field(default_factory=dict)  # by the identity of its unjudged completion
    _unjudged: dict[int, list[Completion]] = field(default_factory=dict)  # prompts with an unjudged completion
    _failures: list[int] = field(default_factory=lambda: [0, 0])  # those that failed and all, since the last report
    _last_failure: str = ""  # why the last one failed
    _report_time: float = field(default_factory=time.monotonic)

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
        first_number = self.prompts_submitted
        self.flow.submit(prompts)
        self._prompts.update(enumerate(prompts, first_number))

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_needed: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """Computes until prompts are finished and judged, or (`until_needed`) more are needed; returns the former."""
        judged_prompts: list[tuple[int, list[Completion]]] = []
        try:
            while self._prompts and not judged_prompts:
                finished_prompts: list[tuple[int, list[Completion]]] = []
                if len(self._unjudged) < len(self._prompts):
                    finished_prompts = self.flow.next(interrupted, until_needed)
                else:
                    self._collect_replies(wait=True)
                judged_prompts = list(self._pop_judged(finished_prompts, interrupted is not None and interrupted()))
                if until_needed and self.prompts_needed:
                    break
        except BaseException:
            self._close()
            raise
        if not self._prompts:
            self._close()
        return judged_prompts

    def cancel(self, request: int) -> None:
        """Ends the episode of a request that is being generated. See `protocols.Flow`."""
        self.flow.cancel(request)

    def hear(self, turns: Sequence[Turn]) -> None:
        """Play each turn to its environment."""
        for turn in turns:
            self._turn_counts[turn.request] = self._turn_counts.get(turn.request, 0) + 1
            last_token = turn.tokens[-1] if turn.tokens else None
            self._turn_ends[turn.request] = (turn.stop_reason is StopReason.EOS, last_token)
            self._ask(turn.request, self.turn_encoder.turn_text(turn.tokens, turn.text))

    def replies(self, wait: bool) -> Mapping[int, IntArray | None]:
        """Returns the tokens of the environments' replies since the last call, by request."""
        self._collect_replies(wait and not self._unread_replies)
        replies, self._unread_replies = self._unread_replies, {}
        return replies

    def ended(self, request: int, completion: Completion) -> Completion:
        """Returns the completion, with its environment's judgement if that is known by now."""
        self._turn_ends.pop(request, None)
        self._unread_replies.pop(request, None)  # the engine ended it first
        if completion.stop_reason is StopReason.INTERRUPTED:
            self._release(request)
            return completion
        if request not in self._judgements:
            turns = completion.turns
            was_cut = len(turns) > self._turn_counts.get(request, 0)
            self._ask(request, None, self.turn_encoder.text(completion.tokens[turns[-1][0] :]) if was_cut else None)
            self._collect_replies(wait=False)
        if request not in self._judgements:
            self._request_of[id(completion)] = request
            return completion
        return self._with_judgement(request, completion)

    def _collect_replies(self, wait: bool) -> None:
        """Take the environments' replies; with `wait` it waits for one, but only for a moment."""
        with self.idle_timer() if wait else nullcontext():
            replies = self.hosts.replies(wait)
        for request, reply in replies.items():
            self._accept_reply(request, reply)

    def _pop_judged(
        self, finished_prompts: Sequence[tuple[int, list[Completion]]], interrupted: bool = False
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Takes prompts that an engine has finished; yields those that have been judged, these and earlier ones.

        interrupted: all of them, and what has not been judged as interrupted.
        """
        self._unjudged |= dict(finished_prompts)
        for number in list(self._unjudged):
            completions = [self._finalize(c, interrupted) for c in self._unjudged[number]]
            self._unjudged[number] = completions
            if not any(id(c) in self._request_of for c in completions):
                del self._unjudged[number], self._prompts[number]
                yield number, completions
        if time.monotonic() - self._report_time > _REPORT_SECONDS:
            self._report()

    def _close(self) -> None:
        """End the episodes that are left, and log how many have failed."""
        self.hosts.close()
        self._report()

    def _finalize(self, completion: Completion, interrupted: bool) -> Completion:
        request = self._request_of.get(id(completion))
        if request is None or not (interrupted or request in self._judgements):
            return completion
        del self._request_of[id(completion)]
        if request in self._judgements:
            return self._with_judgement(request, completion)
        self._release(request)
        return replace(completion, stop_reason=StopReason.INTERRUPTED)

    def _with_judgement(self, request: int, completion: Completion) -> Completion:
        judgement = self._judgements.pop(request)
        self._release(request)
        self._failures[1] += 1
        return replace(completion, judgement=judgement)

    def _ask(self, request: int, turn: str | None, cut_turn: str | None = None) -> None:
        beginning = None
        if request not in self._begun_requests:
            self._begun_requests.add(request)
            prompt = self._prompts[request // self.count]
            beginning = Beginning(prompt.fields, prompt.world, prompt.text, prompt.earlier_turns)
        with self.idle_timer() if isinstance(self.hosts, InProcessHost) else nullcontext():
            self.hosts.ask(request, Question(beginning, turn, cut_turn))

    def _accept_reply(self, request: int, reply: EpisodeReply) -> None:
        tokens = None
        if reply.failure:
            self._reject(request, reply.failure)
        elif reply.observation is None:
            assert reply.judgement is not None
            self._judgements[request] = reply.judgement
        else:
            try:
                tokens = self.turn_encoder.observation(reply.observation, *self._turn_ends[request])
            except EpisodeFailed as error:
                self._reject(request, str(error))
        if request in self._turn_ends:  # else the engine has ended it before
            self._unread_replies[request] = tokens

    def _reject(self, request: int, reason: str) -> None:
        self._judgements[request] = Judgement(math.nan)
        self._failures[0] += 1
        self._last_failure = reason

    def _release(self, request: int) -> None:
        self._begun_requests.discard(request)
        self._turn_counts.pop(request, None)
        self.hosts.release(request)

    def _report(self) -> None:
        failures, total = self._failures
        if failures:
            log.warning("%d of %d episodes failed and are rejected, the last: %s", failures, total, self._last_failure)
        self._failures, self._report_time = [0, 0], time.monotonic()
