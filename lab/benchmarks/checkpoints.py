"""How long a trainer over several ranks stops for a checkpoint: gathered and written by rank 0, or copied by all ranks.

    python lab/benchmarks/checkpoints.py [--ranks 2] [--quick]

A random Llama of 50 M parameters (201 MB in float32, 603 MB with Adam's moments), one process a rank, one thread each,
gloo. Each round has both ways in turn. *Stop*: seconds from the end of a step until the next may begin: of a gathered
checkpoint all of it, of one by all ranks until every rank has copied its rows (rank 0 then waits for no other).
*On the disk*: seconds until the folder has its name, with nothing else to do meanwhile.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
from publishing import policy_of
from torch._C._distributed_c10d import FileStore

from tba.policy.causal import CausalPolicy
from tba.training.checkpoint import save_checkpoint
from tba.training.optimizer import OptimizerSettings
from tba.training.ranks.messages import Ranks, Rendezvous
from tba.training.ranks.policy import Follower, Rank0Optimizer, Rank0Policy
from tba.types import Version

SETTINGS = OptimizerSettings(lr=1e-5)


def sharded(ranks: Ranks, quick: bool) -> CausalPolicy:
    """A policy whose parameters have gradients."""
    policy = policy_of(quick)
    policy.shard(ranks.sharding(torch.float32))
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return policy


def follow(ranks: Ranks, quick: bool) -> None:
    policy = sharded(ranks, quick)
    Follower(policy, SETTINGS.start(policy.parameters()), ranks, 1).follow()


def lead(ranks: Ranks, quick: bool, rounds: int, folder: Path) -> list[tuple[float, float, float]]:
    """Seconds: the stop of a gathered checkpoint, that of one by all ranks, and until this one is on the disk."""
    local_policy = sharded(ranks, quick)
    policy = Rank0Policy(local_policy, ranks, 1)
    optimizer = Rank0Optimizer(ranks, SETTINGS, local_policy.parameters(), [])
    optimizer.step(1)  # makes the moments
    measurements = []
    for i in range(rounds):
        began = time.perf_counter()
        save_checkpoint(folder / "gathered", Version(0, i + 1), policy.save, optimizer)
        gathered = time.perf_counter() - began
        began = time.perf_counter()
        laid_out = policy.copy_rows(optimizer, folder / "shards")
        assert laid_out is not None
        stop = time.perf_counter() - began
        model, rows = laid_out
        save_checkpoint(folder / "shards", Version(0, i + 1), model.save, rows)
        measurements.append((gathered, stop, time.perf_counter() - began))
        shutil.rmtree(folder / "gathered")
        shutil.rmtree(folder / "shards")
    ranks.broadcast("end")
    return measurements


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a small model and one round, to see whether it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder, children, rank = Path(name), [], 0
        for child_rank in range(1, options.ranks):
            if (child := os.fork()) == 0:
                rank = child_rank
                break
            children.append(child)
        meeting = Rendezvous(FileStore(str(folder / "store"), options.ranks))
        ranks = Ranks(rank, options.ranks, meeting, torch.device("cpu"), 3600.0, 3600.0)
        if rank:
            follow(ranks, options.quick)
            os._exit(0)
        columns = zip(*lead(ranks, options.quick, 1 if options.quick else 5, folder), strict=True)
        for child in children:
            os.waitpid(child, 0)
    print(f"{options.ranks} ranks; seconds, the median and all rounds")
    for label, column in zip(("gathered: stop", "all ranks: stop", "all ranks: on the disk"), columns, strict=True):
        print(f"{label:24} {median(column):7.3f}  ({min(column):.3f} to {max(column):.3f})")


if __name__ == "__main__":
    main()
