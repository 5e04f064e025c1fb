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

GPU_SHARE = "TBA_GPU_SHARE"  # environment variable: a worker's share of the memory of its GPUs
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_DEADLINE = 120.0  # seconds that a child may take
_BFLOAT16_CAPABILITY = 8  # the first number of CUDA's compute capability from which on tensor cores have bfloat16
_POLL = 0.005  # seconds between two checks whether the process has ended
_MAX_REPLY = 1 << 16  # bytes of an answer; eight GPUs take 500
_QUERY_SCRIPT = "from tba.gpus import *; import sys; sys.stdout.write(gpus_as_json())"


@dataclass(frozen=True)
class Gpus:
    """Holds the GPUs that this process sees and can compute on."""

    names: tuple[str, ...] = ()
    memory: tuple[int, ...] = ()  # bytes of each
    without_bfloat16: tuple[str, ...] = ()  # names of those that do not compute in it: made before 2020, such as T4
    fault: str = ""  # why CUDA cannot be started though there are GPUs; there is none here then

    def __len__(self) -> int:
        return len(self.memory)


_hidden_fault = ""  # of the GPUs that are hidden from this process


def visible_gpus() -> Gpus:
    """Returns the GPUs that this process sees. The first call takes as long as CUDA takes to start."""
    global _hidden_fault
    visible_devices = os.environ.get(VISIBLE_DEVICES)
    if visible_devices == "" or not (torch.backends.cuda.is_built() or torch.version.hip):
        return Gpus(fault=_hidden_fault)
    gpus = _query(visible_devices)
    if gpus.fault:
        _hidden_fault, os.environ[VISIBLE_DEVICES] = gpus.fault, ""
    return gpus


def smallest_gpu_bytes() -> int:
    """Returns the bytes of this machine's smallest GPU, also of those hidden from this process; 0 where CUDA sees none.
    For a process that ends then: it sees all GPUs from then on.
    """
    os.environ.pop(VISIBLE_DEVICES, None)
    return min(visible_gpus().memory, default=0)


@cache
def _query(visible_devices: str | None) -> Gpus:
    if GPU_SHARE in os.environ or torch.cuda.is_initialized() or not hasattr(os, "fork"):
        reply = gpus_as_json()
    else:
        reply = _query_in_child()
    values = json.loads(reply)
    return Gpus(tuple(values["names"]), tuple(values["memory"]), tuple(values["without_bfloat16"]), values["fault"])


def free_gpu_bytes(device: torch.device) -> int | None:
    """Returns the bytes of a GPU's memory that this process may still take, with those that torch keeps for later; None
    for another device.
    """
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved_bytes, allocated_bytes = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    share_bytes = int(torch.cuda.get_per_process_memory_fraction(device) * total_bytes)
    return min(free_bytes + reserved_bytes, share_bytes) - allocated_bytes


def gpus_as_json() -> str:
    """Returns the GPUs that torch sees as JSON. Starts CUDA where there are any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning becomes the fault
        count = torch.cuda.device_count()
        try:
            gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
        except (RuntimeError, AssertionError) as error:
            return json.dumps(asdict(Gpus(fault=str(error).strip().split("\n")[0].partition(". ")[0])))
    old_names = [] if torch.version.hip else [p.name for p in gpus if p.major < _BFLOAT16_CAPABILITY]
    return json.dumps(asdict(Gpus(tuple(p.name for p in gpus), tuple(p.total_memory for p in gpus), tuple(old_names))))


def _query_in_child() -> str:
    """Returns the GPUs as JSON without starting CUDA in this process; GPUs that do not answer in time have a fault."""
    try:
        return _query_in_fork() or _query_in_interpreter()
    except (TimeoutError, subprocess.TimeoutExpired):
        return json.dumps(asdict(Gpus(fault=f"it does not answer within {_DEADLINE:g} s")))


def _query_in_fork() -> str:
    """Returns the GPUs as a forked child sees them; an empty text where it cannot, because CUDA was started before the
    fork. Raises `TimeoutError`.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: they are a matrix library's
        child = os.fork()
    if child == 0:
        try:
            if not torch.cuda._is_in_bad_fork():
                os.write(write_end, gpus_as_json().encode())
        finally:
            os._exit(0)
    os.close(write_end)
    ready_ends, _, _ = select.select([read_end], [], [], _DEADLINE)
    reply = os.read(read_end, _MAX_REPLY) if ready_ends else b""  # a pipe gives what was written at once as a whole
    os.close(read_end)
    os.kill(child, signal.SIGKILL)  # it has written its answer, or never will
    _wait_for(lambda: os.waitpid(child, os.WNOHANG)[0])
    if not ready_ends:
        raise TimeoutError
    return reply.decode()


def _query_in_interpreter() -> str:
    """Returns the GPUs as a new interpreter sees them, or the last line of its errors as the fault. Raises
    `subprocess.TimeoutExpired`.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(  # noqa: S603 - our own words
        [sys.executable, "-c", _QUERY_SCRIPT], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )
    try:
        reply, errors = process.communicate(timeout=_DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        _wait_for(lambda: process.poll() is not None)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        raise
    return reply or json.dumps(asdict(Gpus(fault=(errors.strip().splitlines() or ["it cannot"])[-1])))


def _wait_for(has_ended: Callable[[], object]) -> None:
    """Waits until a killed process has ended, up to a deadline, because one that hangs in the driver never does."""
    limit = time.monotonic() + _DEADLINE
    while not has_ended() and time.monotonic() < limit:
        time.sleep(_POLL)
