"""Finds the live parts of a run by the names of their processes."""

from __future__ import annotations

from pathlib import Path


def parts_of(pid: int) -> dict[str, int]:
    """Live parts of the driver `pid`, by name: what its forkserver has made."""
    return {
        name.removeprefix("tba-"): process
        for forkserver, called in forked(pid).items()
        if called == "tba-forge"
        for process, name in forked(forkserver).items()
    }


def forked(pid: int) -> dict[int, str]:
    """The children of a process, and what they call themselves."""
    processes = {}
    for entry in Path("/proc").iterdir():
        try:
            name, _, fields = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            if int(fields.split()[1]) == pid:
                processes[int(entry.name)] = name
        except (OSError, ValueError, IndexError):
            continue
    return processes
