"""Rows of 2,048 tokens a second through the gateway actor into the journal, with 1 and 8 senders.

    python lab/benchmarks/gateway_rows.py [--seconds 20] [--senders 1,8] [--out lab/results/gateway_rows.csv]

One Ray node on this machine, every process at niceness 0. Each sender is an actor that puts groups of 24 rows, one
after another, with the code of the runtime `cluster`; a put returns once its rows are on the disk. A row of 2,048
tokens has the log-probabilities of the reference and of the policy that sampled it.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import secrets
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it
os.environ["RAY_AUTH_MODE"] = "token"  # before Ray does

import numpy as np
import ray

from tba.protocols import Journal
from tba.runtime.cluster.actors import ExchangeActor
from tba.runtime.cluster.client import NAMESPACE, ActorContact
from tba.runtime.cluster.gateway import JOURNAL
from tba.runtime.cluster.remote import remote_proxy
from tba.runtime.run_directory import RunDirectory
from tba.settings import find
from tba.types import Completion, Prompt, StopReason, Trajectory, Version

remote: Any = ray.remote  # Ray's own types leave out some of its options
TOKENS, GROUP = 2048, 24
DEADLINE = 120.0  # seconds for a call


class Sender:
    """What a searcher elsewhere does with answers, as fast as it can."""

    def __init__(self, exchange: Any, name: str) -> None:
        contact = ActorContact(exchange, name, DEADLINE)
        self._name = name
        self._journal: Journal = remote_proxy(JOURNAL, partial(contact.call, "journal", name))
        rng = np.random.default_rng(0)
        prompt = Prompt("question", rng.integers(0, 50_000, 200, dtype=np.int32), "a question", {"answer": "7"})
        logs = rng.normal(size=TOKENS).astype(np.float32)
        version = Version(0, 1)
        completion = Completion(
            rng.integers(0, 50_000, TOKENS, dtype=np.int32), "", StopReason.EOS, (version, version), log_behavior=logs
        )
        self._make = partial(
            Trajectory, prompt=prompt, completion=completion, reward=1.0, log_reference=logs, reference=Version()
        )

    def send(self, seconds: float) -> tuple[int, list[float]]:
        """Returns how many rows were put, and the seconds of each put."""
        rows, times, end = 0, [], time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            uids = [f"{self._name}-{seconds:g}-{rows + n}" for n in range(GROUP)]
            self._journal.put([self._make(uid=uid) for uid in uids], (), {"generated_tokens": GROUP * TOKENS})
            rows += GROUP
            times.append(time.monotonic() - began)
        return rows, times


def measure_rates(home: Path, senders: int, seconds: float) -> dict[str, float]:
    """Returns the rate and the times of a number of senders, each of which has sent a second before."""
    run = RunDirectory.create(home / f"run-{senders}", "quickstart", [], find("quickstart"))
    exchange = remote(concurrency_groups={"journal": 1, "weights": 1}, num_cpus=0)(ExchangeActor).remote(str(run.path))
    actors = [remote(num_cpus=0)(Sender).remote(exchange, f"searcher-{i}") for i in range(senders)]
    ray.get([actor.send.remote(1.0) for actor in actors], timeout=DEADLINE)
    began = time.monotonic()
    sent_counts = ray.get([actor.send.remote(seconds) for actor in actors], timeout=DEADLINE + seconds)
    wall = time.monotonic() - began
    times = [s for _, times in sent_counts for s in times]
    for actor in (*actors, exchange):
        ray.kill(actor)
    rows = sum(count for count, _ in sent_counts)
    size = (run.path / "journal.sqlite").stat().st_size + (run.path / "journal.sqlite-wal").stat().st_size
    return {
        "senders": senders,
        "rows_per_second": round(rows / wall, 1),
        "tokens_per_second": round(rows * TOKENS / wall),
        "put_median_ms": round(1000 * median(times), 1),
        "put_p99_ms": round(1000 * sorted(times)[int(0.99 * (len(times) - 1))], 1),
        "journal_mb": round(size / 1e6, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--senders", default="1,8")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    home = tempfile.mkdtemp(prefix="tba")  # short: the names of Ray's sockets begin with it
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    os.environ.update({"HOME": home, "RAY_TMPDIR": home} | token)
    try:
        ray.init(
            num_cpus=2, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
        rows = [measure_rates(Path(home), int(n), arguments.seconds) for n in arguments.senders.split(",")]
    finally:
        ray.shutdown()
        shutil.rmtree(home, ignore_errors=True)
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if arguments.out is not None:
        is_new = not arguments.out.exists()
        with arguments.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            if is_new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
