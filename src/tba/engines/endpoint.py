"""An engine whose answers another model gives, behind an endpoint: their texts, as the run's own tokens.

Invariant: a call is about one answer, and begins only while the budget has room for the longest answer that it may
bring. An answer that cannot be written as the run's tokens is handed out without tokens, which a searcher rejects and
counts. What is handed out has no log-probabilities: no weights of the run sampled it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from sys import maxsize
from typing import TYPE_CHECKING

import numpy as np

from tba.errors import DeadlineExceeded, UserError
from tba.grading import call_in_thread
from tba.protocols import Partner
from tba.tables import Refusal, Values
from tba.types import ELSEWHERE, Completion, Prompt, Sampling, StopReason, Version

if TYPE_CHECKING:
    from torch import Tensor

CALL_SECONDS = 3600.0  # that a call may take, its repetitions and its pauses included
_POLL_SECONDS = 0.05  # of a wait for answers


@dataclass(frozen=True)
class Budget:
    """Bounds what is asked of an endpoint. Raises `UserError` for a bound below 1."""

    tokens: int | None = None  # of prompts and answers, as the endpoint counts them; None: any number
    calls: int | None = None  # each of which is about one answer; None: any number

    def __post_init__(self) -> None:
        for name in ("tokens", "calls"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"--budget-{name} is {value}: give 1 or more, or leave it out for no bound")


@dataclass
class Spending:
    """Counts what was asked of an endpoint, and what it brought."""

    calls: int = 0  # that began, each counted once however often it was repeated
    tokens: int = 0  # of prompts and answers, as the endpoint counts them
    uncounted_calls: int = 0  # answered calls of whose tokens it says nothing
    abandoned_calls: int = 0  # whose answers nobody waited for
    rejections: Counter[str] = field(default_factory=Counter)  # answers that could not be written, by the reason

    def __str__(self) -> str:
        lines = [f"{self.calls:,} calls, {self.tokens:,} tokens"]
        lines += [f"{self.uncounted_calls:,} calls without a count of tokens"] if self.uncounted_calls else []
        lines += [f"{self.abandoned_calls:,} calls abandoned"] if self.abandoned_calls else []
        lines += [f"{count:,} rejected: {reason}" for reason, count in self.rejections.most_common()]
        return "; ".join(lines)


@dataclass(frozen=True)
class EndpointAnswer:
    """Holds what a call brought: an answer as a line of an import has it, and what it cost."""

    row: Values | Refusal
    tokens: int | None  # of prompt and answer; None: the endpoint does not say


@dataclass
class EndpointEngine:
    """Asks an endpoint for answers. To a searcher it is an engine like others, whose weights are never replaced."""

    name: str  # of the endpoint, for messages
    ask: Callable[[Prompt], EndpointAnswer]  # called in threads
    encode: Callable[[Values], Completion | Refusal]
    max_tokens: int  # of an answer that is asked for
    concurrency: Callable[[], int]  # how many calls may be under way now
    budget: Budget = field(default_factory=Budget)
    call_seconds: float = CALL_SECONDS
    spending: Spending = field(default_factory=Spending)
    is_budget_spent: bool = False
    version: Version = Version(maxsize)  # later than any of the run's, so that no weights are read for it

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Does nothing: the endpoint's weights are its own."""

    def flow(
        self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None
    ) -> EndpointFlow:
        """Returns an empty flow of `count` answers to each prompt, which the endpoint samples as it was asked to."""
        assert partner is None
        return EndpointFlow(self, count)

    def has_room(self, tokens: int) -> bool:
        """Returns whether the budget has room for another call while calls under way and this one take `tokens`."""
        budget, spending = self.budget, self.spending
        has_tokens = budget.tokens is None or spending.tokens + tokens <= budget.tokens
        return has_tokens and (budget.calls is None or spending.calls < budget.calls)

    def completion(self, answer: EndpointAnswer) -> Completion:
        """Returns an answer as a completion, without tokens where it cannot be written, and counts it. Raises
        `UserError` where a budget of tokens cannot be held.
        """
        if answer.tokens is None and self.budget.tokens is not None:
            raise UserError(
                f"{self.name} does not say how many tokens an answer costs, so that --budget-tokens cannot be held: "
                "give --budget-calls instead"
            )
        self.spending.tokens += answer.tokens or 0
        self.spending.uncounted_calls += answer.tokens is None
        completion = answer.row if isinstance(answer.row, Refusal) else self.encode(answer.row)
        if isinstance(completion, Completion):
            return completion
        self.spending.rejections[completion.reason] += 1
        return Completion(np.zeros(0, np.int32), "", StopReason.EXTERNAL, (ELSEWHERE, ELSEWHERE))


