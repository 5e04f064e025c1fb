"""The `cluster` runtime: trainer and searchers as Ray actors, on one machine or many.

Trajectories go through the gateway into the journal, weights through Ray's object store; the run's directory is on this
machine, and the trainer (its first rank) with it. The driver (this process) joins the Ray cluster at `--address` or
$RAY_ADDRESS, or starts one that listens on the loopback interface only and ends with it; there is no dashboard, nothing
is reported to anybody, and Ray's token authentication stays as it is (on, for a cluster of its own). How the driver
supervises the workers is in `supervisor`; `ActorWorker` is one worker as a Ray actor, seen from the driver.

Ray places the workers: the trainer's ranks have one placement group, whose first bundle is on this node; each searcher
has a group of its own. A bundle stays reserved while its worker is restarted, and Ray moves it where its node is lost.

Invariant: looking at a worker never waits. A worker is up once it has answered. A searcher for which no node has room
waits for one, and the run goes on without it; a rank that finds none in time ends the run, and so does the first
searcher.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from tba.errors import DeadlineExceeded, PartFailed, UserError
from tba.record.faults import record_fault
from tba.runtime.cluster.actors import ExchangeActor, MeetingPlace, PartActor
from tba.runtime.cluster.client import connect_to_ray, exchange_name, get
from tba.runtime.cluster.gateway import PLACES
from tba.runtime.cluster.placement import (
    Node,
    address_of,
    plan,
    request_text,
    requests,
    reserve_roomiest,
    share_of_gpu,
    whole_gpus,
)
from tba.runtime.cluster.remote import facts_with_text
from tba.runtime.ranks.store import KeyValueStore
from tba.runtime.ranks.worker import RankedWorker
from tba.runtime.run_directory import RunDirectory
from tba.runtime.supervisor import POLL, STOP_DEADLINE, Driver, Worker, worker_error
from tba.training.ranks.messages import name_of_rank
from tba.types import Json

_UNNOTICED_SECONDS = 10.0  # for which a restarted searcher may be without room before that is recorded
_WORK_FACTOR = 5.0  # so many times the time of a step and a checkpoint a trainer may be silent
_PING_SECONDS = 5.0  # between two checks whether the gateway answers
_NODE_LABEL = "ray.io/node-id"  # a label that Ray gives each node
_remote: Any = ray.remote  # Ray's own types leave out some of its options


@dataclass(frozen=True)
class Room:
    """What Ray reserves for a worker: a bundle of a placement group. Ray finds a node for it, and another one where
    that is lost.
    """

    worker: str
    resources: Mapping[str, float]  # CPU, GPU
    group: PlacementGroup
    bundle: int

    def node_key(self) -> str:
        """Returns the node's key; empty while there is none."""
        key: str = placement_group_table(self.group)["bundles_to_node_id"].get(self.bundle, "")
        return key

    def node_name(self) -> str:
        """Returns the node's address for people."""
        key = self.node_key()
        address = next((node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == key), "")
        return f"on {address} ({key[:6]})" if address else "on no node yet"


def _bundle(request: Mapping[str, float]) -> dict[str, float]:
    """Returns a request as Ray takes it: without zeros, and not empty."""
    return {kind: amount for kind, amount in request.items() if amount} or {"memory": 1}


