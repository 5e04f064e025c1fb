"""For all tests: one thread (tensors this small are slower on many) unless OMP_NUM_THREADS says otherwise, nothing from
the Hub, no cache but their own.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
# processes that tests start find the toy (`tests/toy`) of their recipes
os.environ.update(
    PYTHONPATH=os.pathsep.join(filter(None, [str(Path(__file__).parent / "tests"), os.environ.get("PYTHONPATH")]))
)

import torch
from hypothesis import HealthCheck, settings

from tba.gpus import visible_gpus
from tba.runtime.local import forkserver

gc.disable()  # until all is imported: torch and transformers are two million objects, which each collection visits
THREADS = int(os.environ["OMP_NUM_THREADS"])
torch.set_num_threads(THREADS)
# how long an example takes on a busy machine says nothing about it
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a GPU, or vLLM, is skipped where there is none."""
    if not visible_gpus() and os.environ.get("TBA_TEST_DEVICE", "cuda") == "cuda":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: make test-gpu"))
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="needs vLLM, in an environment of its own: make test-vllm"))


def pytest_configure(config: pytest.Config) -> None:
    """Copies of a worker do not hold its pipe to pytest-xdist, which learns from the pipe's end that a worker died."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            pipe = plugin.channel.gateway._io.outfile.fileno()
            os.register_at_fork(after_in_child=partial(_release, pipe, os.fstat(pipe)))


def _release(descriptor: int, status: os.stat_result) -> None:
    """Lead a descriptor nowhere, unless it is another file's by now."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), status):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def pytest_collection_finish() -> None:
    """What the tests have in common is not visited again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A run in the process of an earlier test has set its own number of threads."""
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Warm starts, and what torch compiles, are cached for this session only: for all of its workers, and the processes
    that tests start. Headers are compiled once, and nothing is of another processor.
    """
    own = tmp_path_factory.getbasetemp()
    session = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TBA_CACHE", str(session / "cache"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(session / "compiled"))
        yield


@pytest.fixture(scope="session", autouse=True)
def own_forkserver() -> None:
    """Parts of runs are forked from a copy of this process: to load the libraries once more takes seconds of a core."""
    if forkserver._CAN_FORK:
        forkserver._forkserver = forkserver.Forkserver.fork()