@dataclass(frozen=True)
class _PendingAnswer:
    number: int  # of its prompt in the flow
    tokens: int  # that it may cost: the prompt's, and those of the longest answer
    deadline: float  # by a monotonic clock


@dataclass
class EndpointFlow:
    """Prompts that an endpoint answers: a flow (`protocols.Flow`) that hands out answers one by one."""

    engine: EndpointEngine
    count: int  # answers to each prompt
    prompts_submitted: int = 0
    unfinished_prompts: dict[int, int] = field(default_factory=dict)  # answers to come, by number
    _queue: deque[tuple[int, Prompt]] = field(default_factory=deque)  # answers that are not asked for yet
    _calls: dict[Future[EndpointAnswer], _PendingAnswer] = field(default_factory=dict)  # under way
    _answers: dict[int, list[Completion]] = field(default_factory=dict)  # not handed out yet, by number

    @property
    def prompts_needed(self) -> int:
        """Returns how many more prompts the endpoint could be asked now."""
        if self.engine.is_budget_spent:
            return 0
        return max(0, -(-(self.engine.concurrency() - len(self._queue) - len(self._calls)) // self.count))

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Adds prompts, numbered in the order of submission."""
        for number, prompt in enumerate(prompts, self.prompts_submitted):
            self.unfinished_prompts[number] = self.count
            self._queue.extend([(number, prompt)] * self.count)
        self.prompts_submitted += len(prompts)

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_needed: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """Waits until answers have come, or (`until_needed`) more prompts could be asked; returns the former by number.
        A number comes again as long as it is in `unfinished_prompts`. Once the budget is spent, prompts end with the
        answers that they have.

        Raises what a call raises, and `DeadlineExceeded` for a call that does not end.
        """
        while True:
            self._collect_answers()
            if interrupted is not None and interrupted():
                self._abandon_calls()
            self._begin_calls()
            if self._answers or not self.unfinished_prompts or (until_needed and self.prompts_needed):
                answers, self._answers = self._answers, {}
                return list(answers.items())
            wait(self._calls, _POLL_SECONDS, FIRST_COMPLETED)

    def cancel(self, request: int) -> None:
        """Leaves out an answer that is not asked for yet; one that is asked for is waited for."""
        number = request // self.count
        index = next((i for i, (queued_number, _) in enumerate(self._queue) if queued_number == number), None)
        if index is not None:
            del self._queue[index]
            self._finish(number, [])

    def _begin_calls(self) -> None:
        """Begin as many calls as the endpoint takes. Where the budget has no room, what is queued ends with the last
        call under way.
        """
        engine = self.engine
        while self._queue and len(self._calls) < engine.concurrency():
            number, prompt = self._queue[0]
            tokens = len(prompt.tokens) + engine.max_tokens
            if not engine.has_room(tokens + sum(call.tokens for call in self._calls.values())):
                if not self._calls:
                    engine.is_budget_spent = True
                    while self._queue:
                        self._finish(self._queue.popleft()[0], [])
                return
            self._queue.popleft()
            engine.spending.calls += 1
            call = _PendingAnswer(number, tokens, time.monotonic() + engine.call_seconds)
            self._calls[call_in_thread("endpoint", engine.ask, prompt)] = call

    def _collect_answers(self) -> None:
        """Collect the answers that have come."""
        for future in [future for future in self._calls if future.done()]:
            call = self._calls.pop(future)
            self._finish(call.number, [self.engine.completion(future.result())])
        if any(call.deadline < time.monotonic() for call in self._calls.values()):
            raise DeadlineExceeded(
                f"waited {self.engine.call_seconds:g} s for an answer of {self.engine.name}: see that it is up"
            )

    def _finish(self, number: int, completions: list[Completion]) -> None:
        """Hand out what became of one answer to a prompt."""
        self.unfinished_prompts[number] -= 1
        if not self.unfinished_prompts[number]:
            del self.unfinished_prompts[number]
        self._answers.setdefault(number, []).extend(completions)

    def _abandon_calls(self) -> None:
        """End all prompts with the answers that they have; what is under way is abandoned."""
        self.engine.spending.abandoned_calls += len(self._calls)
        self._calls.clear()
        self._queue.clear()
        for number in self.unfinished_prompts:
            self._answers.setdefault(number, [])
        self.unfinished_prompts.clear()
