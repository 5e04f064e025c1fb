"""The driver of a run: it starts its workers, restarts those that die, and ends them, wherever a worker runs.

Invariant: its loop consumes how workers end and their heartbeats, and waits for nothing else; a worker that dies is
restarted a bounded number of times (the trainer resumes from its newest checkpoint, as another incarnation), one that
raises ends the run; every phase has a deadline that names what it waits for.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol

from tba.errors import DeadlineExceeded, PartFailed, TbaError, UserError
from tba.json_input import read_json
from tba.recipe import Recipe
from tba.record.faults import count_faults, record_fault
from tba.record.metrics import read_last
from tba.runtime.elastic import JoinedSearchers
from tba.runtime.evaluation import EVALUATION_DEADLINE, evaluated_to_the_end
from tba.runtime.results import TrainerResult
from tba.runtime.run_directory import RunDirectory
from tba.runtime.sizing import searchers_of
from tba.runtime.stop_requests import stop_requests
from tba.types import Json

POLL = 0.05  # seconds between two checks of the workers
STOP_DEADLINE = 60.0  # seconds, at least, that a worker has to stop: a searcher ends its round, the trainer its step
_STEPS_TO_STOP = 5  # the time of so many mean steps, where that is longer


class Worker(Protocol):
    """A searcher or the trainer, in whichever process or machine. It lives at most as long as its driver."""

    attempt: int  # how often it has been restarted

    @property
    def name(self) -> str: ...

    @property
    def code(self) -> int | None:
        """The exit code: None while it runs, 0 done or asked to stop, above 0 an error of its own, below 0 it died."""

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
    _note: str = ""

    def __post_init__(self) -> None:
        self.joined = JoinedSearchers(self.run)

    @abstractmethod
    def start(self, name: str) -> Worker:
        """Start a worker of the run."""

    def pause(self) -> None:
        """Wait between two checks of the workers."""
        time.sleep(POLL)

    def go(self) -> dict[str, object]:
        """Run to the end; returns the faults that it survived. Raises the error that a worker ended with."""
        self.joined.open()
        with stop_requests() as stop, ExitStack() as closers:
            closers.callback(self.joined.dismiss, 0.0, lambda: None)
            trainer, *searchers = [self._start(name, closers) for name in ("trainer", *self.searchers)]
            try:
                self._train(trainer, searchers, stop)
            except TbaError:
                with suppress(DeadlineExceeded):
                    self._stop([trainer], "a checkpoint")  # an error that ends the run need not cost what was learnt
                raise
            self._stop([trainer], "a checkpoint")
            if trainer.code != 0:
                raise trainer.failure()
            result: TrainerResult = read_json(self.run.result("trainer"), "resume the run (tba resume)", TrainerResult)
            is_finished = result.steps >= self.recipe.steps
            if is_finished and not stop():
                self._evaluate(searchers, stop)
            self._stop(searchers, "their last round")
            is_evaluated = evaluated_to_the_end(self.run.path, self.recipe.steps)
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
            self._watch(searchers)
            self.tell("training", self._note)
            self.pause()

    def _evaluate(self, searchers: Sequence[Worker], stop: Callable[[], bool]) -> None:
        """Watch until the searchers have seen that the trainer is done, and evaluated its last version."""
        deadline = time.monotonic() + EVALUATION_DEADLINE
        while any(worker.code is None for worker in searchers) and not stop():
            self._end_silent(searchers)
            self._watch(searchers)
            self.tell("evaluating", self._note)
            if time.monotonic() > deadline:
                waiting = ", ".join(worker.description for worker in searchers if worker.code is None)
                raise DeadlineExceeded(
                    f"waited {EVALUATION_DEADLINE:g} s for the last evaluation by {waiting}; "
                    f"look at {self.run.path / 'logs'}"
                )
            self.pause()

    def _note_missing_evaluation(self) -> None:
        """Record that the last evaluation is missing, where a searcher had begun it and was given up."""
        if count_faults(self.run.path)["searchers_given_up"]:
            sentence = f"the last version was not evaluated: tba eval {self.recipe.name} --checkpoint {self.run.path}"
            record_fault(self.run.path, "evaluations_missing", sentence)

    def _watch(self, searchers: Sequence[Worker]) -> None:
        """Check the searchers: one that raises ends the run; one that dies is restarted, a bounded number of times."""
        self.joined.release_leases_of_dead(self.run.journal(self.recipe))
        for worker in searchers:
            code = worker.code
            if code is None or code == 0:
                continue
            if not self._restart(worker, "searcher_restarts"):
                raise worker.failure()

    def _restart_trainer(self, trainer: Worker, searchers: Sequence[Worker]) -> bool:
        """Restart a trainer that was killed, and searchers that had ended because it seemed to be done."""
        if not self._restart(trainer, "trainer_restarts"):
            return False
        for worker in searchers:
            if worker.code == 0:
                worker.start_again()
        return True

    def _restart(self, worker: Worker, kind: str) -> bool:
        """Restart a worker that was killed, unless that has been done as often as allowed."""
        code = worker.code
        if code is None or code >= 0 or worker.attempt >= self.recipe.run.restarts:
            return False
        reason = f"{worker.name} {worker.cause_of_death}"
        if worker.name == "trainer":
            self.run.begin_again(reason)
        self._note = f"{reason} and started again"
        record_fault(self.run.path, kind, self._note)
        worker.start_again()
        return True

    def _end_silent(self, workers: Sequence[Worker]) -> None:
        """Kill a worker that hangs: like one that dies, it is restarted, a bounded number of times."""
        settings = self.recipe.run
        for worker in workers:
            limit = settings.silence_deadline if worker.has_heartbeat else settings.first_sign_deadline
            if worker.code is None and worker.silence() > limit:
                sentence = f"{worker.description} gave no sign of life for {limit:g} s and was killed"
                record_fault(self.run.path, "silences", sentence)
                worker.end()

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
                    f"{worker.description} had not finished {awaited_work} after {seconds:.0f} s and was killed; "
                    f"its log is {worker.log}"
                )

    def _stop_deadline(self) -> float:
        """Returns how many seconds a worker has to stop: a step of a large model can take minutes."""
        row = read_last(self.run.path)
        step_seconds = float(row["wall_seconds"]) / max(1, int(row["step"])) if row else 0.0
        return max(STOP_DEADLINE, _STEPS_TO_STOP * step_seconds)
