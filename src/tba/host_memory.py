"""How much of the host's memory is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# by version 2 and 1 of control groups: where they are, and the names of a group's limit of memory, of what it uses, and
# of the files among that which the system drops when memory is short
_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes of memory that the machine, or a control group that this process is in, has left; None where
    the system does not say.
    """
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    machine_bytes = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min([*machine_bytes, *_free_group_bytes(root)], default=None)


def _free_group_bytes(root: Path) -> Iterator[int]:
    """Yields what each limit of this process's control group, and of those around it, leaves."""
    paths = {"", *_group_paths(root)}  # the first: a container may see its own group there, under another name
    for base, limit_name, use_name, file_name in _GROUPS:
        folders = {folder for path in paths for folder in ((root / base / path), *(root / base / path).parents)}
        for folder in folders:
            if folder.is_relative_to(root / base):
                with suppress(OSError, ValueError, KeyError):  # no such group, or one without a limit
                    limit, use = (int((folder / name).read_text()) for name in (limit_name, use_name))
                    counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    yield max(0, limit - use + int(counts[file_name]))


def _group_paths(root: Path) -> Iterator[str]:
    """Yields the paths of this process's control groups that may limit memory."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                yield path.lstrip("/")
