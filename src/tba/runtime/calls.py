"""A part's calls in a Ray cluster: to what refers to a value, and to the exchange of its run.

Invariant: every wait for Ray has a deadline and names what it waits for; what the exchange raised is raised here
as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from tba.errors import DeadlineExceeded, HandedOutLost, PartFailed, UserError
from tba.runtime.connecting import NAMESPACE
from tba.weights.chunks import Flat


def get(reference: Any, deadline: float, what: str) -> Any:
    """What it refers to. Raises `DeadlineExceeded` when that takes longer."""
    try:
        return ray.get(reference, timeout=deadline)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineExceeded(f"waited {deadline:g} s for {what}") from error


def exchange_name(run: Path) -> str:
    """Under which the exchange of a run is found in its cluster."""
    return f"exchange of {run.name}"


def contact_with(run: str, part: str, deadline: float) -> ActorContact:
    """The exchange of the run of that name. Raises `UserError` when it is not in the cluster."""
    try:
        return ActorContact(ray.get_actor(exchange_name(Path(run)), namespace=NAMESPACE), part, deadline)
    except ValueError as error:
        raise UserError(
            f"no run {Path(run).name} is going on in this cluster: begin it with --runtime cluster"
        ) from error


@dataclass(frozen=True)
class ActorContact:
    """A part's calls to the exchange."""

    exchange: Any
    part: str
    deadline: float  # seconds

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """What this method of the exchange gives. Raises what it raised."""
        reference = getattr(self.exchange, method).remote(*arguments, **named)
        try:
            return get(reference, self.deadline, f"the exchange beside the trainer ({method})")
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            raise PartFailed(
                f"{self.part} has lost touch with the exchange: the run is gone, or its machine"
            ) from error

    def fetch(self, references: Sequence[Any]) -> list[Flat]:
        """The pieces themselves, one after the other. Raises `HandedOutLost` when they died with the exchange."""
        what = "a piece of the weights from Ray's object store"
        try:
            return [get(reference, self.deadline, what) for reference in references]
        except ray.exceptions.ObjectLostError as error:
            raise HandedOutLost(f"{what} is gone with the exchange that held it") from error
