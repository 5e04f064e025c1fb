"""How much of the host's memory is free."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def free_host_bytes() -> int | None:
    """Returns the bytes of memory that the machine, or this process's control group, has left; None where the system
    does not say.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    machine_bytes = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    group_bytes = None
    with suppress(OSError, ValueError):  # no control group, or one without a limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        group_bytes = max(0, limit - used)
    return min((size for size in (machine_bytes, group_bytes) if size is not None), default=None)