@dataclass
class Cluster(Driver):
    """One run on a Ray cluster: `go()` until it is finished, stopped or failed."""

    _launched: list[ActorWorker | RankedWorker[ActorWorker]] = field(default_factory=list)
    _rooms: dict[str, Room] = field(default_factory=dict)
    _exchange: Any = None
    _exchange_process: int = 0
    _ping: Any = None  # the pending question to the gateway whether it is alive
    _pinged_at: float = 0.0
    _started_at: float = 0.0
    _had_searcher: bool = False  # whether any searcher has been up

    def go(self) -> dict[str, object]:
        """Run to the end in the cluster; returns the faults that it survived.

        Raises the error that a worker ended with.
        """
        cluster = self.recipe.cluster
        connection = connect_to_ray(address_of(self.recipe), cluster.object_store_gb, cluster.working_dir)
        with connection as cluster_nodes:
            self._reserve(cluster_nodes)
            self._start_exchange()
            self._started_at = time.monotonic()
            faults = super().go()
            get(self._exchange.end.remote(), STOP_DEADLINE, "the exchange to close the journal")
            return faults

    def _reserve(self, cluster_nodes: Sequence[Node]) -> None:
        """Reserve room for all ranks, the first on this node, and wait for it; ask for room for each searcher.

        Raises `UserError` when the ranks find none in time.
        """
        if address_of(self.recipe) is None:
            plan(self.recipe, cluster_nodes, self.searchers)  # no node will come: what does not fit is refused
        request_of = requests(self.recipe, whole_gpus(cluster_nodes), self.searchers)
        names = [name_of_rank(rank) for rank in range(self.recipe.trainer.count)]
        here_id = ray.get_runtime_context().get_node_id()
        selectors: list[dict[str, str]] = [{_NODE_LABEL: here_id}, *({} for _ in names[1:])]
        group = placement_group([_bundle(request_of[name]) for name in names], "PACK", bundle_label_selector=selectors)
        self._await_room(group, f"{len(names)} x {request_text(request_of['trainer'])}", cluster_nodes)
        nodes_by_key = {node.key: node for node in cluster_nodes}
        for i, name in enumerate(names):
            self._rooms[name] = room = Room(name, request_of[name], group, i)
            if (node := nodes_by_key.get(room.node_key())) is not None:
                node.reserve(room.resources)
        for name in self.searchers:
            node = reserve_roomiest(cluster_nodes, request_of[name])  # Ray takes another where that has changed
            target = None if node is None else node.key
            group = placement_group([_bundle(request_of[name])], "STRICT_PACK", _soft_target_node_id=target)
            self._rooms[name] = Room(name, request_of[name], group, 0)

    def _await_room(self, group: PlacementGroup, request: str, cluster_nodes: Sequence[Node]) -> None:
        limit = self.recipe.cluster.start_deadline
        free_resources = "; ".join(f"{n.name} had {request_text(n.free)} free" for n in cluster_nodes)
        note = (
            f"room for the trainer ({request}, the first here) within --cluster.start-deadline {limit:g} s; "
            f"{free_resources}"
        )
        reference, deadline = group.ready(), time.monotonic() + limit
        while not ray.wait([reference], timeout=POLL)[0]:
            self.tell("starting", f"waiting for {note}")
            if time.monotonic() > deadline:
                raise UserError(
                    f"found no {note}: use fewer --trainer.ranks, let each ask for less (--cluster.trainer-cpus 0.5), "
                    "add nodes, or set a longer deadline"
                )

    def _start_exchange(self) -> None:
        deadline = self.recipe.cluster.start_deadline
        actor = _remote(concurrency_groups={"journal": 1, "weights": 1})(ExchangeActor).options(
            name=exchange_name(self.run.path),
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,  # every call may be repeated
            scheduling_strategy=_driver_node_strategy(),
        )
        try:
            self._exchange = actor.remote(str(self.run.path.resolve()))
        except ValueError as error:
            raise UserError(f"a run {self.run.path.name} is in progress in this cluster: give another name") from error
        try:
            purpose = "Ray to start the gateway on the trainer's machine (--cluster.start-deadline)"
            self._exchange_process, niceness = get(self._exchange.ping.remote(), deadline, purpose)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise PartFailed(f"the gateway on the trainer's machine did not start: {error}") from error
        if niceness > 0:
            self._note = f"Ray runs its workers at niceness {niceness} here (RAY_worker_niceness=0 for ray start)"

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
        settings = self.recipe.cluster
        return ActorWorker(
            self._rooms[name],
            self.run,
            self._exchange,
            settings.start_deadline,
            settings.silence_deadline,
            attempt,
            meet,
        )

    def _ranks(self, attempt: int, closers: ExitStack) -> list[ActorWorker]:
        """Start the ranks of one life of the trainer, which find each other through a key-value store made for it."""
        names = [name_of_rank(rank) for rank in range(self.recipe.trainer.count)]
        store = _remote(KeyValueStore).options(num_cpus=0, scheduling_strategy=_driver_node_strategy()).remote()
        closers.callback(ray.kill, store)
        meet = MeetingPlace(store, is_spread=len({self._rooms[name].node_key() for name in names}) > 1)
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
        self._watch_exchange()
        self._require_a_searcher()

    def _watch_exchange(self) -> None:
        """Kill a gateway that hangs; Ray starts it again."""
        limit, now = self.recipe.cluster.silence_deadline, time.monotonic()
        if self._ping is None:
            if now - self._pinged_at > _PING_SECONDS:
                self._ping, self._pinged_at = self._exchange.ping.remote(), now
        elif ray.wait([self._ping], timeout=0)[0]:
            with suppress(ray.exceptions.RayError):  # the next question finds the one that was restarted
                self._exchange_process, _ = get(self._ping, limit, "the gateway's answer")
            self._ping = None
        elif now - self._pinged_at > limit:
            sentence = f"the gateway gave no sign of life for {limit:g} s and was killed (--cluster.silence-deadline)"
            record_fault(self.run.path, "silences", sentence)
            with suppress(ProcessLookupError):
                os.kill(self._exchange_process, signal.SIGKILL)  # it is on this machine
            self._pinged_at = now

    def _require_a_searcher(self) -> None:
        """Raises `DeadlineExceeded` when no searcher at all has found room in time."""
        limit, searchers = self.recipe.cluster.start_deadline, [w for w in self._workers if w.searches]
        self._had_searcher = self._had_searcher or not all(worker.waits_for_room for worker in searchers)
        if searchers and not self._had_searcher and time.monotonic() - self._started_at > limit:
            raise DeadlineExceeded(
                f"waited {limit:g} s for a node with room for a searcher ({request_text(searchers[0].room.resources)} "
                "each): add nodes, let each ask for less (--cluster.searcher-cpus, --cluster.searcher-gpus), or wait "
                "longer (--cluster.start-deadline)"
            )

    @property
    def note(self) -> str:
        """Returns what people are told about the workers: also how many searchers wait for room."""
        pending_searchers = [worker for worker in self._workers if worker.searches and worker.waits_for_room]
        if not pending_searchers:
            return self._note
        request = request_text(pending_searchers[0].room.resources)
        count = f"{len(pending_searchers)} of {len(self.searchers)} searchers"
        limit = "" if self._had_searcher else f" (--cluster.start-deadline {self.recipe.cluster.start_deadline:g} s)"
        return "; ".join(filter(None, [self._note, f"{count} wait for nodes with {request} free{limit}"]))

    def release_leases(self, searcher: str) -> None:
        """Give back the prompts of a searcher that will not answer them for a while."""
        self._exchange.journal.remote(searcher, "resume")

    def silence_limit(self, worker: Worker) -> tuple[float, str]:
        """Returns the seconds without a heartbeat after which a worker is killed, and the setting that gives them. A
        trainer has several times what a step and a checkpoint take, if that is more.
        """
        limit, quick_limit = super().silence_limit(worker), self.recipe.cluster.silence_deadline
        if not worker.has_heartbeat or worker.silence() <= quick_limit:
            return limit
        if worker.name == "trainer":
            work_seconds = self.seconds_to_checkpoint()
            quick_limit = math.inf if work_seconds is None else max(quick_limit, _WORK_FACTOR * work_seconds)
        return min((quick_limit, "--cluster.silence-deadline"), limit)


