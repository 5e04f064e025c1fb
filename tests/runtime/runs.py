"""Runs of the enumerable toy: how tests make one, wait for what happens to it and look at what it left."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tba.runtime.local.forkserver
from tba.__main__ import main
from tba.recipe import Recipe
from tba.record.summary import Summary
from tba.runtime.inline import Inline
from tba.runtime.local.processes import Processes
from tba.runtime.reporting import summarise
from tba.runtime.run_directory import RunDirectory
from tba.settings import find, override
from tba.training.checkpoint import newest_checkpoint
from toy.policy import WEIGHT, TabularPolicy, TabularTask, distribution, ideal, total_variation

TOY = Path(__file__).parents[1] / "toy" / "recipe.py"
TASK = TabularTask()
SECONDS = 240.0  # that a busy machine may take for what takes a few


def made(path: Path, *overrides: str, source: Path = TOY, **changes: Any) -> tuple[Recipe, RunDirectory]:
    """A recipe and its run's directory. `changes` are of the recipe's fields, which no other process would see."""
    recipe = replace(override(find(str(source)), list(overrides), "tba train"), **changes)
    return recipe, RunDirectory.create(path, str(source), list(overrides), recipe)


def quiet(phase: str, note: str) -> None:
    """Where a run's progress goes."""


def inline(path: Path, *overrides: str, source: Path = TOY, **changes: Any) -> Summary:
    """A whole run in this process."""
    recipe, run = made(path, *overrides, source=source, **changes)
    return summarise(recipe, run, ["searcher-0"], Inline(recipe, run, quiet).go(), 0.0)


def inline_again(path: Path, *overrides: str, **changes: Any) -> Summary:
    """A run that was left, taken up again in this process. `changes` as they were."""
    run = RunDirectory.open(path)
    run.begin_again("resumed", overrides)
    recipe = replace(run.recipe(), **changes)
    return summarise(recipe, run, ["searcher-0"], Inline(recipe, run, quiet).go(), 0.0)


def forked(act: Callable[[], object]) -> int:
    """The process id of a copy of this process that does so and ends: 0, or 1 with its traceback in our output."""
    child = os.fork()
    if child:
        return child
    code = 1
    gc.freeze()  # what is shared stays shared
    try:
        act()
        code = 0
    except BaseException:  # noqa: BLE001 - it ends here
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """How a forked process ended: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def processes(path: Path, *overrides: str, source: Path = TOY) -> Summary:
    """A whole run, each part in its own process and this one its driver."""
    recipe, run = made(path, *overrides, source=source)
    driver = Processes(recipe, run, quiet)
    return summarise(recipe, run, driver.searchers, driver.go(), 0.0)


def train(path: Path, *arguments: str) -> Command:
    """`tba train` of the toy in a process of its own; the run is at `path`."""
    return command("train", str(TOY), "--runs", str(path.parent), "--run-name", path.name, *arguments)


_commands: list[Command] = []


@dataclass
class Command:
    """A command in a process of its own, the way `subprocess.Popen` has it."""

    pid: int
    out: int
    err: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended_pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended_pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def describe(self) -> str:
        """Its exit code and what it has complained of, with the stacks of its threads if it lives."""
        code = self.poll()
        if code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
            threading.Event().wait(0.5)
        return f"process {self.pid}, exit code {code}: {os.pread(self.err, 20_000, 0).decode(errors='replace')}"

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it has printed and what it has complained of, once it has ended."""
        until(lambda: self.poll() is not None, timeout, "the command to end")
        sizes = [(file, os.fstat(file).st_size) for file in (self.out, self.err)]
        out, err = (os.pread(file, size, 0).decode() if size else "" for file, size in sizes)
        return out, err


def command(*arguments: str, out: int | None = None, program: Callable[[Sequence[str]], int] = main) -> Command:
    """A command in a copy of this process: as `python -m tba`, but for the seconds that it takes to load the libraries.

    Where it prints to can be given as a descriptor.
    """
    out, err = os.memfd_create("out") if out is None else out, os.memfd_create("err")

    def act() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for place, file in ((1, out), (2, err)):
            os.dup2(file, place)
        sys.stdout, sys.stderr = (os.fdopen(place, "w", closefd=False) for place in (1, 2))
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # as `until` asks for
        tba.runtime.local.forkserver._forkserver = None  # it makes one of its own
        code = program(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    made_command = Command(forked(act), out, err)
    _commands.append(made_command)
    return made_command


def until(condition: Callable[[], Any], seconds: float, purpose: str) -> Any:
    """What `condition` gives once that is true; fails when it has not become so in time, and says what the commands
    that were started last have complained of, and where those that live are.
    """
    pause, limit = threading.Event(), time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > limit:
            pytest.fail(f"waited {seconds} s for {purpose}\n" + "\n".join(c.describe() for c in _commands[-3:]))
        pause.wait(0.02)
    return result


def children(pid: int) -> dict[str, int]:
    """Live parts by name (`trainer`, `searcher-0`) of the driver `pid`, whose forkserver has made them."""
    return {
        name.removeprefix("tba-"): part
        for forkserver in _forkservers(pid)
        for part, name in _forked(forkserver).items()
    }


def forkserver_of(pid: int) -> int:
    """The process that forks the parts of the driver `pid`."""
    (forkserver,) = _forkservers(pid)
    return forkserver


def _forkservers(pid: int) -> list[int]:
    return [process for process, name in _forked(pid).items() if name == "tba-forge"]


def _forked(pid: int) -> dict[int, str]:
    """The live children of a process, and what they call themselves."""
    names = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, fields = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:  # it has ended meanwhile
                continue
            state, parent = fields.split()[:2]
            if int(parent) == pid and state != "Z":
                names[int(entry.name)] = name
    return names


def alive(pid: int) -> bool:
    """Whether a process is there, and not only its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps_of(path: Path) -> int:
    """Optimizer steps recorded so far."""
    metrics = path / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def final_weights(path: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    checkpoint = newest_checkpoint(path / "checkpoints")
    assert checkpoint is not None
    return load_file(checkpoint.path / "model.safetensors")


def distance(path: Path, beta: float) -> float:
    """Total variation to the ideal policy of the newest checkpoint, the worst over training prompts."""
    policy = TabularPolicy(TASK)
    policy.load({WEIGHT: final_weights(path)[WEIGHT]})
    return float(total_variation(distribution(policy), ideal(TASK, beta))[: TASK.prompts].max())
