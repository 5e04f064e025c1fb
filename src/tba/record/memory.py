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
GIVE_BACK = (
    10.0  # seconds at least between two givings back: what is used again has to be asked for again, page by page
)


def peak_memory_bytes() -> int:
    """Returns the most resident memory this process ever had, in bytes."""
    found = _status_bytes("VmHWM")
    if found is not None:
        return found
    import resource  # not on every system; Linux needs it not

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_memory_bytes() -> int | None:
    """Resident memory of this process now, in bytes; None where the system does not say."""
    return _status_bytes("VmRSS")


def keep_few_kernels() -> None:
    """Set how many kernels oneDNN keeps in this process, which multiplies no matrices before.

    It keeps the last 1,024, up to a few megabytes each, one for every shape of a product. The shapes of a trainer's
    batches, and of the answers that a searcher scores, are others every time. A pass uses some 30 of them, in each of
    its layers.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # read at the first product


@dataclass
class FreedMemory:
    """Memory that was freed, and that the C library keeps in pieces between what is still used.

    Tensors of another size every step leave ever more of it: without giving it back a trainer of SmolLM2 grew to twice
    what it needs (docs/real_model.md).
    """

    _last: float = 0.0

    def give_back(self) -> None:
        """Return it to the system, now and then; does nothing where the C library is not glibc."""
        now = time.monotonic()
        if now - self._last < GIVE_BACK or not sys.platform.startswith("linux"):
            return
        self._last = now
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
    """Processor cores this process may use: by affinity and by the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def machine_memory_bytes() -> int | None:
    """Memory this process may use: of the machine, or of its control group if that is less."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = _text(Path("/sys/fs/cgroup/memory.max")).strip()
    return min(whole, int(limit)) if limit.isdigit() else whole


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
    """Versions of Python and of the packages a result depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version("tba-rl" if package == "tba" else package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _cpu_name() -> str:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _status_bytes(name: str) -> int | None:
    """Returns a `kB` line of /proc/self/status, in bytes."""
    for line in _text(Path("/proc/self/status")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _text(path: Path) -> str:
    """Returns what a file of the system says; empty where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
