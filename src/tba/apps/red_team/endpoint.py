"""A victim behind an OpenAI-compatible HTTP endpoint."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tba.errors import UserError
from tba.rewards.endpoint import Endpoint, EndpointClient
from tba.rewards.threads import run_in_threads


@dataclass(frozen=True)
class EndpointVictim(Endpoint):
    """A model behind an OpenAI-compatible HTTP endpoint. Each searcher has its own connections and rate limit."""

    temperature: float = 0.7  # 0 is greedy
    top_p: float = 0.95  # of its sampling
    concurrency: int = 8  # simultaneous calls of one searcher
    deadline: float = 600.0  # seconds for all calls of one round

    label: ClassVar[str] = "victim"
    option: ClassVar[str] = "--task.victim.{}"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.deadline > 0:
            raise UserError(f"the victim's deadline is {self.deadline}, it must be above 0")

    def start(self) -> AttackedEndpoint:
        """Makes no call yet. Raises `UserError` without a url or a model."""
        return AttackedEndpoint(self, self.concurrency, self.deadline)


class AttackedEndpoint(EndpointClient):
    """Answers attacks by calls of an endpoint."""

    def __init__(self, settings: EndpointVictim, concurrency: int, deadline: float) -> None:
        super().__init__(settings)
        self._concurrency, self._deadline = concurrency, deadline

    def answers(self, attacks: Sequence[str], count: int) -> list[list[str]]:
        """Makes one call for each attack, several at once. Raises `UserError`, `Refused` or `DeadlineExceeded`."""
        calls = [functools.partial(self.replies, attack, count) for attack in attacks]
        if not calls:
            return []
        return run_in_threads(
            calls, self._concurrency, self._deadline, lambda _: str(self), "--task.victim.deadline", use_caller=False
        )
