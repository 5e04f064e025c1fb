"""Runs a command on another node of the cluster, where the command's own node cannot hold the trainer.

    python -m tba.runtime.cluster.relocation WORDS      on that node: `tba WORDS`, as long as its parent lives

A head without GPUs, as Kubernetes' operator makes it, starts runs whose driver, folder, journal and trainer are then on
one node with GPUs.

Invariant: the command there prints here and gets the signals that come here; it ends when this process does.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tba.errors import PartFailed, UserError
from tba.recipe import Recipe
from tba.runtime.cluster.client import connect_to_ray, get
from tba.runtime.cluster.placement import (
    NODE_ADDRESS,
    RAY_ADDRESS,
    Node,
    address_of,
    request_text,
    requests,
    whole_gpus,
)
from tba.runtime.sizing import searchers_of
from tba.runtime.stop_requests import stop_requests

_PARENT_DEATH_SIGNAL = 1  # of prctl
_POLL = 0.2  # seconds between two checks for what it prints
_remote: Any = ray.remote  # Ray's own types leave out some of its options


def run_on_trainers_node(recipe: Recipe, words: Sequence[str], show: Callable[[str], None]) -> int | None:
    """Run the command `tba WORDS` on a node that can hold the trainer's first rank, and return its exit code. None:
    this node can, or the run has a cluster of its own. `show` gets what the command prints.

    Raises `UserError` when no node has room in time.
    """
    address = address_of(recipe)
    if address is None or NODE_ADDRESS in os.environ:
        return None
    with connect_to_ray(address) as nodes:
        request = _trainers_request(recipe, nodes)
        local_key = next(node.key for node in nodes if node.here)
        totals = {n["NodeID"]: n["Resources"] for n in ray.nodes()}
        if all(totals[local_key].get(kind, 0.0) >= amount for kind, amount in request.items()):
            return None
        limit = recipe.cluster.start_deadline
        show(
            f"this node cannot hold the trainer ({request_text(request)}): looking for one that can "
            f"(--cluster.start-deadline {limit:g})\n"
        )
        key, host = _find_room(request, limit)
        show(f"the run is on {host}, with its folder\n")
        strategy = NodeAffinitySchedulingStrategy(key, soft=False)
        actor_class: Any = _remote(concurrency_groups={"ask": 1})(CommandActor)
        actor = actor_class.options(num_cpus=0, scheduling_strategy=strategy).remote()
        purpose = f"Ray to start the command on {host} (--cluster.start-deadline)"
        try:
            gcs_address = ray.get_runtime_context().gcs_address  # an address of loopback means another machine there
            variables = {RAY_ADDRESS: gcs_address, NODE_ADDRESS: host}
            if (job := os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR)) is not None:
                variables[RAY_JOB_CONFIG_JSON_ENV_VAR] = job  # what a submitted job's workers have, such as its files
            get(actor.start.remote(list(words), str(Path.cwd()), variables), limit, purpose)
            return _relay(actor, actor.output.remote(), show)
        except ray.exceptions.RayActorError as error:
            raise PartFailed(f"the node {host}, where the run is, is lost: `tba resume` there continues it") from error


def _trainers_request(recipe: Recipe, nodes: Sequence[Node]) -> dict[str, float]:
    """Returns the request of the trainer's first rank. A model that takes what there is takes a GPU of another node."""
    request = requests(recipe, whole_gpus(nodes), searchers_of(recipe))["trainer"]
    is_open = recipe.cluster.trainer_gpus is None and getattr(recipe.model, "device", "") == "auto"
    return {**request, "GPU": 1.0} if is_open and not request["GPU"] and whole_gpus(nodes) else request


def _find_room(request: dict[str, float], limit: float) -> tuple[str, str]:
    """Returns the key and the address of a node with room; an autoscaler may bring it."""
    group = placement_group([{kind: amount for kind, amount in request.items() if amount}], "STRICT_PACK")
    if not group.wait(limit):
        raise UserError(
            f"no node has room for the trainer ({request_text(request)}) after {limit:g} s: add nodes, let it ask for "
            "less (--cluster.trainer-cpus, --cluster.trainer-gpus), or wait longer (--cluster.start-deadline)"
        )
    key = placement_group_table(group)["bundles_to_node_id"][0]
    remove_placement_group(group)  # the command reserves its own
    return key, next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == key)


def _relay(actor: Any, output: Any, show: Callable[[str], None]) -> int:
    """Show what the command prints and send it the signals that come here, until it ends; returns its exit code."""
    code = 1
    with stop_requests() as stop:
        is_stopped = False
        while True:
            if stop() and not is_stopped:
                is_stopped = True
                actor.send_signal.remote(stop.number)
            if not ray.wait([output], timeout=_POLL)[0]:
                continue
            try:
                line = ray.get(next(output))
            except StopIteration:
                return code
            if isinstance(line, int):
                code = line
            else:
                show(line)


class CommandActor:
    """A command on the node where the trainer will be."""

    def start(self, words: list[str], folder: str, variables: dict[str, str]) -> None:
        """Start the command in the folder where it was given, or in that of the job if the node does not have it."""
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", __name__, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder if Path(folder).is_dir() else None,
            env={**os.environ, **variables},
        )

    def output(self) -> Iterator[str | int]:
        """Yield the lines that the command prints, then its exit code."""
        assert self._process.stdout is not None
        for line in self._process.stdout:  # noqa: UP028 - Ray's generators take no `yield from` of a file
            yield line
        yield self._process.wait()

    @ray.method(concurrency_group="ask")
    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)


if __name__ == "__main__":
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == parent:
        sys.argv = ["tba", *sys.argv[1:]]
        runpy.run_module("tba", run_name="__main__")
