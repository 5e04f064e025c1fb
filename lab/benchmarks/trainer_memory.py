"""The memory of a trainer's process: computed by `tba.models.memory`, and measured for the same case.

    python lab/benchmarks/trainer_memory.py [--quick]

Each case is a process of its own: two optimizer steps of two passes on one thread, on random weights, with a group of
answers in each pass. *Computed*: `memory.trainer` of the model's shape. *Measured*: the most resident memory of the
process above what it had after the same steps of a tiny model, which load all libraries; glibc is told to hand freed
blocks of 64 KiB and more back to the system (MALLOC_MMAP_THRESHOLD_), so that what is resident is what is alive. *As a
run has it*: the same with glibc's defaults, whose heap keeps freed blocks of less than 32 MB.

Cases: all weights; with activation checkpointing; with adapters (LoRA, rank 16) in place of all weights; these with
checkpointing; over two ranks (the larger of the two); and one rank that computes in bfloat16, as on a GPU.

    python lab/benchmarks/trainer_memory.py --large

Only computes: GB on each rank for models of 0.5 to 33 B parameters on GPUs, with bfloat16 compute, activation
checkpointing and 8192 tokens a pass.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
from publishing import batch_of
from torch._C._distributed_c10d import FileStore
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PretrainedConfig, Qwen2Config

from tba.models import memory
from tba.models.precision import choose_precision
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.causal import CausalPolicy
from tba.policy.lora import LoraSettings, add_adapters
from tba.protocols import Policy
from tba.record.memory import peak_memory_bytes, resident_memory_bytes
from tba.schedules import Constant
from tba.training.gradients import backward
from tba.training.optimizer import Optimizer, OptimizerSettings
from tba.training.ranks.messages import Ranks, Rendezvous
from tba.training.ranks.policy import Follower, Rank0Optimizer, Rank0Policy

RANK = 16  # of adapters
PROMPT = 64  # tokens, those of `batch_of`
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    adapters: bool = False
    checkpointed: bool = False
    ranks: int = 1
    low: bool = False  # compute in bfloat16


CASES = {
    "all weights": Case(),
    "checkpointed": Case(checkpointed=True),
    "adapters": Case(adapters=True),
    "adapters, checkpointed": Case(adapters=True, checkpointed=True),
    "two ranks": Case(ranks=2),
    "bfloat16": Case(low=True),
}
SIZES = {  # width, layers, feed-forward width, heads, key-value heads, vocabulary; answers of a group, tokens of each
    "tiny": ((64, 2, 128, 1, 1, 512), 2, 8),
    "9 M": ((256, 6, 704, 4, 4, 8192), 10, 128),
    "50 M": ((512, 13, 1408, 8, 8, 8192), 10, 64),
    "0.5 B": ((896, 24, 4864, 14, 2, 151_936), 4, 32),
}


LARGE = {  # as in SIZES; without key-value heads a Pythia
    "0.5 B (Qwen2.5)": (896, 24, 4864, 14, 2, 151_936),
    "1 B (Pythia)": (2048, 16, 8192, 8, None, 50_304),
    "2.8 B (Pythia)": (2560, 32, 10_240, 32, None, 50_304),
    "7.6 B (Qwen2.5)": (3584, 28, 18_944, 28, 4, 152_064),
    "33 B (Qwen2.5)": (5120, 64, 27_648, 40, 8, 152_064),
}


def qwen2(width: int, layers: int, ff: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ff,
        **{"tie_word_embeddings": True, **more},
    )


def config_of(size: str) -> PretrainedConfig:
    width, layers, ff, heads, kv_heads, vocabulary = LARGE[size] if size in LARGE else SIZES[size][0]
    if kv_heads is None:
        return GPTNeoXConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=ff,
        )
    shape, tied = (width, layers, ff, heads, kv_heads, vocabulary), size.startswith("0.5 B")  # as Qwen2.5 up to 3 B
    return qwen2(*shape, max_position_embeddings=512, tie_word_embeddings=tied)


def tokens_of(size: str) -> int:
    """Tokens of a pass: of one group."""
    _, answers, length = SIZES[size]
    return PROMPT + answers * length


def computed(size: str, case: Case) -> memory.Bytes:
    of = memory.TrainerWorkload(
        tokens_of(size),
        choose_precision("bfloat16" if case.low else "float32", "cpu", case.adapters),
        rank=RANK * case.adapters,
        checkpointed=case.checkpointed,
        ranks=case.ranks,
    )
    return memory.trainer_bytes(memory.Shape.of(config_of(size)), of)


def measured(size: str, case: Case) -> int:
    """In this process: bytes at the peak above those after a tiny model."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rank = int(case.ranks > 1 and os.fork() == 0)
        ranks = None
        if case.ranks > 1:
            store = FileStore(f"{folder}/store", case.ranks)
            ranks = Ranks(rank, case.ranks, Rendezvous(store), torch.device("cpu"), 3600.0, 3600.0)
        train("tiny", case, ranks)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = resident_memory_bytes() or 0
        train(size, case, ranks)
        peak = peak_memory_bytes() - before
        if rank:
            Path(folder, "peak").write_text(str(peak))
            os._exit(0)
        if case.ranks > 1:
            os.wait()
            peak = max(peak, int(Path(folder, "peak").read_text()))
        return peak


