"""The workers of a run as Ray actors: the code that runs in their processes.

Invariant: an actor does one thing in its life (`go`), and answers in a second thread whether it is alive and takes the
request to stop. What it raised is returned as plain values; if the actor is killed, Ray raises its own error. Every
wait for Ray has a deadline and names what it waits for.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from tba.errors import HandedOutLost, PartFailed, UserError
from tba.recipe import Recipe
from tba.record.faults import record_fault
from tba.record.log import log_to, set_up_log
from tba.runtime.cluster.client import ActorContact, get
from tba.runtime.cluster.gateway import Exchange, note_place
from tba.runtime.cluster.remote import Visitors, checkpoint_through, connect_via, reachable_directory
from tba.runtime.devices import extend_segments, limit_gpu_memory
from tba.runtime.disk import outside_cause
from tba.runtime.program import require_same_version
from tba.runtime.ranks.store import ActorStore
from tba.runtime.run_directory import RunDirectory
from tba.runtime.run_lock import hold_shared
from tba.training.ranks.messages import Rendezvous
from tba.types import Json, Version


def scratch() -> Path:
    """Returns the folder in which a worker that cannot reach the run's directory keeps its logs and the recipe, which
    it executes: nobody else can write into it.

    Raises `UserError` when another folder has its name.
    """
    path = Path(tempfile.gettempdir()) / f"tba-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(f"{path} belongs to another user, but recipes are run from there: remove it, or set TMPDIR")
    path.chmod(0o700)
    return path


def place_of(worker: str, log_file: Path) -> Json:
    """Returns where this process runs, and the files that it and Ray write about it."""
    return {
        "part": worker,
        "node": ray.util.get_node_ip_address(),
        "node_id": ray.get_runtime_context().get_node_id(),
        "process": os.getpid(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),  # that Ray makes visible to it; null: all
        "log": str(log_file),
        "ray_logs": os.readlink("/proc/self/fd/1"),  # Ray redirects its output to this file
    }


class ExchangeActor:
    """The gateway (`exchange` in logs) on the trainer's machine: a thread for journal and records, one for weights."""

    def __init__(self, path: str) -> None:
        self._run = RunDirectory.open(Path(path))
        self._lock_file = hold_shared(self._run.path)
        set_up_log(self._run.path, "exchange")
        recipe = self._run.recipe()
        self._exchange = Exchange(self._run, recipe, ray.put, ray.get_runtime_context().get_node_id())
        self._visitors = Visitors(self._run, recipe, self._exchange.close_journal)
        note_place(self._run, place_of("exchange", self._run.log("exchange")))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray warns of a function that its property calls itself
            is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        if is_restarted:
            record_fault(self._run.path, "exchange_restarts", "the gateway on the trainer's machine was restarted")

    @ray.method(concurrency_group="journal")
    def journal(self, owner: str, verb: str, *arguments: Any, **keywords: Any) -> Any:
        self._visitors.remove_silent()
        return self._exchange.journal(owner, verb, *arguments, **keywords)

    @ray.method(concurrency_group="journal")
    def record(self, verb: str, *arguments: Any, **keywords: Any) -> None:
        self._exchange.record(verb, *arguments, **keywords)

    @ray.method(concurrency_group="journal")
    def place(self, facts: Json) -> int:
        return self._exchange.place(facts)

    @ray.method(concurrency_group="journal")
    def ping(self) -> tuple[int, int]:
        """Returns its process and that process's niceness: the journal's thread answers."""
        return os.getpid(), os.nice(0)

    @ray.method(concurrency_group="journal")
    def join(self, version: str) -> tuple[int, Json]:
        return self._visitors.join(version)

    @ray.method(concurrency_group="journal")
    def stay(self, number: int) -> str | None:
        return self._visitors.stay(number)

    @ray.method(concurrency_group="journal")
    def leave(self, number: int, reason: str) -> None:
        self._visitors.leave(number, reason)

    @ray.method(concurrency_group="weights")
    def newest(self, version: Version | None) -> Any:
        return self._exchange.newest(version)

    @ray.method(concurrency_group="weights")
    def piece(self, version: Version, place: int, node: str) -> Any:
        return self._exchange.piece(version, place, node)

    @ray.method(concurrency_group="weights")
    def hand_on(self, version: Version, place: int, reference: Sequence[Any]) -> None:
        self._exchange.hand_on(version, place, reference)

    @ray.method(concurrency_group="weights")
    def checkpoint(self, name: str) -> Any:
        return self._exchange.checkpoint(name)

    @ray.method(concurrency_group="weights")
    def at(self, version: Version) -> Any:
        return self._exchange.at(version)

    def end(self) -> None:
        """Close the gateway, once the last searcher has ended."""
        self._exchange.close()


