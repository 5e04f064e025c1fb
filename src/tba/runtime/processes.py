"""The `processes` runtime: the trainer and each searcher in its own process on this machine. The embedded default.

Down through the journal, up through versioned safetensors; nothing listens on a port. The driver (this process) starts
the parts, starts one that dies again (bounded; the trainer goes on from its newest checkpoint, as another incarnation),
and ends them. Its loop consumes exit codes and signs of life and waits for nothing else; every phase of it has a
deadline that names what it waits for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import IO

from tba.errors import DeadlineExceeded, PartFailed, TbaError, UserError
from tba.recipe import Recipe
from tba.record.faults import record_fault
from tba.record.log import tail
from tba.runtime.directory import RunDirectory
from tba.runtime.disk import no_space
from tba.runtime.joining import Joined
from tba.runtime.part import NO_SPACE
from tba.runtime.pulse import Watch, pulse_of
from tba.runtime.stopping import stop_requests

_POLL = 0.05  # seconds between two looks at the parts


@dataclass
class Part:
    """A child process. It lives as long as it wants to and at most as long as its driver."""

    name: str
    run: RunDirectory
    threads: int
    attempt: int = 0
    process: subprocess.Popen[bytes] = field(init=False)
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "TBA_ATTEMPT": str(self.attempt), "OMP_NUM_THREADS": str(self.threads)}
        log: IO[bytes]
        self.watch = Watch(pulse_of(self.run.path, self.name))
        with self.run.log(self.name).open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 - our own module, our own arguments
                [sys.executable, "-m", "tba.runtime.part", self.name, str(self.run.path)],
                stdin=subprocess.PIPE,  # its end of file tells the part that we are gone
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=() if self.run.lock is None else (self.run.lock,),  # held as long as anybody writes
                start_new_session=True,  # Ctrl-C reaches the driver only, which ends the parts in order
            )

    def start_again(self) -> None:
        """After its death."""
        self.kill()
        self.attempt += 1
        self.start()

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs; negative: killed by that signal."""
        return self.process.poll()

    def ask_to_stop(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended meanwhile
            self.process.stdin.write(b"stop")
            self.process.stdin.flush()

    def kill(self) -> None:
        """End it, unless it has ended, and let go of it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def failure(self) -> Exception:
        """Why it ended, as the driver's own error."""
        file, log = self.run.error(self.name), self.run.log(self.name)
        who = f"{self.name} (process {self.process.pid})"
        if file.exists():
            error = json.loads(file.read_text())
            if error["kind"] == "UserError":
                return UserError(error["message"])
            if error["kind"] == "DeadlineExceeded":
                return DeadlineExceeded(f"{who}: {error['message']}; its log is {log}")
            return PartFailed(f"{who} ended with {error['kind']}; its log is {log}\n{error['traceback']}")
        code = self.code or 0
        if code == NO_SPACE:
            return no_space(self.run.path)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return PartFailed(f"{who} {how}; its log is {log}\n{tail(log, 15)}")


@dataclass
class Processes:
    """One run: `go()` until it is finished, stopped or failed."""

    recipe: Recipe
    run: RunDirectory
    tell: Callable[[str, str], None]  # (phase, note), a few times a second
    stopped: bool = False
    joined: Joined = field(init=False)
    _note: str = ""

    def __post_init__(self) -> None:
        self.joined = Joined(self.run)

    def go(self) -> dict[str, object]:
        """Runs to the end; the faults it survived. Raises what a part ended with."""
        self.joined.open()
        with stop_requests() as stop, ExitStack() as ends:
            ends.callback(self.joined.dismiss, 0.0, lambda: None)
            trainer, *searchers = [self._start(name, ends) for name in ("trainer", *self.searchers)]
            try:
                self._train(trainer, searchers, stop)
            except TbaError:
                with suppress(DeadlineExceeded):
                    self._stop([trainer], "a checkpoint")  # what ends the run need not cost what was learnt
                raise
            self._stop([trainer], "a checkpoint")
            if trainer.code != 0:
                raise trainer.failure()
            steps = json.loads(self.run.result("trainer").read_text())["steps"]
            self.stopped = stop() or steps < self.recipe.steps
            if not self.stopped:
                self._evaluate(searchers, stop)
            self._stop(searchers, "their last round")
            self._see_off()
            failed = [part.name for part in searchers if part.code != 0]
        return {"stopped": self.stopped, "failed_while_stopping": failed}

    @property
    def searchers(self) -> list[str]:
        return [f"searcher-{i}" for i in range(1 if self.recipe.offline else self.recipe.searchers)]

    def _see_off(self) -> None:
        """Those who joined, with their last round; one that does not leave is left behind."""
        waiting = "waiting for those who joined"
        late = self.joined.dismiss(self.recipe.run.stop_deadline, lambda: self.tell("stopping", waiting))
        self.joined.look(self.run.journal(self.recipe))
        for name in late:
            record_fault(self.run.path, "joined_late", f"{name} had not left after {self.recipe.run.stop_deadline:g} s")

    def _start(self, name: str, ends: ExitStack) -> Part:
        part = Part(name, self.run, self.recipe.run.threads)
        ends.callback(part.kill)
        return part

    def _train(self, trainer: Part, searchers: list[Part], stop: Callable[[], bool]) -> None:
        """Until the trainer has ended, or we are to stop. It has its own deadline for a batch."""
        while (trainer.code is None or self._goes_on(trainer, searchers)) and not stop():
            self._end_silent([trainer, *searchers])
            self._watch(searchers)
            self.tell("training", self._note)
            time.sleep(_POLL)

    def _evaluate(self, searchers: list[Part], stop: Callable[[], bool]) -> None:
        """Until the searchers have seen that the trainer is done, and evaluated its last version."""
        deadline = time.monotonic() + self.recipe.run.evaluation_deadline
        while any(part.code is None for part in searchers) and not stop():
            self._end_silent(searchers)
            self._watch(searchers)
            self.tell("evaluating", self._note)
            if time.monotonic() > deadline:
                waiting = ", ".join(f"{p.name} (process {p.process.pid})" for p in searchers if p.code is None)
                raise DeadlineExceeded(
                    f"waited {self.recipe.run.evaluation_deadline:g} s for the last evaluation by {waiting}; "
                    f"look at {self.run.path / 'logs'}"
                )
            time.sleep(_POLL)

    def _watch(self, searchers: list[Part]) -> None:
        """A searcher that raises ends the run; one that dies is started again, a bounded number of times."""
        self.joined.look(self.run.journal(self.recipe))
        for part in searchers:
            code = part.code
            if code is None or code == 0:
                continue
            if not self._revived(part, "searcher_restarts"):
                raise part.failure()

    def _goes_on(self, trainer: Part, searchers: list[Part]) -> bool:
        """Start a trainer that was killed again, and searchers that had ended because it seemed to be done."""
        if not self._revived(trainer, "trainer_restarts"):
            return False
        for part in searchers:
            if part.code == 0:
                part.start_again()
        return True

    def _revived(self, part: Part, kind: str) -> bool:
        """Start a part that was killed again, unless that has been done as often as it may."""
        code = part.code
        if code is None or code >= 0 or part.attempt >= self.recipe.run.restarts:
            return False
        why = f"{part.name} was killed by signal {-code}"
        if part.name == "trainer":
            self.run.begin_again(why)
        self._note = f"{why} and started again"
        record_fault(self.run.path, kind, self._note)
        part.start_again()
        return True

    def _end_silent(self, parts: list[Part]) -> None:
        """A part that hangs is killed: as one that dies, it is started again, a bounded number of times."""
        settings = self.recipe.run
        for part in parts:
            limit = settings.silence_deadline if part.watch.heard else settings.first_sign_deadline
            if part.code is None and part.watch.silence() > limit:
                what = f"{part.name} (process {part.process.pid}) gave no sign of life for {limit:g} s and was killed"
                record_fault(self.run.path, "silences", what)
                part.process.kill()
                part.process.wait()

    def _stop(self, parts: list[Part], what: str) -> None:
        """Ask, wait, and at the deadline kill."""
        deadline = time.monotonic() + self.recipe.run.stop_deadline
        for part in parts:
            part.ask_to_stop()
        while any(part.code is None for part in parts) and time.monotonic() < deadline:
            self.tell("stopping", self._note or f"waiting for {what}")
            time.sleep(_POLL)
        for part in parts:
            if part.code is None:
                part.kill()
                raise DeadlineExceeded(
                    f"{part.name} (process {part.process.pid}) had not finished {what} after "
                    f"{self.recipe.run.stop_deadline:g} s and was killed; its log is {self.run.log(part.name)}"
                )
