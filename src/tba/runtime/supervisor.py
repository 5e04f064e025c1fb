"""The driver of a run: it starts its workers, restarts those that die, and ends them, wherever a worker runs.

Invariant: its loop consumes how workers end and their heartbeats, and waits for nothing else; a worker that dies is
restarted a bounded number of times in a window of time (the trainer resumes from its newest checkpoint, as another
incarnation), one that raises ends the run; every phase has a deadline that names what it waits for. A searcher whose
restarts are used up rests until the window allows another, as long as another searcher works.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol

from tba.errors import DeadlineExceeded, PartFailed, TbaError, UserError
from tba.json_input import read_json
from tba.recipe import Recipe
from tba.record.faults import count_faults, record_fault
from tba.record.metrics import read_last
from tba.record.text import duration
from tba.replay.journal import JournalWriter
from tba.runtime.elastic import JoinedSearchers
from tba.runtime.evaluation import EVALUATION_DEADLINE, evaluated_to_the_end
from tba.runtime.results import TrainerResult
from tba.runtime.run_directory import RunDirectory
from tba.runtime.sizing import searchers_of
from tba.runtime.stop_requests import StopRequest, stop_requests
from tba.training.checkpoint import newest_checkpoint
from tba.types import Json
from tba.weights.directory import WeightDirectory

POLL = 0.05  # seconds between two checks of the workers
STOP_DEADLINE = 60.0  # seconds, at least, that a worker has to stop: a searcher ends its round, the trainer its step
_STEPS_TO_STOP = 5  # the time of so many mean steps, where that is longer
LOST_NODES_PER_RESTART = 10  # --run.restarts of a searcher; more than spot machines, fewer than one that ends each node
_LOCK_SECONDS = 5.0  # that the driver waits for the journal's lock
GRACE_SECONDS = 30.0  # that Kubernetes leaves between SIGTERM and SIGKILL, unless told otherwise


class Worker(Protocol):
    """A searcher or the trainer, in whichever process or machine. It lives at most as long as its driver."""

    attempt: int  # how often it has been restarted

    @property
    def name(self) -> str: ...

    @property
    def code(self) -> int | None:
        """The exit code: None while it runs, 0 done or asked to stop, above 0 an error of its own, below 0 it died."""

    @property
    def waits_for_room(self) -> bool:
        """Returns whether it has no place to run yet: nobody need wait for it."""

    @property
    def has_lost_node(self) -> bool:
        """Returns whether it died with its machine, or the connection to that: no fault of its own."""

    @property
    def description(self) -> str:
        """Returns the worker's name and where it runs."""

    @property
    def log(self) -> str:
        """Returns the path of the worker's log."""

    @property
    def cause_of_death(self) -> str:
        """Returns the cause of the worker's death, in words."""

    @property
    def has_heartbeat(self) -> bool:
        """Returns whether it has given a heartbeat since its start: until then it loads libraries and a model."""

    def silence(self) -> float:
        """Returns the seconds since its last heartbeat, or since it was started."""

    def ask_to_stop(self) -> None: ...

    def kill(self) -> None:
        """End it, unless it has ended, and release what it held."""

    def end(self) -> None:
        """End it as a worker that hangs: afterwards it counts as one that died."""

    def start_again(self) -> None:
        """Start the worker again after its death."""

    def failure(self) -> Exception:
        """Returns why it ended, as the driver's own error."""


def worker_error(description: str, log: str, error: Json) -> Exception:
    """Returns the driver's error for what a worker raised: its `kind`, `message` and `traceback`."""
    if error["kind"] == "UserError":
        return UserError(error["message"])
    if error["kind"] == "DeadlineExceeded":
        return DeadlineExceeded(f"{description}: {error['message']}; its log is {log}")
    return PartFailed(f"{description} ended with {error['kind']}; its log is {log}\n{error['traceback']}")


