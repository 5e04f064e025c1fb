"""Runs a command on a machine that shows GPUs which it does not have: how a driver too old for torch's build looks.

    python -m venv /tmp/cuda && /tmp/cuda/bin/pip install -c constraints.txt -e . torch    # the CUDA build, 3.5 GB
    python tools/faked_gpus.py --gpus 4 -- /tmp/cuda/bin/tba train quickstart

Two libraries are compiled (`cc`) and found before any others. NVML's says that there are so many GPUs, the driver's
which CUDA release it is for, and nothing else. So torch counts GPUs and cannot start CUDA.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NVML = """
#include <stdio.h>
#include <string.h>
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **device) { *device = (void *)(size_t)(i + 1); return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
  snprintf(text, size, "GPU-%08zu-0000-0000-0000-000000000000", (size_t)device); return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = DRIVER; return 0; }
"""
CUDA = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = DRIVER; return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
  *found = 0;
  if (!strcmp(name, "cuInit")) *found = (void *)cuInit;
  if (!strcmp(name, "cuDriverGetVersion")) *found = (void *)cuDriverGetVersion;
  if (!strcmp(name, "cuGetProcAddress")) *found = (void *)cuGetProcAddress_v2;
  if (status) *status = 0;
  return *found ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **found, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, found, version, flags, 0);
}
"""


def environment(folder: Path, gpus: int, driver: str) -> dict[str, str]:
    """Returns the environment of a process that sees these GPUs, by libraries in `folder`."""
    major, _, minor = driver.partition(".")
    given = [f"-DGPUS={gpus}", f"-DDRIVER={1000 * int(major) + 10 * int(minor or 0)}"]
    for name, source in (("libnvidia-ml.so.1", NVML), ("libcuda.so.1", CUDA)):
        file = folder / f"{name}.c"
        file.write_text(source)
        command = ["cc", "-shared", "-fPIC", *given, "-o", str(folder / name), str(file)]
        subprocess.run(command, check=True)  # noqa: S603 - our own words
    before = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": str(folder) + (f":{before}" if before else "")}


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--driver", default="12.4", help="the CUDA release that the driver is for")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = environment(Path(folder), given.gpus, given.driver)
        return subprocess.run(given.command, env=seen).returncode  # noqa: S603 - as the user asks


if __name__ == "__main__":
    sys.exit(main())
