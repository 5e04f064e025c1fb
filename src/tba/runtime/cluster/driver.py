"""The `cluster` runtime: trainer and searchers as Ray actors, on one machine or many.

Trajectories go through the gateway into the journal, weights through Ray's object store; the run's directory is on this
machine, and the trainer (its first rank) with it. The driver (this process) joins the Ray cluster at `--address`, or
starts one that listens on the loopback interface only and ends with it; there is no dashboard, nothing is reported to
anybody, and Ray's token authentication stays as it is (on, for a cluster of its own). How the driver supervises the
workers is in `supervisor`; `ActorWorker` is one worker as a Ray actor, seen from the driver.

Invariant: looking at a worker never waits. A worker is up once it has answered. One that Ray does not start in time
ends the run, unless it is a searcher that was being restarted: then its machine is gone, and the run goes
on without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tba.errors import DeadlineExceeded, PartFailed, UserError
from tba.record.faults import record_fault
from tba.runtime.cluster.actors import ExchangeActor, MeetingPlace, PartActor
from tba.runtime.cluster.client import connect_to_ray, exchange_name, get, nodes
from tba.runtime.cluster.gateway import PLACES
from tba.runtime.cluster.placement import Node, Placement, plan, share_of_gpu
from tba.runtime.cluster.remote import facts_with_text
from tba.runtime.ranks.store import KeyValueStore
from tba.runtime.ranks.worker import RankedWorker
from tba.runtime.run_directory import RunDirectory
from tba.runtime.supervisor import POLL, STOP_DEADLINE, Driver, Worker, worker_error
from tba.training.ranks.messages import name_of_rank
from tba.types import Json

_FREEING_SECONDS = 10.0  # within which Ray knows what is free
_remote: Any = ray.remote  # Ray's own types leave out some of its options


@dataclass
class Cluster(Driver):
    """One run on a Ray cluster: `go()` until it is finished, stopped or failed."""

    _launched: list[ActorWorker | RankedWorker[ActorWorker]] = field(default_factory=list)
    _placements: dict[str, Placement] = field(default_factory=dict)
    _exchange: Any = None

    def go(self) -> dict[str, object]:
        """Run to the end in the cluster; returns the faults that it survived.

        Raises the error that a worker ended with.
        """
        with connect_to_ray(self.recipe.address, self.recipe.cluster.object_store_gb):
            self._placements = {placement.worker: placement for placement in self._plan()}
            self._start_exchange(self._placements["trainer"].node)
            faults = super().go()
            get(self._exchange.end.remote(), STOP_DEADLINE, "the exchange to close the journal")
            return faults

    def _plan(self) -> list[Placement]:
        """Returns where each worker goes; waits a moment for what a run that has just ended gives back."""
        deadline = time.monotonic() + _FREEING_SECONDS
        while True:
            try:
                return plan(self.recipe, nodes(), self.searchers)
            except UserError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL)

    def _start_exchange(self, node: Node) -> None:
        deadline = self.recipe.cluster.start_deadline
        actor = _remote(concurrency_groups={"journal": 1, "weights": 1})(ExchangeActor).options(
            name=exchange_name(self.run.path),
            num_cpus=0,
            max_restarts=self.recipe.run.restarts,
            max_task_retries=-1,  # every call may be repeated
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.key, soft=False),
        )
        try:
            self._exchange = actor.remote(str(self.run.path.resolve()))
        except ValueError as error:
            raise UserError(f"a run {self.run.path.name} is in progress in this cluster: give another name") from error
        try:
            get(self._exchange.newest.remote(None), deadline, "Ray to start the gateway on the trainer's machine")
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise PartFailed(f"the gateway on the trainer's machine did not start: {error}") from error

    def start(self, name: str) -> Worker:
        """Start a worker as an actor on the node that it was given; a trainer of several ranks is several actors."""
        worker: ActorWorker | RankedWorker[ActorWorker]
        if name == "trainer" and self.recipe.trainer.count > 1:
            worker = RankedWorker(self._ranks, _rank_to_blame)
        else:
            worker = self._actor(name)
        self._launched.append(worker)
        return worker

    def _actor(self, name: str, attempt: int = 0, meet: MeetingPlace | None = None) -> ActorWorker:
        deadline = self.recipe.cluster.start_deadline
        return ActorWorker(self._placements[name], self.run, self._exchange, deadline, attempt, meet)

    def _ranks(self, attempt: int, closers: ExitStack) -> list[ActorWorker]:
        """Start the ranks of one life of the trainer, which find each other through a key-value store made for it."""
        names = [name_of_rank(rank) for rank in range(self.recipe.trainer.count)]
        rank_nodes = [self._placements[name].node for name in names]
        strategy = NodeAffinitySchedulingStrategy(rank_nodes[0].key, soft=False)
        store = _remote(KeyValueStore).options(num_cpus=0, scheduling_strategy=strategy).remote()
        closers.callback(ray.kill, store)
        meet = MeetingPlace(store, is_spread=len({node.key for node in rank_nodes}) > 1)
        return [self._actor(name, attempt, meet) for name in names]

    @property
    def _workers(self) -> list[ActorWorker]:
        workers = [worker.ranks if isinstance(worker, RankedWorker) else [worker] for worker in self._launched]
        return [part for parts in workers for part in parts]

    def pause(self) -> None:
        """Wait as long as any other driver does, and read which references have become ready by then."""
        references = [reference for worker in self._workers for reference in worker.pending_references]
        if not references:
            time.sleep(POLL)
        ready = ray.wait(references, num_returns=len(references), timeout=POLL)[0] if references else []
        for worker in self._workers:
            worker.poll(set(ready))


def _rank_to_blame(failed_ranks: Sequence[ActorWorker], may_learn_more: bool) -> ActorWorker | None:
    """Returns the rank whose actor died, else the rank that raised; ranks that lost contact did so because of another.

    A rank may also raise because another rank has died, which Ray reports a moment later.
    """
    dead_ranks = [worker for worker in failed_ranks if worker.code == DIED and not worker.lost_contact]
    if dead_ranks or may_learn_more:
        return dead_ranks[0] if dead_ranks else None
    return min(failed_ranks, key=lambda worker: worker.lost_contact)


DIED = -1  # the exit code of a worker whose actor is gone
_REQUEST_SECONDS = 1.0  # between two requests for how long a worker has been silent


@dataclass
class ActorWorker:
    """A worker as a Ray actor, seen from its driver."""

    placement: Placement
    run: RunDirectory
    exchange: Any
    deadline: float  # seconds that Ray may take to start it
    attempt: int = 0
    meet: MeetingPlace | None = None  # where a rank of the trainer finds the others
    code: int | None = field(init=False)
    cause_of_death: str = field(init=False)
    lost_contact: bool = field(init=False)  # it ended because it could not reach another worker
    has_heartbeat: bool = field(init=False)
    _actor: Any = field(init=False)
    _end_reference: Any = field(init=False)
    _error: Json = field(init=False)
    _silence_request: Any = field(init=False)  # the pending request for how long it has been silent
    _requested_at: float = field(init=False)
    _heartbeat_at: float = field(init=False)  # when it last gave a heartbeat, or was started
    _is_up: bool = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start it as a new actor: on its node, or on any node that has room if that one is gone."""
        self.code, self.cause_of_death, self.has_heartbeat, self._error, self._is_up = None, "", False, None, False
        self.lost_contact = False
        self._heartbeat_at = self._requested_at = time.monotonic()
        resources = self.placement.resources
        is_movable = self._searches or not self.placement.node.here
        strategy = NodeAffinitySchedulingStrategy(self.placement.node.key, soft=is_movable)
        # Ray would leave all GPUs visible to a worker that asks for none, including those that it has given to others.
        self._actor = (
            _remote(concurrency_groups={"ask": 1})(PartActor)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources["GPU"],
                scheduling_strategy=strategy,
                runtime_env={"env_vars": share_of_gpu(resources["GPU"])},
            )
            .remote()
        )
        facts = facts_with_text(self.run)
        self._end_reference = self._actor.go.remote(self.name, facts, self.attempt, self.exchange, self.meet)
        self._silence_request = self._actor.silence.remote()

    def start_again(self) -> None:
        """Start the worker again after its death."""
        self.kill()
        self.attempt += 1
        self.start()

    @property
    def name(self) -> str:
        return self.placement.worker

    @property
    def _searches(self) -> bool:
        """Returns whether this is a searcher, which the run can do without."""
        return not self.name.startswith("trainer")

    @property
    def description(self) -> str:
        return f"{self.name} (on {self.placement.node.name})"

    @property
    def log(self) -> str:
        log_file = self.run.log(self.name)
        return str(log_file) if log_file.exists() else f"named in {self.run.path / 'logs' / PLACES}"

    @property
    def pending_references(self) -> list[Any]:
        """Returns the Ray references to wait for: of the worker's end, and of its answer."""
        silence_requests = [] if self._silence_request is None else [self._silence_request]
        return [self._end_reference, *silence_requests] if self.code is None else []

    def poll(self, ready: set[Any]) -> None:
        """Read the references that have become ready. Raises `DeadlineExceeded` when Ray does not start the actor."""
        if self.code is not None:
            return
        if self._end_reference in ready:
            self._record_end()
            return
        now = time.monotonic()
        if self._silence_request is None and now - self._requested_at > _REQUEST_SECONDS:
            self._requested_at, self._silence_request = now, self._actor.silence.remote()
        elif self._silence_request is not None and self._silence_request in ready:
            with suppress(ray.exceptions.RayError):  # that the actor is gone is seen by its end
                silence = get(self._silence_request, self.deadline, f"an answer of {self.description}")
                self._is_up = True
                if silence is not None:
                    self.has_heartbeat, self._heartbeat_at = True, now - silence
            self._silence_request = None
        elif not self._is_up and now - self._heartbeat_at > self.deadline:
            self._give_up_starting()

    def _give_up_starting(self) -> None:
        """Give up an actor for which no node has room.

        If it has never been started, or is the trainer's, the run cannot continue.
        """
        request = f"{self.placement.resources['CPU']:g} CPU and {self.placement.resources['GPU']:g} GPU"
        complaint = f"waited {self.deadline:g} s for Ray to start {self.description} with {request}"
        self.kill()
        if self.attempt and self._searches:  # its machine is gone, most likely
            self.code = 0
            self.exchange.journal.remote(self.name, "resume")  # the prompts it had leased are given back, for others
            record_fault(self.run.path, "searchers_given_up", f"{complaint} again; the run continues without it")
        else:
            self.code, self.cause_of_death = DIED, "was not started"
            raise DeadlineExceeded(f"{complaint}: others may hold them")

    def _record_end(self) -> None:
        """Find out how the worker ended."""
        try:
            self._error = get(self._end_reference, self.deadline, f"the end of {self.description}")
            self.code = 0 if self._error is None else 1
        except ray.exceptions.RayError as error:
            self.lost_contact = isinstance(error, ray.exceptions.RayTaskError)  # the error that `go` raises
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            self.code, self.cause_of_death = DIED, f"died ({str(cause).strip().splitlines()[0]})"
        ray.kill(self._actor)  # releases what the actor held

    def silence(self) -> float:
        """Returns the seconds since the worker's last heartbeat."""
        return time.monotonic() - self._heartbeat_at

    def ask_to_stop(self) -> None:
        if self.code is None and self.attempt and self._searches and not self._is_up:
            self.kill()  # it is still waiting for a node, and has nothing to finish
            self.code = 0
        elif self.code is None:
            self._actor.stop.remote()

    def kill(self) -> None:
        """End it, unless it has ended."""
        if self.code is None:
            ray.kill(self._actor)

    def end(self) -> None:
        """End it as a worker that hangs."""
        self.kill()
        self.code, self.cause_of_death = DIED, "was killed, for it was silent"

    def failure(self) -> Exception:
        """Returns why it ended, as the driver's own error."""
        if self._error is not None:
            return worker_error(self.description, self.log, self._error)
        return PartFailed(f"{self.description} {self.cause_of_death}; its log is {self.log}")