@dataclass
class StopFlag:
    """Says whether a stop was requested; every call also counts as a heartbeat."""

    event: threading.Event = field(default_factory=threading.Event)
    heartbeat_at: float | None = None  # the last heartbeat, by `time.monotonic`

    def __call__(self) -> bool:
        self.heartbeat_at = time.monotonic()
        return self.event.is_set()


@dataclass(frozen=True)
class MeetingPlace:
    """Gives the ranks of one life of the trainer a place to find each other."""

    store: Any  # the actor that holds their key-value store
    is_spread: bool  # whether they are on more than one machine

    def meeting(self, deadline: float) -> Rendezvous:
        """Returns the meeting point for the rank in this process."""

        def call(method: str, *arguments: Any) -> Any:
            reference = getattr(self.store, method).remote(*arguments)
            return get(reference, deadline, f"the store where the trainer's ranks meet ({method})")

        return Rendezvous(ActorStore(call, deadline), ray.util.get_node_ip_address() if self.is_spread else None)


class PartActor:
    """A searcher or a rank of the trainer. `go` returns None, or what it raised as `kind`, `message`, `traceback`."""

    def __init__(self) -> None:
        self._stop_flag = StopFlag()

    @ray.method(concurrency_group="ask")
    def stop(self) -> None:
        self._stop_flag.event.set()

    @ray.method(concurrency_group="ask")
    def silence(self) -> float | None:
        """Returns the seconds since its last heartbeat; None before the first."""
        return None if self._stop_flag.heartbeat_at is None else time.monotonic() - self._stop_flag.heartbeat_at

    def go(self, worker: str, facts: Json, attempt: int, exchange: Any, meet: MeetingPlace | None) -> Json:
        run = reachable_directory(facts, scratch)
        try:
            with log_to(run.path, worker) as log_file:
                if attempt == 0:  # a worker that is restarted may find newer files, which must not end the run
                    require_same_version(run.facts, f"{worker} on {ray.util.get_node_ip_address()}")
                recipe, place = run.recipe(), place_of(worker, log_file)
                extend_segments(recipe, worker)
                limit_gpu_memory()
                deadline = recipe.run.journal_deadline
                contact = ActorContact(exchange, worker, deadline)
                meeting = None if meet is None else meet.meeting(deadline)
                if worker == "trainer":
                    _train(recipe, run, place, self._stop_flag, meeting)
                elif meeting is not None:
                    _follow(run, contact, place, meeting)
                else:
                    _search(recipe, run, contact, place, attempt, self._stop_flag)
        except (ray.exceptions.RayError, PartFailed, HandedOutLost):
            raise  # it lost contact with its run, and is treated as dead
        except BaseException as error:  # noqa: BLE001 - the actor ends here; the driver shows the error as its own
            error = outside_cause(error, run.path) or error
            return {"kind": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        return None


def _train(
    recipe: Recipe, run: RunDirectory, place: Json, stop: Callable[[], bool], meeting: Rendezvous | None
) -> None:
    from tba.runtime.trainer_loop import run_trainer

    note_place(run, place)
    with hold_shared(run.path):
        run_trainer(recipe, run, stop, meeting)


def _follow(run: RunDirectory, contact: ActorContact, place: Json, meeting: Rendezvous) -> None:
    from tba.runtime.ranks.start import follow

    contact.call("place", place)
    rank = int(contact.worker.removeprefix("trainer-"))
    follow(run, rank, meeting, lambda path: checkpoint_through(contact, contact.worker, path, run.checkpoints))


def _search(
    recipe: Recipe, run: RunDirectory, contact: ActorContact, place: Json, attempt: int, stop: Callable[[], bool]
) -> None:
    from tba.runtime.searcher_loop import NICENESS, run_searcher, searcher_loop_at

    os.nice(NICENESS)
    index = int(contact.worker.removeprefix("searcher-"))
    run_searcher(
        recipe,
        lambda: searcher_loop_at(
            recipe, lambda: connect_via(contact, contact.worker, place), index, attempt, stop, background=True, run=run
        ),
        stop,
    )
