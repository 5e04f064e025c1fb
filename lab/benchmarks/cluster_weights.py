"""Weights of a realistic size through Ray's object store, between two nodes: seconds until a remote searcher has them.

    python lab/benchmarks/cluster_weights.py [--quick]

Two Ray nodes on this machine. On the first a version of 50 M parameters is published, and the run's gateway serves it;
on the second two searchers fetch it, one after the other, with the code of the runtime `cluster`
(`tba.runtime.cluster.remote`). Three rounds. *Offered*: the gateway finds the version and puts it into its node's
store; *fetched*: the pieces are on the searcher's node, as tensors (and added to the full version, if they are
changes); *copied*: they are in a model. Seconds, medians and spread.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it
os.environ["RAY_AUTH_MODE"] = "token"  # before Ray does

import ray
import torch
from publishing import batch_of, policy_of, step
from ray.cluster_utils import Cluster as Nodes
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tba.protocols import Manifest
from tba.runtime.cluster.actors import ExchangeActor
from tba.runtime.cluster.client import NAMESPACE, ActorContact
from tba.runtime.cluster.remote import RemoteWeights
from tba.runtime.run_directory import RunDirectory
from tba.settings import find
from tba.training.optimizer import OptimizerSettings
from tba.types import Version
from tba.weights.directory import PublishSettings, WeightDirectory

remote: Any = ray.remote  # Ray's own types leave out some of its options
ROUNDS = 3
DEADLINE = 120.0  # seconds for a call
KINDS = {
    "float32": (torch.float32, PublishSettings()),
    "bfloat16": (torch.bfloat16, PublishSettings()),
    "bfloat16, changes": (torch.bfloat16, PublishSettings(2)),
}


class Taker:
    """What a searcher elsewhere does with weights, and how long it takes."""

    def __init__(self, exchange: Any, quick: bool) -> None:
        torch.set_num_threads(1)
        self._weights = RemoteWeights(ActorContact(exchange, "searcher-0", DEADLINE))
        self._own = {name: t.detach().clone() for name, t in policy_of(quick).weights().items()}

    def take(self, version: Version) -> tuple[float, float, float]:
        """Seconds: offered, fetched, copied."""
        times = [time.perf_counter()]
        published = self._weights.at(version)
        times.append(time.perf_counter())
        tensors = published.read()
        times.append(time.perf_counter())
        with torch.inference_mode():
            for name, copy in self._own.items():
                copy.copy_(tensors[name])
        times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def measured(home: Path, kind: str, quick: bool, here: str, far_node: str) -> None:
    """One kind of versions: a line for who takes it first on a node, and one for who takes it next."""
    recipe = "quickstart"
    run = RunDirectory.create(home / kind.replace(", ", "-"), recipe, [], find(recipe))
    policy, batch = policy_of(quick), batch_of(1, 4, 16)
    optimizer = OptimizerSettings(lr=1e-5).start(policy.parameters())
    dtype, settings = KINDS[kind]
    directory = WeightDirectory(run.weights, settings=settings, dtype=dtype)
    on = {
        name: NodeAffinitySchedulingStrategy(node, soft=False) for name, node in (("here", here), ("there", far_node))
    }
    groups = {"journal": 1, "weights": 1}
    exchange = remote(concurrency_groups=groups, num_cpus=0)(ExchangeActor)
    exchange = exchange.options(scheduling_strategy=on["here"]).remote(str(run.path))
    taker = remote(num_cpus=0)(Taker).options(scheduling_strategy=on["there"])
    takers = [taker.remote(exchange, quick) for _ in range(2)]
    rows: list[list[tuple[float, float, float]]] = [[], []]
    size = 0
    for i in range(2 * ROUNDS + 2):
        step(policy, optimizer, batch, lambda: None)
        version = Version(0, i)
        directory.publish(policy.weights(), version, Manifest())
        times_by_taker = [ray.get(taker.take.remote(version), timeout=DEADLINE) for taker in takers]
        counted = i >= 2 and (i % 2 == 1 or settings.full_version_every == 1)  # the first two find nothing warm
        if counted:
            size = directory.file(version).stat().st_size
            for row, times in zip(rows, times_by_taker, strict=True):
                row.append(times)
    for who, row in zip(("the first on its node", "the next there"), rows, strict=True):
        parts = ", ".join(
            f"{name} {median(column):.2f} ({min(column):.2f} to {max(column):.2f})"
            for name, column in zip(("offered", "fetched", "copied"), zip(*row, strict=True), strict=True)
        )
        print(f"{kind}, {size / 1e6:.0f} MB, {who}: {parts}", flush=True)
    for actor in (*takers, exchange):
        ray.kill(actor)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a small model, to see whether it runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    home = tempfile.mkdtemp(prefix="tba")  # short: the names of Ray's sockets begin with it
    variables = {
        "HOME": home,
        "RAY_TMPDIR": home,
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    os.environ.update(variables | {"RAY_worker_niceness": "0"})  # Ray's default is 15
    store: dict[str, Any] = {"object_store_memory": int(1.5e9)}
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **store})
    try:
        nodes.add_node(num_cpus=1, **store)
        ray.init(address=nodes.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        here = ray.get_runtime_context().get_node_id()
        far_node = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)
        for kind in KINDS:
            measured(Path(home), kind, quick, here, far_node)
    finally:
        ray.shutdown()
        nodes.shutdown()
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
