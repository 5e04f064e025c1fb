"""Ray nodes of this machine, and calls of Ray, in processes of their own.

Ray ends a process that has lost its cluster, and is not made for processes that are copied, as those of tests are.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from multiprocessing import get_context
from typing import Any, ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
R = TypeVar("R")

TOKEN = secrets.token_hex(32)  # of all clusters here
SECONDS = 300.0  # that a busy machine may take for what takes a few


class OtherProcess:
    """A new interpreter, which calls functions of modules one after the other."""

    def __init__(self) -> None:
        self._executor = ProcessPoolExecutor(1, get_context("spawn"))

    def call(self, seconds: float, function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
        """Returns what a function gives, within so many seconds."""
        future = self._executor.submit(function, *arguments, **options)
        try:
            return future.result(seconds)
        except TimeoutError:
            for process in self._executor._processes.values():
                process.kill()
            raise

    def close(self) -> None:
        self._executor.shutdown()


def in_other_process(seconds: float, function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    with closing(OtherProcess()) as process:
        return process.call(seconds, function, *arguments, **options)


_nodes: Any = None  # of the process that has started them


def _start_head(cpus: float, gpus: float) -> str:
    global _nodes
    from ray.cluster_utils import Cluster

    head = {"num_cpus": cpus, "num_gpus": gpus, "include_dashboard": False}
    _nodes = Cluster(initialize_head=True, head_node_args=head)
    return str(_nodes.address)


def _add_node(options: dict[str, Any]) -> None:
    _nodes.add_node(**options)


def _remove_node() -> None:
    _nodes.remove_node(next(iter(_nodes.worker_nodes)))


def _shut_down() -> None:
    _nodes.shutdown()


class RayNodes:
    """A cluster of nodes on this machine."""

    def __init__(self, process: OtherProcess, cpus: float, gpus: float) -> None:
        self._process = process
        self.address = process.call(SECONDS, _start_head, cpus, gpus)

    def add_node(self, **options: Any) -> None:
        self._process.call(SECONDS, _add_node, options)

    def remove_node(self) -> None:
        """Remove the node that was added."""
        self._process.call(SECONDS, _remove_node)

    def shut_down(self) -> None:
        self._process.call(SECONDS, _shut_down)


@contextmanager
def ray_nodes(cpus: float, gpus: float = 0) -> Iterator[RayNodes]:
    """Yields a cluster whose head has so many cores and GPUs; its files are nowhere but in a folder of its own."""
    home = tempfile.mkdtemp(prefix="tba")  # short: the names of Ray's sockets begin with it
    with pytest.MonkeyPatch.context() as patch, closing(OtherProcess()) as process:
        patch.setenv("HOME", home)
        patch.setenv("RAY_TMPDIR", home)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")
        nodes = RayNodes(process, cpus, gpus)
        try:
            yield nodes
        finally:
            with suppress(BrokenExecutor):  # a call that took too long has ended the process
                nodes.shut_down()
            shutil.rmtree(home, ignore_errors=True)
