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
from tba.runtime.cluster.actors import ExchangeActor, MeetAt, PartActor
from tba.runtime.cluster.client import connected, exchange_name, get, nodes
from tba.runtime.cluster.gateway import PLACES
from tba.runtime.cluster.placement import Node, Placed, plan, share_of_gpu
from tba.runtime.cluster.remote import whole_facts
from tba.runtime.ranks.store import KeyValueStore
from tba.runtime.ranks.worker import RankedWorker
from tba.runtime.run_directory import RunDirectory
from tba.runtime.supervisor import POLL, STOP_DEADLINE, Driver, Worker, failed
from tba.training.ranks.messages import name_of_rank
from tba.types import Json

_SETTLE = 10.0  # seconds within which Ray knows what is free
_remote: Any = ray.remote  # Ray's own types leave out some of its options


@dataclass
class Cluster(Driver):
    """One run on a Ray cluster: `go()` until it is finished, stopped or failed."""

    _started: list[ActorWorker | RankedWorker[ActorWorker]] = field(default_factory=list)
    _placed: dict[str, Placed] = field(default_factory=dict)
    _exchange: Any = None

    def go(self) -> dict[str, object]:
        """Run to the end in the cluster; returns the faults that it survived.

        Raises the error that a worker ended with.
        """
        with connected(self.recipe.address, self.recipe.cluster.object_store_gb):
            self._placed = {placed.worker: placed for placed in self._plan()}
            self._start_exchange(self._placed["trainer"].node)
            faults = super().go()
            get(self._exchange.end.remote(), STOP_DEADLINE, "the exchange to close the journal")
            return faults

    def _plan(self) -> list[Placed]:
        """Wait a moment for what a run that has just ended gives back, and refuse the run only then."""
        deadline = time.monotonic() + _SETTLE
        while True:
            try:
                return plan(self.recipe, nodes(), self.searchers)
            except UserError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL)

    def _start_exchange(self, here: Node) -> None:
        deadline = self.recipe.cluster.start_deadline
        actor = _remote(concurrency_groups={"journal": 1, "weights": 1})(ExchangeActor).options(
            name=exchange_name(self.run.path),
            num_cpus=0,
            max_restarts=self.recipe.run.restarts,
            max_task_retries=-1,  # every call may be repeated
            scheduling_strategy=NodeAffinitySchedulingStrategy(here.key, soft=False),
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
            worker = RankedWorker(self._ranks, _own_failure)
        else:
            worker = self._actor(name)
        self._started.append(worker)
        return worker

    def _actor(self, name: str, attempt: int = 0, meet: MeetAt | None = None) -> ActorWorker:
        deadline = self.recipe.cluster.start_deadline
        return ActorWorker(self._placed[name], self.run, self._exchange, deadline, attempt, meet)

    def _ranks(self, attempt: int, ends: ExitStack) -> list[ActorWorker]:
        """Start the ranks of one life of the trainer, which find each other through a key-value store made for it."""
        names = [name_of_rank(rank) for rank in range(self.recipe.trainer.count)]
        places = [self._placed[name].node for name in names]
        here = NodeAffinitySchedulingStrategy(places[0].key, soft=False)
        store = _remote(KeyValueStore).options(num_cpus=0, scheduling_strategy=here).remote()
        ends.callback(ray.kill, store)
        meet = MeetAt(store, spread=len({node.key for node in places}) > 1)
        return [self._actor(name, attempt, meet) for name in names]

    @property
    def _workers(self) -> list[ActorWorker]:
        return [p for worker in self._started for p in (worker.ranks if isinstance(worker, RankedWorker) else [worker])]

    def pause(self) -> None:
        """Wait as long as any other driver does, and take in what has become ready by then."""
        references = [reference for worker in self._workers for reference in worker.awaited]
        if not references:
            time.sleep(POLL)
        ready = ray.wait(references, num_returns=len(references), timeout=POLL)[0] if references else []
        for worker in self._workers:
            worker.look(set(ready))


def _own_failure(failed: Sequence[ActorWorker], more_to_learn: bool) -> ActorWorker | None:
    """Returns the rank whose actor died, else the one that raised; ranks that lost contact did so because of another.

    A rank may also raise because another has died, which Ray reports a moment later.
    """
    died = [worker for worker in failed if worker.code == DIED and not worker.lost_touch]
    if died or more_to_learn:
        return died[0] if died else None
    return min(failed, key=lambda worker: worker.lost_touch)


DIED = -1  # the exit code of a worker whose actor is gone
_ASK = 1.0  # seconds between two requests for how long a worker has been silent


@dataclass
class ActorWorker:
    """A worker as a Ray actor, seen from its driver."""

    placed: Placed
    run: RunDirectory
    exchange: Any
    deadline: float  # seconds that Ray may take to start it
    attempt: int = 0
    meet: MeetAt | None = None  # where a rank of the trainer finds the others
    code: int | None = field(init=False)
    how: str = field(init=False)
    lost_touch: bool = field(init=False)  # it ended because it could not reach another worker
    heard: bool = field(init=False)
    _actor: Any = field(init=False)
    _done: Any = field(init=False)
    _error: Json = field(init=False)
    _question: Any = field(init=False)  # the pending request for how long it has been silent
    _asked: float = field(init=False)
    _last: float = field(init=False)  # when it last gave a heartbeat, or was started
    _up: bool = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start it as a new actor: on its node, or on any node that has room if that one is gone."""
        self.code, self.how, self.heard, self._error, self._up = None, "", False, None, False
        self.lost_touch = False
        self._last = self._asked = time.monotonic()
        asked = self.placed.asked
        soft = self._searches or not self.placed.node.here
        place = NodeAffinitySchedulingStrategy(self.placed.node.key, soft=soft)
        # Ray would leave all GPUs visible to a worker that asks for none, including those that it has given to others.
        environment = share_of_gpu(asked["GPU"])
        self._actor = (
            _remote(concurrency_groups={"ask": 1})(PartActor)
            .options(
                num_cpus=asked["CPU"],
                num_gpus=asked["GPU"],
                scheduling_strategy=place,
                runtime_env={"env_vars": environment},
            )
            .remote()
        )
        facts = whole_facts(self.run)
        self._done = self._actor.go.remote(self.name, facts, self.attempt, self.exchange, self.meet)
        self._question = self._actor.silence.remote()

    def start_again(self) -> None:
        """Start the worker again after its death."""
        self.kill()
        self.attempt += 1
        self.start()

    @property
    def name(self) -> str:
        return self.placed.worker

    @property
    def _searches(self) -> bool:
        """Returns whether this is a searcher, which the run can do without."""
        return not self.name.startswith("trainer")

    @property
    def who(self) -> str:
        return f"{self.name} (on {self.placed.node.name})"

    @property
    def log(self) -> str:
        own = self.run.log(self.name)
        return str(own) if own.exists() else f"named in {self.run.path / 'logs' / PLACES}"

    @property
    def awaited(self) -> list[Any]:
        """Returns the Ray references to wait for: its end, its answer."""
        asked = [] if self._question is None else [self._question]
        return [self._done, *asked] if self.code is None else []

    def look(self, ready: set[Any]) -> None:
        """Take in what has become ready. Raises `DeadlineExceeded` when Ray does not start the actor."""
        if self.code is not None:
            return
        if self._done in ready:
            self._settle()
            return
        now = time.monotonic()
        if self._question is None and now - self._asked > _ASK:
            self._asked, self._question = now, self._actor.silence.remote()
        elif self._question is not None and self._question in ready:
            with suppress(ray.exceptions.RayError):  # that the actor is gone is seen by its end
                silence = get(self._question, self.deadline, f"an answer of {self.who}")
                self._up = True
                if silence is not None:
                    self.heard, self._last = True, now - silence
            self._question = None
        elif not self._up and now - self._last > self.deadline:
            self._not_started()

    def _not_started(self) -> None:
        """No node has room for the actor.

        If it has never been started, or is the trainer's, the run cannot continue.
        """
        asked = f"{self.placed.asked['CPU']:g} CPU and {self.placed.asked['GPU']:g} GPU"
        waited = f"waited {self.deadline:g} s for Ray to start {self.who} with {asked}"
        self.kill()
        if self.attempt and self._searches:  # its machine is gone, most likely
            self.code = 0
            self.exchange.journal.remote(self.name, "resume")  # the prompts it had leased are given back, for others
            record_fault(self.run.path, "searchers_given_up", f"{waited} again; the run continues without it")
        else:
            self.code, self.how = DIED, "was not started"
            raise DeadlineExceeded(f"{waited}: others may hold them")

    def _settle(self) -> None:
        """Find out how the worker ended."""
        try:
            self._error = get(self._done, self.deadline, f"the end of {self.who}")
            self.code = 0 if self._error is None else 1
        except ray.exceptions.RayError as error:
            self.lost_touch = isinstance(error, ray.exceptions.RayTaskError)  # the error that `go` raises
            said = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            self.code, self.how = DIED, f"died ({str(said).strip().splitlines()[0]})"
        ray.kill(self._actor)  # releases what the actor held

    def silence(self) -> float:
        """Returns the seconds since the worker's last heartbeat."""
        return time.monotonic() - self._last

    def ask_to_stop(self) -> None:
        if self.code is None and self.attempt and self._searches and not self._up:
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
        self.code, self.how = DIED, "was killed, for it was silent"

    def failure(self) -> Exception:
        """Returns why it ended, as the driver's own error."""
        if self._error is not None:
            return failed(self.who, self.log, self._error)
        return PartFailed(f"{self.who} {self.how}; its log is {self.log}")
