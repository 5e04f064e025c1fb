"""Reads what a process used and what it ran on.

Invariant: nothing here loads torch or starts a GPU; a figure that the system does not give is None, never a guess.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tba.types import Json

PACKAGES = ("torch", "transformers", "tba")
TRIM_SECONDS = 10.0  # at least, between two returns of memory: what is used again is allocated again, page by page


def peak_memory_bytes() -> int:
    """Returns the most resident memory this process ever had, in bytes."""
    peak_bytes = _read_status_bytes("VmHWM")
    if peak_bytes is not None:
        return peak_bytes
    import resource  # not on every system; Linux needs it not

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_memory_bytes() -> int | None:
    """Returns the resident memory of this process in bytes; None where the system does not say."""
    return _read_status_bytes("VmRSS")


def keep_few_kernels() -> None:
    """Limit the kernels that oneDNN keeps in this process; called before the first product of matrices.

    It keeps the last 1,024, up to a few megabytes each, one for every shape of a product. The shapes of a trainer's
    batches, and of the answers that a searcher scores, are others every time. A pass uses some 30 of them, in each of
    its layers.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # read at the first product


@dataclass
class FreedMemory:
    """Returns freed memory to the system, which the C library otherwise keeps in pieces between what is still used.

    Tensors of another size every step leave ever more of it: without giving it back a trainer of SmolLM2 grew to twice
    what it needs (docs/real_model.md).
    """

    _last_trim: float = 0.0

    def give_back(self) -> None:
        """Return freed memory to the system, at most every ten seconds; does nothing without glibc."""
        now = time.monotonic()
        if now - self._last_trim < TRIM_SECONDS or not sys.platform.startswith("linux"):
            return
        self._last_trim = now
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def peak_gpu_memory_bytes() -> int | None:
    """Returns the most GPU memory torch ever held in this process, over all its GPUs; None when it has used none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))


def usable_cores() -> int:
    """Returns how many processor cores this process may use, by affinity and by the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read_text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def machine_memory_bytes() -> int | None:
    """Returns the bytes of memory this process may use: the machine's, or its control group's if that is less."""
    try:
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = _read_text(Path("/sys/fs/cgroup/memory.max")).strip()
    return min(machine_bytes, int(limit)) if limit.isdigit() else machine_bytes


def machine(gpus: Sequence[str] = ()) -> dict[str, Json]:
    """Returns a description of this machine, without its name: system, processor, cores, memory, GPUs by name."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": machine_memory_bytes(),
        "gpus": list(gpus),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages a result depends on, by name."""
    versions_by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions_by_package[package] = metadata.version("tba-rl" if package == "tba" else package)
        except metadata.PackageNotFoundError:
            versions_by_package[package] = "not installed"
    return versions_by_package


def _cpu_name() -> str:
    for line in _read_text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _read_status_bytes(name: str) -> int | None:
    """Returns the bytes of a line of /proc/self/status, which has `kB`; None where there is none."""
    for line in _read_text(Path("/proc/self/status")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _read_text(path: Path) -> str:
    """Returns the text of a file of the system; empty where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