def train(size: str, case: Case, ranks: Ranks | None) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if case.low and case.adapters else torch.float32
    model = AutoModelForCausalLM.from_config(config_of(size), dtype=dtype)
    if case.adapters:
        add_adapters(model, LoraSettings(rank=RANK), torch.float32)
    # The peak begins again: a model that is drawn at random has its tied head twice for a moment.
    Path("/proc/self/clear_refs").write_text("5")
    compute = torch.bfloat16 if case.low and ranks is None else None
    local_policy = CausalPolicy(model, gradient_checkpointing=case.checkpointed, compute=compute)
    settings = OptimizerSettings(lr=1e-5)
    policy: Policy = local_policy
    if ranks is None:
        optimizer: Optimizer = settings.start(local_policy.parameters())
    else:
        local_policy.shard(ranks.sharding(torch.bfloat16 if case.low else torch.float32))
        if ranks.rank:
            Follower(local_policy, settings.start(local_policy.parameters()), ranks, tokens_of(size)).follow()
            return
        policy, optimizer = (
            Rank0Policy(local_policy, ranks, tokens_of(size)),
            Rank0Optimizer(ranks, settings, local_policy.parameters(), []),
        )
    batch = batch_of(2 * case.ranks, *SIZES[size][1:])
    for step in (1, 2):
        backward(policy, TrajectoryBalance(Constant(0.05)), batch, step, tokens_of(size), ranks=case.ranks)
        optimizer.step(step)
    if ranks is not None:
        ranks.broadcast("end")


def in_a_process(size: str, case: str, environment: dict[str, str]) -> int:
    command = [sys.executable, __file__, "--one", size, case]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment)
    return int(done.stdout.split()[-1])


def print_large() -> None:
    counts = (1, 2, 4, 8, 16)
    print(f"| model | 1 rank | {' | '.join(map(str, counts[1:]))} |\n|---{'|---' * len(counts)}|")
    for size in LARGE:
        shape, low = memory.Shape.of(config_of(size)), choose_precision("bfloat16", "cuda", adapters=False)
        passes = (memory.TrainerWorkload(8192, low, "cuda", checkpointed=True, ranks=ranks) for ranks in counts)
        gigabytes = [memory.total(memory.trainer_bytes(shape, of)) / 1e9 for of in passes]
        needed = [f"{n:.0f}" if n >= 10 else f"{n:.1f}" for n in gigabytes]
        print(f"| {size} | {' | '.join(needed)} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="the smallest model only")
    parser.add_argument("--large", action="store_true", help="compute for larger models, and measure nothing")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES)[1:], default=list(SIZES)[1:])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measured(options.one[0], CASES[options.one[1]]))
        return
    if options.large:
        print_large()
        return
    print("| model | case | computed, MB | measured, MB | computed / measured | as a run has it, MB |")
    print("|---|---|---|---|---|---|")
    for size in options.sizes[: 1 if options.quick else None]:
        for name in options.cases:
            computed_bytes = memory.total(computed(size, CASES[name]))
            live, resident = (in_a_process(size, name, environment) for environment in (RETURNED, {}))
            cells = (size, name, f"{computed_bytes / 1e6:,.0f}", f"{live / 1e6:,.0f}", f"{computed_bytes / live:.2f}")
            print(f"| {' | '.join(cells)} | {resident / 1e6:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
