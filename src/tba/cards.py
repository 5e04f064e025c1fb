"""The GPUs of this machine, and whether CUDA can be started on them, asked for without starting it in this process.

Invariant: a process that forks others never starts CUDA by asking here, since CUDA cannot be used in what is forked
after that. Even `torch.cuda.device_count` starts it where NVML is not there, and `is_available` always does. A child
is asked instead, once. A worker that was given GPUs of its own forks nothing that needs them, and asks by itself.

Where GPUs are there and CUDA cannot be started (a driver that is too old for this build of torch), they are hidden from
this process from then on: parts of torch count GPUs by NVML, and would fail on them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache

import torch

GIVEN = "TBA_GPU_SHARE"  # in a worker's environment: its share of the memory of its GPUs
VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEADLINE = 120.0  # seconds for a process that is started to ask
_POLL = 0.005  # seconds between two looks whether it has ended
_LONGEST = 1 << 16  # bytes of an answer; eight GPUs take 500
_ASKING = "from tba.cards import *; import sys; sys.stdout.write(asked())"


@dataclass(frozen=True)
class Cards:
    """The GPUs that this process sees and can compute on."""

    names: tuple[str, ...] = ()
    memory: tuple[int, ...] = ()  # bytes of each
    fault: str = ""  # why CUDA cannot be started though there are GPUs; there is none here then

    def __len__(self) -> int:
        return len(self.memory)


_fault = ""  # of the GPUs that are hidden from this process


def cards() -> Cards:
    """Returns the GPUs that this process sees. The first call takes as long as CUDA takes to start."""
    global _fault
    visible = os.environ.get(VISIBLE)
    if visible == "" or not (torch.backends.cuda.is_built() or torch.version.hip):
        return Cards(fault=_fault)
    found = _seen(visible)
    if found.fault:
        _fault, os.environ[VISIBLE] = found.fault, ""
    return found


@cache
def _seen(visible: str | None) -> Cards:
    if GIVEN in os.environ or torch.cuda.is_initialized() or not hasattr(os, "fork"):
        said = asked()
    else:
        said = _asked_elsewhere()
    found = json.loads(said)
    return Cards(tuple(found["names"]), tuple(found["memory"]), found["fault"])


def asked() -> str:
    """Returns this machine's GPUs as JSON. Starts CUDA where there are any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch warns of is the fault
        count = torch.cuda.device_count()
        try:
            own = [torch.cuda.get_device_properties(i) for i in range(count)]
        except (RuntimeError, AssertionError) as error:
            return json.dumps(asdict(Cards(fault=str(error).strip().split("\n")[0].partition(". ")[0])))
    return json.dumps({"names": [p.name for p in own], "memory": [p.total_memory for p in own], "fault": ""})


def _asked_elsewhere() -> str:
    """Returns what `asked` does without starting CUDA here; GPUs that do not answer in time have a fault."""
    try:
        return _asked_in_a_child() or _asked_in_an_interpreter()
    except (TimeoutError, subprocess.TimeoutExpired):
        return json.dumps(asdict(Cards(fault=f"it does not answer within {_DEADLINE:g} s")))


def _asked_in_a_child() -> str:
    """Returns what a child forked from this process says; nothing where it cannot ask, because CUDA was started before.

    Raises `TimeoutError`.
    """
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: they are a matrix library's
        child = os.fork()
    if child == 0:
        try:
            if not torch.cuda._is_in_bad_fork():
                os.write(writes, asked().encode())
        finally:
            os._exit(0)
    os.close(writes)
    answered, _, _ = select.select([reads], [], [], _DEADLINE)
    said = os.read(reads, _LONGEST) if answered else b""  # a pipe gives what was written at once as a whole
    os.close(reads)
    os.kill(child, signal.SIGKILL)  # it has nothing more to say
    _wait_for(lambda: os.waitpid(child, os.WNOHANG)[0])
    if not answered:
        raise TimeoutError
    return said.decode()


def _asked_in_an_interpreter() -> str:
    """Returns what a new interpreter says, or its last words as the fault. Raises `subprocess.TimeoutExpired`."""
    heard = subprocess.PIPE
    asked = subprocess.Popen(  # noqa: S603 - our own words
        [sys.executable, "-c", _ASKING], stdin=subprocess.DEVNULL, stdout=heard, stderr=heard, text=True
    )
    try:
        said, complaints = asked.communicate(timeout=_DEADLINE)
    except subprocess.TimeoutExpired:
        asked.kill()
        _wait_for(lambda: asked.poll() is not None)
        for end in (asked.stdout, asked.stderr):
            if end is not None:
                end.close()
        raise
    return said or json.dumps(asdict(Cards(fault=(complaints.strip().splitlines() or ["it cannot"])[-1])))


def _wait_for(ended: Callable[[], object]) -> None:
    """Wait until a process that was killed has ended; one that hangs in the driver stays."""
    limit = time.monotonic() + _DEADLINE
    while not ended() and time.monotonic() < limit:
        time.sleep(_POLL)
