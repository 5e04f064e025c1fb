"""The memory of a trainer's process: measured for small models on this machine, computed for large ones.

    python benchmarks/trainer_memory.py [--quick]

*Measured*: the most resident memory of a process above what it had before its model, over three optimizer steps on one
thread in float32: all weights; with activation checkpointing; with adapters (LoRA, rank 16) in place of all weights;
over two ranks (the larger of the two). Each case is a process of its own. The batch: 2 groups of 10 answers of 128
tokens to prompts of 64.

*Computed*: bytes that a rank of R holds of P parameters with bfloat16 compute and activation checkpointing. 16 P / R
for float32 weights, gradients and two moments; what is gathered at a time, 2 bytes each: two layers, embeddings and
head, and as much again for gradients of one layer and of these (4 bytes when they are summed); 2 bytes a token, layer
and width for what checkpointing keeps; 34 bytes a token and width in the one layer that is computed again (after
Korthikanti et al. 2022, arXiv 2205.05198; attention adds nothing that grows faster than the number of tokens, see
benchmarks/kernel_counts.py); the head's logits, 10 bytes each of 2^27 (or of all, if these are fewer); 0.4 GB of
probabilities kept for the backward pass (`kept_bytes`). With adapters the base is held once in bfloat16 or float32 and
only adapters have gradients and moments.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

CASES = ("all weights", "checkpointed", "adapters", "two ranks")


@dataclass(frozen=True)
class Size:
    """A Llama-like model."""

    name: str
    width: int
    layers: int
    ff: int
    vocabulary: int
    kv_share: float = 1.0  # of the width that keys and values have
    tied: bool = False

    @property
    def layer(self) -> float:
        return self.width**2 * (2 + 2 * self.kv_share) + 3 * self.width * self.ff

    @property
    def outside(self) -> float:
        """Embeddings and head."""
        return self.width * self.vocabulary * (1 if self.tied else 2)

    @property
    def parameters(self) -> float:
        return self.layers * self.layer + self.outside


SMALL = (Size("10 M", 256, 6, 704, 8192), Size("50 M", 512, 13, 1408, 8192))
LARGE = (
    Size("0.5 B (Qwen2.5)", 896, 24, 4864, 151936, 1 / 7, tied=True),
    Size("1.1 B (Pythia)", 2048, 16, 5461, 50304),
    Size("2.8 B (Pythia)", 2560, 32, 6827, 50304),
    Size("7 B (Qwen2.5)", 3584, 28, 18944, 152064, 1 / 7),
    Size("32 B (Qwen2.5)", 5120, 64, 27648, 152064, 1 / 5),
)


def computed(size: Size, ranks: int, tokens: int) -> float:
    """Bytes of a rank, with `tokens` in one of its passes."""
    held = 16 * size.parameters / ranks
    gathered = 0.0 if ranks == 1 else 2 * (2 * size.layer + size.outside)
    gradients = 4 * (size.layer + size.outside)
    kept = 2 * tokens * size.layers * size.width + 34 * tokens * size.width
    logits = 10 * min(2**27, tokens * size.vocabulary)
    return held + gathered + gradients + kept + logits + 0.4e9


def measure(case: str, size: Size) -> int:
    """In this process: bytes above what there was before the model."""
    import torch
    import torch.distributed as dist
    from publishing import batch_of
    from transformers import LlamaConfig, LlamaForCausalLM

    from tba.objectives.trajectory_balance import TrajectoryBalance
    from tba.policy.causal import CausalPolicy
    from tba.policy.lora import LoraSettings, add_adapters
    from tba.protocols import Policy
    from tba.record.memory import peak_memory_bytes, resident_memory_bytes
    from tba.schedules import Constant
    from tba.training.gradients import backward
    from tba.training.optimizer import Optimizer, OptimizerSettings
    from tba.training.ranks import Meeting, Ranks
    from tba.training.sharded import Follower, LedOptimizer, LedPolicy

    torch.set_num_threads(1)
    batch, settings = batch_of(2, 10, 128), OptimizerSettings(lr=1e-5)
    if case == "adapters":
        importlib.import_module("peft")  # before memory is looked at
    before = resident_memory_bytes() or 0

    def policy() -> CausalPolicy:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.width // 64,
            intermediate_size=size.ff,
            max_position_embeddings=512,
        )
        model = LlamaForCausalLM(config)
        if case == "adapters":
            add_adapters(model, LoraSettings(rank=16))
        return CausalPolicy(model, gradient_checkpointing=case == "checkpointed")

    def train(own: Policy, optimizer: Optimizer, ranks: int) -> None:
        for step in range(1, 4):
            backward(own, TrajectoryBalance(Constant(0.05)), batch, step, 10**6, ranks=ranks)
            optimizer.step(step)

    if case != "two ranks":
        own = policy()
        train(own, settings.start(own.parameters()), 1)
        return peak_memory_bytes() - before
    with tempfile.TemporaryDirectory() as folder:
        rank = int(os.fork() == 0)
        ranks = Ranks(rank, 2, Meeting(dist.FileStore(f"{folder}/store", 2)), torch.device("cpu"), 600.0, 600.0)
        own = policy()
        own.shard(ranks.sharding(torch.float32))
        if rank:
            Follower(own, settings.start(own.parameters()), ranks, 10**6).follow()
            Path(folder, "peak").write_text(str(peak_memory_bytes()))
            os._exit(0)
        train(LedPolicy(own, ranks, 10**6), LedOptimizer(ranks, settings, own.parameters(), []), 2)
        ranks.say("end")
        os.wait()
        return max(peak_memory_bytes(), int(Path(folder, "peak").read_text())) - before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="the smallest model only")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "SIZE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(measure(given.one[0], next(size for size in SMALL if size.name == given.one[1])))
        return
    print("measured (MB above a process without a model)")
    for size in SMALL[: 1 if given.quick else None]:
        for case in CASES:
            command = [sys.executable, __file__, "--one", case, size.name]
            peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
            print(f"{size.name} ({size.parameters / 1e6:.1f} M): {case}: {peak / 1e6:.0f} MB", flush=True)
    print("computed (GB on each rank; 8192 tokens a pass)")
    for size in LARGE:
        row = ", ".join(f"{ranks} ranks {computed(size, ranks, 8192) / 1e9:.0f}" for ranks in (1, 2, 4, 8, 16))
        print(f"{size.name}: {size.parameters / 1e9:.2f} B: {row}")


if __name__ == "__main__":
    main()