def _lost_nodes() -> set[str]:
    """Returns the keys of nodes that were in the cluster and are gone."""
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


def _driver_node_strategy() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


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

    room: Room
    run: RunDirectory
    exchange: Any
    deadline: float  # seconds that Ray may take to start it; for a rank, also to find room
    silence_deadline: float  # seconds within which its process answers
    attempt: int = 0
    meet: MeetingPlace | None = None  # where a rank of the trainer finds the others
    code: int | None = field(init=False)
    cause_of_death: str = field(init=False)
    lost_contact: bool = field(init=False)  # it ended because it could not reach another worker
    has_heartbeat: bool = field(init=False)
    waits_for_room: bool = field(init=False)
    has_lost_node: bool = field(init=False)
    _node_key: str = field(init=False)  # of the node where it found room
    _actor: Any = field(init=False)
    _end_reference: Any = field(init=False)
    _error: Json = field(init=False)
    _room_request: Any = field(init=False)  # the pending request for room; None: it has some
    _silence_request: Any = field(init=False)  # the pending request for how long it has been silent
    _requested_at: float = field(init=False)
    _heartbeat_at: float = field(init=False)  # when it last gave a heartbeat, found room, or was started
    _is_up: bool = field(init=False)
    _is_missed: bool = field(init=False)  # that it has no room again is recorded

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start it as a new actor in its room, as soon as there is room."""
        self.code, self.cause_of_death, self.has_heartbeat, self._error, self._is_up = None, "", False, None, False
        self.lost_contact, self.waits_for_room, self._is_missed = False, True, False
        self.has_lost_node, self._node_key = False, ""
        self._heartbeat_at = self._requested_at = time.monotonic()
        resources = self.room.resources
        # Ray would leave all GPUs visible to a worker that asks for none, including those that it has given to others.
        self._actor = (
            _remote(concurrency_groups={"ask": 1})(PartActor)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources["GPU"],
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.room.group, self.room.bundle),
                runtime_env={"env_vars": share_of_gpu(resources["GPU"])},
            )
            .remote()
        )
        facts = facts_with_text(self.run)
        self._end_reference = self._actor.go.remote(self.name, facts, self.attempt, self.exchange, self.meet)
        self._silence_request = self._actor.silence.remote()
        self._room_request = self.room.group.ready()

    def start_again(self) -> None:
        """Start the worker again after its death."""
        self.kill()
        self.attempt += 1
        self.start()

    @property
    def name(self) -> str:
        return self.room.worker

    @property
    def searches(self) -> bool:
        """Returns whether this is a searcher, which the run can do without."""
        return not self.name.startswith("trainer")

    @property
    def description(self) -> str:
        return f"{self.name} ({self.room.node_name()})"

    @property
    def log(self) -> str:
        log_file = self.run.log(self.name)
        return str(log_file) if log_file.exists() else f"named in {self.run.path / 'logs' / PLACES}"

    @property
    def pending_references(self) -> list[Any]:
        """Returns the Ray references to wait for: of the worker's end, of room for it, and of its answer."""
        requests = [request for request in (self._room_request, self._silence_request) if request is not None]
        return [self._end_reference, *requests] if self.code is None else []

    def poll(self, ready: set[Any]) -> None:
        """Read the references that have become ready.

        Raises `DeadlineExceeded` when a rank of the trainer finds no room, or Ray does not start it.
        """
        if self.code is not None:
            return
        if self._end_reference in ready:
            self._record_end()
            return
        now = time.monotonic()
        if self._room_request is not None and self._room_request in ready:
            self._room_request, self.waits_for_room, self._heartbeat_at = None, False, now
            self._node_key = self.room.node_key()
        if self._silence_request is None and now - self._requested_at > _REQUEST_SECONDS:
            self._requested_at, self._silence_request = now, self._actor.silence.remote()
        elif self._silence_request is not None and self._silence_request in ready:
            with suppress(ray.exceptions.RayError):  # that the actor is gone is seen by its end
                silence = get(self._silence_request, self.deadline, f"an answer of {self.name}")
                self._is_up, self.waits_for_room = True, False
                if silence is not None:
                    self.has_heartbeat, self._heartbeat_at = True, now - silence
            self._silence_request = None
        elif self._is_up and now - self._requested_at > self.silence_deadline:
            self._end_frozen()
        elif not self._is_up and now - self._heartbeat_at > (
            _UNNOTICED_SECONDS if self.searches and self.waits_for_room else self.deadline
        ):
            self._note_missing()

    def _end_frozen(self) -> None:
        """End a worker whose process, or machine, stands still."""
        limit = f"{self.silence_deadline:g} s and was killed (--cluster.silence-deadline)"
        record_fault(self.run.path, "silences", f"the process of {self.description} did not answer for {limit}")
        self.end()

    def _note_missing(self) -> None:
        """Note that a searcher has no room, or give up an actor that Ray does not start.

        Raises `DeadlineExceeded` where the run cannot continue without it.
        """
        request = request_text(self.room.resources)
        if self.searches and self.waits_for_room:
            if self.attempt and not self._is_missed:
                self.exchange.journal.remote(
                    self.name, "resume"
                )  # the prompts it had leased are given back, for others
                sentence = f"no node has {request} for {self.name} again: it waits for one, and the run continues"
                record_fault(self.run.path, "searchers_waiting", sentence)
            self._is_missed = True
            return
        complaint = f"Ray did not start it with {request} within {self.deadline:g} s (--cluster.start-deadline)"
        self.kill()
        self.code, self.cause_of_death = DIED, f"was lost: {complaint}"
        if not self.searches:
            raise DeadlineExceeded(f"{self.description}: {complaint}; others may hold them, or their node is gone")

    def _record_end(self) -> None:
        """Find out how the worker ended."""
        try:
            self._error = get(self._end_reference, self.deadline, f"the end of {self.name}")
            self.code = 0 if self._error is None else 1
        except ray.exceptions.RayError as error:
            self.lost_contact = isinstance(error, ray.exceptions.RayTaskError)  # the error that `go` raises
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            self.code, self.cause_of_death = DIED, f"died ({str(cause).strip().splitlines()[0]})"
            is_unreachable = isinstance(error, ray.exceptions.ActorUnavailableError)  # before Ray gives a node up
            self.has_lost_node = is_unreachable or self._node_key in _lost_nodes()
        ray.kill(self._actor)  # releases what the actor held

    def silence(self) -> float:
        """Returns the seconds since the worker's last heartbeat."""
        return time.monotonic() - self._heartbeat_at

    def ask_to_stop(self) -> None:
        if self.code is None and self.searches and not self._is_up:
            self.kill()  # it still waits for a node, or loads, and has nothing to finish
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
