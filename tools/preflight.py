"""Before anything is installed: what will happen, and what this machine lacks. Runs on any Python 3, by itself."""

import argparse
import ctypes
import importlib.util
import os
import platform
import shutil
import sys
from typing import List, Optional, Tuple

DEFAULT_CUDA = (13, 0)  # of torch's build on the package index, for the version in constraints.txt
OLDER = {12: "cu126"}  # builds of it for drivers of an older CUDA release
NEEDED_GB = {"cpu": 2.0, "default": 2.0 if platform.system() == "Darwin" else 8.0}


def main() -> None:
    """Print the plan; exit with 2 and one sentence when it cannot work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", default="default")
    parser.add_argument("--venv", default=".venv")
    arguments = parser.parse_args()
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        fail(
            "this is Python %d.%d, and 3.11 to 3.13 is wanted: run `make ... PYTHON=python3.12`" % sys.version_info[:2]
        )
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            fail(
                "this Python has no %s module: install it (Debian: `apt install python3-venv`) or choose another with "
                "PYTHON=..." % module
            )
    build_has_gpu = arguments.torch not in ("cpu",)
    needed = NEEDED_GB.get(arguments.torch, 8.0)
    free = shutil.disk_usage(".").free / 1e9
    small = 2.0  # what the CPU build needs: less than that is hopeless
    if free < small or (free < needed and arguments.torch != "default"):
        fail("%.1f GB are free on this disk, and %.0f GB are needed: make room, or try TORCH=cpu" % (free, needed))
    print(
        "This sets up %s once (Python %s, %d cores):" % (arguments.venv, platform.python_version(), os.cpu_count() or 1)
    )
    print("  downloads  torch, transformers and what they need: about 0.4 GB with the CPU build of torch,")
    if build_has_gpu and platform.system() == "Linux":
        print("             about 3.5 GB with the CUDA build, which pip takes on Linux unless you say TORCH=cpu")
    print("  disk       1.5 GB (CPU build) to 8 GB (CUDA build); %.0f GB are free" % free)
    if build_has_gpu and platform.system() == "Linux":
        for i, line in enumerate(driver_lines(driver_cuda(), wheel_cuda(arguments.torch))):
            print(("             " if i else "  driver     ") + line)
    print(
        "  minutes    1 to 3 to install; then a few for the job itself. Nothing is downloaded while it runs.",
        flush=True,
    )


def wheel_cuda(torch: str) -> Optional[Tuple[int, int]]:
    """Return the CUDA release of the build that TORCH names, as (major, minor); None for one that has none."""
    if torch == "default":
        return DEFAULT_CUDA
    digits = torch[2:] if torch.startswith("cu") else ""
    return (int(digits[:-1]), int(digits[-1])) if digits.isdigit() and len(digits) > 1 else None


def driver_cuda() -> Optional[Tuple[int, int]]:
    """Return the newest CUDA release that the driver of this machine's GPUs runs; None where it has no driver."""
    try:
        nvml, version = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_int()
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10)


def driver_lines(driver: Optional[Tuple[int, int]], wheel: Optional[Tuple[int, int]]) -> List[str]:
    """Say which build the driver needs, if it is too old for the one that is about to be installed: any release of
    CUDA runs on a driver of its own major release."""
    if driver is None or wheel is None or driver[0] >= wheel[0]:
        return []
    older = OLDER.get(driver[0])
    instead = "TORCH=%s for its GPUs, or " % older if older else ""
    return [
        "is for CUDA %d.%d, which is too old for this build of torch (CUDA %d.%d): everything" % (driver + wheel),
        "would be computed on CPUs. Say %sTORCH=cpu, or update the driver" % instead,
    ]


def fail(sentence: str) -> None:
    """One clear sentence, exit code 2."""
    sys.stderr.write("preflight: %s\n" % sentence)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
