"""The `processes` runtime, the default: the trainer and each searcher in a process of its own on this machine.

Trajectories go through the journal, weights through versioned safetensors files; nothing listens on a port except a
trainer's ranks, if there are several, on the loopback interface. The driver (this process) holds one end of a pipe to
each worker, and a worker ends when its driver is gone. How the driver supervises the workers is in `supervisor`;
`Process` is one worker in a process of its own, seen from its driver. With `--run.mps` the driver first starts a daemon
of MPS (`mps`) where the workers share a GPU.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from tba.errors import PartFailed
from tba.gpus import VISIBLE_DEVICES, visible_gpus
from tba.json_input import read_json
from tba.record.faults import record_fault
from tba.record.log import tail
from tba.record.run_warnings import WITHOUT_MPS
from tba.runtime.devices import Place, environment_of, places, visible_devices
from tba.runtime.disk import no_space
from tba.runtime.local.forkserver import Child, Program, start
from tba.runtime.local.heartbeat import SilenceWatch, heartbeat_file
from tba.runtime.local.mps import MpsDaemon, MpsUnavailable, end_left_daemons, mps_daemon
from tba.runtime.local.worker import NO_SPACE
from tba.runtime.ranks.start import STORE
from tba.runtime.ranks.worker import RankedWorker
from tba.runtime.run_directory import RunDirectory
from tba.runtime.stop_requests import StopRequest
from tba.runtime.supervisor import Driver, Worker, worker_error
from tba.training.ranks.messages import name_of_rank

_ENDED_BY_MPS = -1000  # in place of the exit code: no signal


class Processes(Driver):
    """One run on this machine: `go()` until it is finished, stopped or failed."""

    _mps: MpsDaemon | None = None  # which serves the GPU that trainer and searchers share

    def prepare(self, closers: ExitStack, stop: StopRequest) -> None:
        super().prepare(closers, stop)
        places_by_worker = self._places()
        gpus, searcher_gpus = places_by_worker["trainer"].gpus, [places_by_worker[name].gpus for name in self.searchers]
        if gpus:
            end_left_daemons()
        if not self.recipe.run.mps:
            return
        try:
            if not gpus or gpus not in searcher_gpus:
                raise MpsUnavailable("trainer and searchers share no GPU")
            name = environment_of(places_by_worker["trainer"], visible_devices())[VISIBLE_DEVICES]
            device = self.recipe.model.trainer_device.type
            self._mps = closers.enter_context(mps_daemon(name, self.run.path / "logs" / "mps", device, stop))
        except MpsUnavailable as error:
            if stop():
                return
            self._note = f"the run goes on without MPS (--run.mps): {error}"
            record_fault(self.run.path, WITHOUT_MPS, self._note)

    def _places(self) -> dict[str, Place]:
        return places(self.recipe, self.searchers, visible_gpus().memory)

    def start(self, name: str) -> Worker:
        """Start a worker as a child process; a trainer of several ranks as several processes."""
        if name == "trainer" and self.recipe.trainer.count > 1:
            return RankedWorker(self._ranks, _first_to_fail)
        return self._process(name)

    def _process(self, name: str, attempt: int = 0, environment: dict[str, str] | None = None) -> Process:
        components = {type(getattr(self.recipe, f.name)).__module__ for f in fields(self.recipe)}
        loads = tuple(sorted(module for module in components if module.startswith("tba.")))
        variables = environment_of(self._places()[name], visible_devices()) | (environment or {})  # its own GPUs
        mps_variables = {} if self._mps is None else self._mps.environment(name)
        return Process(name, self.run, self.recipe.run.threads, attempt, variables, loads, mps_variables)

    def _ranks(self, attempt: int, closers: ExitStack) -> list[Process]:
        """Start the ranks of one life of the trainer; they find each other through a file made for it."""
        folder = closers.enter_context(tempfile.TemporaryDirectory(prefix="tba-ranks-", ignore_cleanup_errors=True))
        names = [name_of_rank(rank) for rank in range(self.recipe.trainer.count)]
        for name in names:  # remove what an earlier life left
            self.run.error(name).unlink(missing_ok=True)
        return [self._process(name, attempt, {STORE: str(Path(folder) / "store")}) for name in names]


def _first_to_fail(failed_workers: Sequence[Process], may_learn_more: bool) -> Process:
    """Returns a rank that died; if none did, the first one that left an error."""
    return min(failed_workers, key=lambda worker: ((worker.code or 0) >= 0, _error_time(worker)))


def _error_time(worker: Process) -> float:
    """Returns when the worker left its error; infinity if it left none."""
    try:
        return worker.run.error(worker.name).stat().st_mtime
    except OSError:
        return float("inf")


@dataclass
class Process:
    """A worker as a child process. It lives at most as long as its driver."""

    name: str
    run: RunDirectory
    threads: int
    attempt: int = 0
    environment: dict[str, str] = field(default_factory=dict)  # besides the driver's own
    loads: tuple[str, ...] = ()  # modules that its recipe imports
    mps: Mapping[str, str] = field(default_factory=dict)  # by which it is a client of MPS, until it dies
    process: Child = field(init=False)
    watch: SilenceWatch = field(init=False)
    waits_for_room = has_lost_node = False  # its machine is there

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        variables = {"TBA_ATTEMPT": str(self.attempt), "OMP_NUM_THREADS": str(self.threads)}
        environment = {**os.environ, **variables, **self.environment, **self.mps}
        # the worker holds the run's lock for as long as it can write
        lock_descriptors = () if self.run.lock is None else (self.run.lock,)
        self.watch = SilenceWatch(heartbeat_file(self.run.path, self.name))
        with self.run.log(self.name).open("ab") as log:
            arguments = (self.name, str(self.run.path))
            program = Program(self.name, "tba.runtime.local.worker", arguments, self.loads, str(self.run.base))
            self.process = start(program, environment, log.fileno(), lock_descriptors)

    def start_again(self) -> None:
        """Start the process again after its death; without MPS, since the death of a client can harm the others."""
        self.kill()
        self.attempt += 1
        if self.mps:
            record_fault(self.run.path, WITHOUT_MPS, f"{self.name} goes on without MPS")
        self.mps = {}
        self.run.error(self.name).unlink(missing_ok=True)  # what an earlier life left
        self.start()

    @property
    def code(self) -> int | None:
        """Returns the exit code, None while the process runs; negative: killed by that signal, or by MPS."""
        code = self.process.poll()
        return _ENDED_BY_MPS if code == 1 and self.mps and self._has_cuda_error() else code

    def _has_cuda_error(self) -> bool:
        """Returns whether the process ended with an error of CUDA, such as clients of MPS have after another's fault,
        or when the daemon is gone.
        """
        file = self.run.error(self.name)
        if not file.exists():
            return False
        error = read_json(file, f"its log is {self.log}", kind=str, message=str)
        return error["kind"] not in ("UserError", "OutOfMemoryError") and "CUDA" in error["message"]

    @property
    def description(self) -> str:
        return f"{self.name} (process {self.process.pid})"

    @property
    def log(self) -> str:
        return str(self.run.log(self.name))

    @property
    def cause_of_death(self) -> str:
        code = self.code
        return "had a CUDA error under MPS" if code == _ENDED_BY_MPS else f"was killed by signal {-(code or 0)}"

    @property
    def has_heartbeat(self) -> bool:
        return self.watch.has_heartbeat

    def silence(self) -> float:
        """Returns the seconds since the process's last heartbeat."""
        return self.watch.silence()

    def ask_to_stop(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended in the meantime
            self.process.stdin.write(b"stop")
            self.process.stdin.flush()

    def end(self) -> None:
        """End the process as a worker that hangs."""
        self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        """End the process, unless it has ended, and close its input."""
        self.end()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def failure(self) -> Exception:
        """Returns why the process ended, as the driver's own error."""
        file = self.run.error(self.name)
        if file.exists():
            error = read_json(file, f"its log is {self.log}", kind=str, message=str, traceback=str)
            return worker_error(self.description, self.log, error)
        code = self.code or 0
        if code == NO_SPACE:
            return no_space(self.run.path)
        cause = self.cause_of_death if code < 0 else f"ended with exit code {code}"
        return PartFailed(f"{self.description} {cause}; its log is {self.log}\n{tail(self.run.log(self.name), 15)}")
