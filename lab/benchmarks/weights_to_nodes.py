"""Bytes that leave the trainer's node until every other node has a version, and the seconds that it takes.

    python lab/benchmarks/weights_to_nodes.py [--nodes 4] [--mb 256] [--pieces 32] [--rounds 3]

Raylets on this machine stand for nodes: one has the run's gateway, and on each of the others a searcher fetches a
version at the same time as all others, with the code of the runtime `cluster`. *all from the trainer's node*: every
searcher fetches the pieces that the gateway has put into its store, in their order, and Ray chooses where from. *handed
on*: what `RemoteWeights` does. The kernel counts the bytes that the raylet of the gateway's node sends (`ss`).
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it
os.environ["RAY_AUTH_MODE"] = "token"  # before Ray does

import ray
import torch
from ray.cluster_utils import Cluster as Nodes
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tba.protocols import Manifest
from tba.runtime.cluster import gateway
from tba.runtime.cluster.actors import ExchangeActor
from tba.runtime.cluster.client import NAMESPACE, ActorContact
from tba.runtime.cluster.remote import RemoteWeights
from tba.runtime.run_directory import RunDirectory
from tba.settings import find
from tba.types import Version
from tba.weights.chunks import cut_pieces
from tba.weights.directory import WeightDirectory

remote: Any = ray.remote  # Ray's own types leave out some of its options
DEADLINE = 300.0  # seconds for a call


class Gateway(ExchangeActor):
    """The gateway of a run, with pieces that are small enough for versions of a few MB to have many."""

    def __init__(self, path: str, piece_bytes: int) -> None:
        vars(gateway)["cut_pieces"] = partial(cut_pieces, most_bytes=piece_bytes)
        super().__init__(path)


class Taker:
    """What a searcher elsewhere does with a version."""

    def __init__(self, exchange: Any, name: str) -> None:
        self._contact = ActorContact(exchange, name, DEADLINE)
        self._weights = RemoteWeights(self._contact, ray.get_runtime_context().get_node_id())

    def take(self, version: Version, all_from_trainer: bool) -> float:
        """Returns the seconds until all of it is on its node."""
        began = time.perf_counter()
        if all_from_trainer:
            offer = self._contact.call("at", version)
            sizes = [len(piece) for piece in self._contact.fetch(offer.references)]
        else:
            sizes = [t.nbytes for t in self._weights.at(version).read().values()]
        assert sum(sizes) > 0
        return time.perf_counter() - began


def bytes_sent_by(process: int) -> int:
    """Returns what a process has sent over the TCP connections that it has."""
    table = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout
    entries = re.findall(rf"pid={process},.*\n.*?bytes_sent:(\d+)", table)
    return sum(map(int, entries))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=4, help="nodes that fetch")
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--pieces", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    home = tempfile.mkdtemp(prefix="tba")  # short: the names of Ray's sockets begin with it
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    os.environ.update({"HOME": home, "RAY_TMPDIR": home} | token)
    store: dict[str, Any] = {"object_store_memory": int(5e6 * arguments.mb)}
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **store})
    try:
        other_raylets = [nodes.add_node(num_cpus=1, **store) for _ in range(arguments.nodes)]
        ray.init(address=nodes.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        on = {
            node: NodeAffinitySchedulingStrategy(node.node_id, soft=False) for node in (nodes.head_node, *other_raylets)
        }
        run = RunDirectory.create(Path(home) / "run", "quickstart", [], find("quickstart"))
        directory, size = WeightDirectory(run.weights), arguments.mb << 20
        exchange = remote(concurrency_groups={"journal": 1, "weights": 1}, num_cpus=0)(Gateway)
        exchange = exchange.options(scheduling_strategy=on[nodes.head_node]).remote(
            str(run.path), size // arguments.pieces
        )
        taker = remote(num_cpus=0)(Taker)
        takers = [
            taker.options(scheduling_strategy=on[node]).remote(exchange, f"searcher-{i}")
            for i, node in enumerate(other_raylets)
        ]
        head: Any = nodes.head_node
        raylet = head.all_processes["raylet"][0].process.pid
        figures: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(2 * arguments.rounds + 2):
            all_from_trainer, version = number % 2 == 1, Version(0, number)
            tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
            directory.publish({"weight": tensor}, version, Manifest())
            bytes_before, began = bytes_sent_by(raylet), time.perf_counter()
            ray.get([t.take.remote(version, all_from_trainer) for t in takers], timeout=DEADLINE)
            seconds, sent_bytes = time.perf_counter() - began, bytes_sent_by(raylet) - bytes_before
            if number > 1:  # by then the gateway knows the nodes
                figures[all_from_trainer].append((sent_bytes / size, seconds))
        for all_from_trainer, rows in figures.items():
            copies, seconds_of = zip(*rows, strict=True)
            name = "all from the trainer's node" if all_from_trainer else "handed on"
            print(
                f"{arguments.nodes} nodes, {arguments.mb} MiB in {arguments.pieces} pieces, {name}: "
                f"{median(copies):.2f} copies leave ({min(copies):.2f} to {max(copies):.2f}), "
                f"{median(seconds_of):.2f} s ({min(seconds_of):.2f} to {max(seconds_of):.2f})",
                flush=True,
            )
    finally:
        ray.shutdown()
        nodes.shutdown()
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
