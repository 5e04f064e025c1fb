"""Reads the memory of a live cluster's nodes and of their GPUs.

Invariant: nothing is left running on a node, and a process that has started CUDA there ends with the answer.
"""

from __future__ import annotations

import time
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tba.errors import UserError
from tba.gpus import GPU_SHARE, smallest_gpu_bytes
from tba.runtime.cluster.client import connect_to_ray, get, nodes
from tba.runtime.cluster.placement import Node
from tba.runtime.hardware import Machine

_DEADLINE = 300.0  # seconds for all nodes: each starts a process that loads torch
_POLL = 0.1  # seconds between two questions
_FREEING_SECONDS = 10.0  # within which Ray knows what is free
_remote: Any = ray.remote  # Ray's own types leave out some of its options


def machines_at(address: str) -> tuple[Machine, ...]:
    """Returns the nodes of the cluster at an address, with the GPUs that nobody uses. Raises `UserError` where it
    cannot be reached, or a node does not answer.
    """
    with connect_to_ray(address):
        free_nodes = _nodes_when_free()
        answers = {node.key: _reader_on(node.key).remote() for node in free_nodes if node.gpus >= 1}
        machines = []
        for node in free_nodes:
            count, gpu_bytes = int(node.gpus), 0
            if node.key in answers:
                try:
                    gpu_bytes = get(answers[node.key], _DEADLINE, f"the GPUs' memory on {node.name}")
                except ray.exceptions.RayError as error:
                    reason = str(error).strip().splitlines()[-1]
                    raise UserError(
                        f"{node.name} did not say how much memory its GPUs have ({reason}): it needs this version of "
                        "tba, or describe the cluster with --cluster.nodes"
                    ) from error
            machines.append(Machine(int(node.memory_bytes) or None, (gpu_bytes,) * count))
    return tuple(machines)


def _nodes_when_free() -> list[Node]:
    """Returns the nodes once nobody uses their GPUs, or after a moment as they are: a run that has just ended gives
    them back then.
    """
    deadline = time.monotonic() + _FREEING_SECONDS
    while True:
        current_nodes = nodes()
        is_free = sum(node.gpus for node in current_nodes) >= ray.cluster_resources().get("GPU", 0.0)
        if is_free or time.monotonic() > deadline:
            return current_nodes
        time.sleep(_POLL)


def _reader_on(node: str) -> Any:
    """Returns the task that reads a node's smallest GPU, in a process of its own."""
    options = {
        "num_cpus": 0,
        "max_calls": 1,
        "max_retries": 0,
        "runtime_env": {"env_vars": {GPU_SHARE: "1"}},  # CUDA is started there, without another process
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return _remote(**options)(smallest_gpu_bytes)
