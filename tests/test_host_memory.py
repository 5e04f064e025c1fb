"""The memory that is free for a process: of its machine, and of every control group around it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tba.host_memory import free_host_bytes

MACHINE = {"proc/meminfo": "MemTotal: 3000 kB\nMemAvailable: 2000 kB\n"}
SLURM_JOB = "system.slice/slurmstepd.scope/job_7"


def group(folder: str, limit: object, use: int, inactive_file: int) -> dict[str, str]:
    stat = f"file 9\ninactive_file {inactive_file}\n"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{use}\n",
        f"{folder}/memory.stat": stat,
    }


def old_group(folder: str, limit: int, use: int, inactive_file: int) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{use}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive_file}\n",
    }


def free_bytes(root: Path, files: Mapping[str, str]) -> int | None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return free_host_bytes(root)


@pytest.mark.parametrize(
    ("groups", "expected_bytes"),
    [
        ({}, 2_048_000),
        (group("sys/fs/cgroup", 1000, 400, 100), 700),  # a container with a namespace of its own
        (group(f"sys/fs/cgroup/{SLURM_JOB}", 1000, 400, 0), 600),
        (group(f"sys/fs/cgroup/{SLURM_JOB}", "max", 400, 0) | group("sys/fs/cgroup/system.slice", 900, 700, 50), 250),
        (group(f"sys/fs/cgroup/{SLURM_JOB}", "max", 400, 0), 2_048_000),
        (group("sys/fs/cgroup/another", 1000, 400, 0), 2_048_000),
        (group(f"sys/fs/cgroup/{SLURM_JOB}", 1000, 1200, 100), 0),
        (old_group("sys/fs/cgroup/memory/slurm/job_7", 1000, 400, 30), 630),
        (old_group("sys/fs/cgroup/memory/slurm", 1000, 900, 0), 100),
        (old_group("sys/fs/cgroup/memory", 1000, 900, 20), 120),
    ],
)
def test_the_least_that_a_limit_leaves_is_free(groups: Mapping[str, str], expected_bytes: int, tmp_path: Path) -> None:
    own_groups = {"proc/self/cgroup": f"9:cpu:/else\n4:memory:/slurm/job_7\n0::/{SLURM_JOB}\n"}
    assert free_bytes(tmp_path, MACHINE | own_groups | groups) == expected_bytes


def test_a_system_that_does_not_say_it_has_no_figure(tmp_path: Path) -> None:
    assert free_bytes(tmp_path, group("sys/fs/cgroup", 1000, 400, 0)) is None