@dataclass
class Driver(ABC):
    """One run: `go()` until it is finished, stopped or failed. A runtime says how a worker is started."""

    recipe: Recipe
    run: RunDirectory
    tell: Callable[[str, str], None]  # (phase, note), called a few times a second
    stopped: bool = False  # before its last step, or in its last evaluation
    exit_code: int = 0  # 128 and the signal that ended it before its last step
    joined: JoinedSearchers = field(init=False)
    now: Callable[[], float] = time.monotonic  # the clock of the window in which restarts are counted
    _note: str = ""
    _restart_times: dict[tuple[str, bool], deque[float]] = field(  # in the window; by name, and whether a node was lost
        default_factory=lambda: defaultdict(deque)
    )
    _resting_searchers: set[str] = field(default_factory=set)  # searchers whose restarts in the window are used up

    def __post_init__(self) -> None:
        self.joined = JoinedSearchers(self.run)

    @abstractmethod
    def start(self, name: str) -> Worker:
        """Start a worker of the run."""

    def prepare(self, closers: ExitStack, stop: StopRequest) -> None:
        """Start what the workers need beside them, and have it ended after them."""
        self.joined.open()

    def pause(self) -> None:
        """Wait between two checks of the workers."""
        time.sleep(POLL)

    def go(self) -> dict[str, object]:
        """Run to the end; returns the faults that it survived. Raises the error that a worker ended with."""
        with stop_requests() as stop, ExitStack() as closers:
            self.prepare(closers, stop)
            closers.callback(self.joined.dismiss, 0.0, lambda: None)
            trainer, *searchers = [self._start(name, closers) for name in ("trainer", *self.searchers)]
            try:
                self._train(trainer, searchers, stop)
            except TbaError:
                with suppress(DeadlineExceeded):
                    self._stop([trainer], "a checkpoint")  # an error that ends the run need not cost what was learnt
                raise
            if stop():
                self._end_searchers_early(searchers, stop)
            self._stop([trainer], "a checkpoint")
            if trainer.code != 0:
                raise trainer.failure()
            result: TrainerResult = read_json(self.run.result("trainer"), "resume the run (tba resume)", TrainerResult)
            is_finished = result.steps >= self.recipe.steps
            if is_finished and not stop():
                self._evaluate(searchers, stop)
            self._stop(searchers, "the last round")
            is_evaluated = evaluated_to_the_end(self.run.path, self.recipe.steps, result.awaited_evaluations)
            self.stopped = not is_finished or (stop() and not is_evaluated)
            self.exit_code = 0 if is_finished else stop.exit_code
            if not (self.stopped or is_evaluated):
                self._note_missing_evaluation()
            self._dismiss_joined()
            failed_while_stopping = [worker.name for worker in searchers if worker.code != 0]
        return {"stopped": self.stopped, "failed_while_stopping": failed_while_stopping}

    @property
    def searchers(self) -> list[str]:
        return searchers_of(self.recipe)

    @property
    def note(self) -> str:
        """Returns what people are told about the workers."""
        return self._note

    def release_leases(self, searcher: str) -> None:
        """Give back the prompts of a searcher that will not answer them for a while."""
        with suppress(DeadlineExceeded):  # somebody hangs with the lock: the driver continues, to end that process
            journal = self.run.journal(self.recipe)
            with JournalWriter(journal, searcher, _LOCK_SECONDS, create=False) as journal_writer:
                journal_writer.resume()

    def silence_limit(self, worker: Worker) -> tuple[float, str]:
        """Returns the seconds without a heartbeat after which a worker is killed, and the setting that gives them."""
        settings = self.recipe.run
        limit = settings.silence_deadline if worker.has_heartbeat else settings.first_sign_deadline
        return limit, "--run.silence-deadline"

    def _dismiss_joined(self) -> None:
        """Let the searchers that joined leave after their last round; record as a fault one that does not."""
        note = "waiting for those who joined"
        seconds = self._stop_deadline()
        late_names = self.joined.dismiss(seconds, lambda: self.tell("stopping", note))
        self.joined.release_leases_of_dead(self.run.journal(self.recipe))
        for name in late_names:
            record_fault(self.run.path, "joined_late", f"{name} had not left after {seconds:.0f} s")

    def _start(self, name: str, closers: ExitStack) -> Worker:
        worker = self.start(name)
        closers.callback(worker.kill)
        return worker

    def _train(self, trainer: Worker, searchers: Sequence[Worker], stop: Callable[[], bool]) -> None:
        """Watch until the trainer has ended, or a stop was requested. It has its own deadline for a batch."""
        while (trainer.code is None or self._restart_trainer(trainer, searchers)) and not stop():
            self._end_silent([trainer, *searchers])
            self._start_misled(searchers)
            self._watch(searchers)
            self.tell("training", self.note)
            self.pause()

    def _evaluate(self, searchers: Sequence[Worker], stop: Callable[[], bool]) -> None:
        """Watch until the searchers have seen that the trainer is done, and evaluated its last version."""
        deadline = time.monotonic() + EVALUATION_DEADLINE
        while (working := [w for w in searchers if w.code is None and not w.waits_for_room]) and not stop():
            self._end_silent(searchers)
            self._watch(searchers)
            self.tell("evaluating", self.note)
            if time.monotonic() > deadline:
                descriptions = ", ".join(worker.description for worker in working)
                raise DeadlineExceeded(
                    f"waited {EVALUATION_DEADLINE:g} s for the last evaluation by {descriptions}; "
                    f"look at {self.run.path / 'logs'}"
                )
            self.pause()

    def _note_missing_evaluation(self) -> None:
        """Record that the last evaluation is missing, where the searchers that were to make it are not there."""
        if count_faults(self.run.path)["searchers_waiting"]:
            sentence = f"the last version was not evaluated: tba eval {self.recipe.name} --checkpoint {self.run.path}"
            record_fault(self.run.path, "evaluations_missing", sentence)

    def _watch(self, searchers: Sequence[Worker]) -> None:
        """Check the searchers: one that raises ends the run; one that dies is restarted, or rests."""
        self.joined.release_leases_of_dead(self.run.journal(self.recipe))
        for worker in searchers:
            code = worker.code
            if code is None or code == 0 or self._restart(worker, "searcher_restarts"):
                continue
            if code > 0 or all(peer.code is not None or peer.waits_for_room for peer in searchers):
                raise worker.failure()
            self._begin_rest(worker)

    def _restart_trainer(self, trainer: Worker, searchers: Sequence[Worker]) -> bool:
        """Restart a trainer that was killed, and searchers that had ended because it seemed to be done."""
        if not self._restart(trainer, "trainer_restarts"):
            return False
        self._start_misled(searchers)
        return True

    def _start_misled(self, searchers: Sequence[Worker]) -> None:
        """Start searchers again that have ended because a trainer was done that has died since, as the newest manifest
        says until the trainer that was restarted publishes.
        """
        ended_searchers = [worker for worker in searchers if worker.code == 0]
        incarnation = self.run.incarnation
        if not ended_searchers or not incarnation:
            return
        weights = WeightDirectory(self.run.weights)
        newest = weights.newest()
        if newest is None or newest.incarnation < incarnation or not weights.manifest(newest).stop:
            for worker in ended_searchers:
                worker.start_again()

    def _restart(self, worker: Worker, kind: str) -> bool:
        """Restart a worker that was killed, unless that has been done as often in the window as allowed. The machines
        that a searcher loses have a larger limit of their own.
        """
        code, window = worker.code, self.recipe.cluster.restart_window  # an hour on one machine
        if code is None or code >= 0:
            return False
        restart_times, now = self._restart_times_of(worker), self.now()
        while restart_times and now - restart_times[0] >= window:
            restart_times.popleft()
        if len(restart_times) >= self._restart_limit(worker):
            return False
        restart_times.append(now)
        self._resting_searchers.discard(worker.name)
        reason = f"{worker.name} {worker.cause_of_death}"
        if worker.name == "trainer":
            self.run.begin_again(reason)
        self._note = f"{reason} and started again"
        record_fault(self.run.path, kind, self._note)
        worker.start_again()
        return True

    def _restart_times_of(self, worker: Worker) -> deque[float]:
        return self._restart_times[worker.name, _is_searcher_without_node(worker)]

    def _restart_limit(self, worker: Worker) -> int:
        return self.recipe.run.restarts * (LOST_NODES_PER_RESTART if _is_searcher_without_node(worker) else 1)

    def _begin_rest(self, worker: Worker) -> None:
        """Go on without a searcher that has died too often, until its window allows another restart."""
        if worker.name in self._resting_searchers:
            return
        self._resting_searchers.add(worker.name)
        window, restart_times = self.recipe.cluster.restart_window, self._restart_times_of(worker)
        if restart_times:
            self._note = (
                f"{worker.name} {worker.cause_of_death}, after {len(restart_times)} restarts within "
                f"{duration(window)} (--run.restarts): the run continues without it, and starts it again in "
                f"{duration(window - (self.now() - restart_times[0]))}"
            )
        else:
            self._note = (
                f"{worker.name} {worker.cause_of_death}: the run continues without it, since --run.restarts is 0"
            )
        record_fault(self.run.path, "searchers_waiting", self._note)
        self.release_leases(worker.name)

    def _end_silent(self, workers: Sequence[Worker]) -> None:
        """Kill a worker that hangs: like one that dies, it is restarted, a bounded number of times."""
        for worker in workers:
            limit, setting = self.silence_limit(worker)
            if worker.code is None and not worker.waits_for_room and worker.silence() > limit:
                sentence = f"{worker.description} gave no sign of life for {limit:g} s and was killed ({setting})"
                record_fault(self.run.path, "silences", sentence)
                worker.end()

    def _end_searchers_early(self, searchers: Sequence[Worker], stop: StopRequest) -> None:
        """Let the searchers end beside the trainer when a signal ends the run; say so if SIGKILL may come first."""
        for worker in searchers:
            worker.ask_to_stop()
        seconds = self.seconds_to_checkpoint()
        if stop.number == signal.SIGTERM and seconds is not None and seconds > GRACE_SECONDS / 2:
            self._note = (
                f"a checkpoint takes about {seconds:.0f} s, and Kubernetes sends SIGKILL {GRACE_SECONDS:.0f} s after "
                f"SIGTERM, `ray job stop` after 3 s: set terminationGracePeriodSeconds and RAY_JOB_STOP_WAIT_TIME_S to "
                f"{3 * seconds:.0f}, or a smaller --run.checkpoint-every"
            )

    def seconds_to_checkpoint(self) -> float | None:
        """Returns about how long the trainer takes for a step and a checkpoint like the last one; None before that."""
        try:
            checkpoint = newest_checkpoint(self.run.checkpoints)
        except UserError:  # it is damaged, or has just been replaced
            return None
        if checkpoint is None:
            return None
        files = sorted((f.stat().st_mtime, f.stat().st_size) for f in checkpoint.path.rglob("*") if f.is_file())
        later_bytes = sum(size for _, size in files[1:])  # how long the first file took is not known
        seconds = (files[-1][0] - files[0][0]) * (1 + files[0][1] / max(1, later_bytes))
        return self._step_seconds() + seconds

    def _stop(self, workers: Sequence[Worker], awaited_work: str) -> None:
        """Ask workers to stop, wait, and kill them at the deadline."""
        seconds = self._stop_deadline()
        deadline = time.monotonic() + seconds
        for worker in workers:
            worker.ask_to_stop()
        while any(worker.code is None for worker in workers) and time.monotonic() < deadline:
            self.tell("stopping", self._note or f"waiting for {awaited_work}")
            self.pause()
        for worker in workers:
            if worker.code is None:
                worker.kill()
                raise DeadlineExceeded(
                    f"{worker.description} did not finish {awaited_work} within {seconds:.0f} s and was killed "
                    f"(`tba resume {self.run.path}` continues the run); its log is {worker.log}"
                )

    def _stop_deadline(self) -> float:
        """Returns how many seconds a worker has to stop: a step of a large model can take minutes."""
        return max(STOP_DEADLINE, _STEPS_TO_STOP * self._step_seconds())

    def _step_seconds(self) -> float:
        """Returns the mean seconds of a step so far; 0 before the first."""
        row = read_last(self.run.path)
        return float(row["wall_seconds"]) / max(1, int(row["step"])) if row else 0.0


def _is_searcher_without_node(worker: Worker) -> bool:
    return worker.name != "trainer" and worker.has_lost_node
