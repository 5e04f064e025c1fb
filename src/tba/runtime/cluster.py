"""The `cluster` runtime: trainer and searchers as Ray actors, over many machines or one.

Down through the exchange into the journal, up through Ray's object store; the run's directory is on this machine, and
the trainer (its first rank) with it. The driver (this process) joins the Ray cluster at `--address`, or starts one that
listens on the loopback interface only and ends with it; there is no dashboard, nothing is reported to anybody, and
Ray's token authentication stays as it is (on, for a cluster of its own). What it does with the parts is in `driving`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tba.errors import PartFailed, UserError
from tba.runtime.actor_part import DIED, ActorPart
from tba.runtime.actors import ExchangeActor, MeetAt
from tba.runtime.board import Board
from tba.runtime.calls import exchange_name, get
from tba.runtime.connecting import connected
from tba.runtime.driving import POLL, Driver, Part
from tba.runtime.placement import Node, Placed, plan
from tba.runtime.ranked import RankedPart
from tba.train.ranks import name_of_rank

_remote: Any = ray.remote  # whose types leave this out


@dataclass
class Cluster(Driver):
    """One run on a Ray cluster: `go()` until it is finished, stopped or failed."""

    _started: list[ActorPart | RankedPart[ActorPart]] = field(default_factory=list)
    _placed: dict[str, Placed] = field(default_factory=dict)
    _exchange: Any = None

    def go(self) -> dict[str, object]:
        """Runs to the end, within the cluster; the faults it survived. Raises what a part ended with."""
        with connected(self.recipe.address, self.recipe.cluster.object_store_gb) as found:
            self._placed = {placed.part: placed for placed in plan(self.recipe, found, self.searchers)}
            self._start_exchange(next(node for node in found if node.here))
            faults = super().go()
            get(self._exchange.end.remote(), self.recipe.run.stop_deadline, "the exchange to close the journal")
            return faults

    def _start_exchange(self, here: Node) -> None:
        deadline = self.recipe.cluster.start_deadline
        actor = _remote(concurrency_groups={"journal": 1, "weights": 1})(ExchangeActor).options(
            name=exchange_name(self.run.path),
            num_cpus=0,
            max_restarts=self.recipe.run.restarts,
            max_task_retries=-1,  # each call may be repeated
            scheduling_strategy=NodeAffinitySchedulingStrategy(here.key, soft=False),
        )
        try:
            self._exchange = actor.remote(str(self.run.path.resolve()))
        except ValueError as error:
            raise UserError(f"a run {self.run.path.name} is going on in this cluster: give another name") from error
        try:
            get(self._exchange.newest.remote(None), deadline, "Ray to start the exchange beside the trainer")
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise PartFailed(f"the exchange beside the trainer did not start: {error}") from error

    def start(self, name: str) -> Part:
        """As an actor, on the node that it was given; a trainer of several ranks as several."""
        part: ActorPart | RankedPart[ActorPart]
        if name == "trainer" and self.recipe.trainer.ranks > 1:
            part = RankedPart(self._ranks, _own_failure)
        else:
            part = self._actor(name)
        self._started.append(part)
        return part

    def _actor(self, name: str, attempt: int = 0, meet: MeetAt | None = None) -> ActorPart:
        deadline = self.recipe.cluster.start_deadline
        return ActorPart(self._placed[name], self.run, self._exchange, deadline, attempt, meet)

    def _ranks(self, attempt: int, ends: ExitStack) -> list[ActorPart]:
        """Of one life of the trainer, which meet at a board of its own."""
        names = [name_of_rank(rank) for rank in range(self.recipe.trainer.ranks)]
        places = [self._placed[name].node for name in names]
        here = NodeAffinitySchedulingStrategy(places[0].key, soft=False)
        board = _remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()
        ends.callback(ray.kill, board)
        meet = MeetAt(board, spread=len({node.key for node in places}) > 1)
        return [self._actor(name, attempt, meet) for name in names]

    @property
    def _parts(self) -> list[ActorPart]:
        return [p for part in self._started for p in (part.ranks if isinstance(part, RankedPart) else [part])]

    def pause(self) -> None:
        """As long as any other driver, and what is ready by then."""
        references = [reference for part in self._parts for reference in part.awaited]
        if not references:
            time.sleep(POLL)
        ready = ray.wait(references, num_returns=len(references), timeout=POLL)[0] if references else []
        for part in self._parts:
            part.look(set(ready))


def _own_failure(failed: Sequence[ActorPart], more_to_learn: bool) -> ActorPart | None:
    """The rank whose actor died; else the one that raised; those that lost touch did so because of another.

    What raises may do so for one that has died, which Ray tells a moment later.
    """
    died = [part for part in failed if part.code == DIED and not part.lost_touch]
    if died or more_to_learn:
        return died[0] if died else None
    return min(failed, key=lambda part: part.lost_touch)
