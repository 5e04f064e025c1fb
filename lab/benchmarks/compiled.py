"""Whether `torch.compile` of the policy's layers pays (`--model.torch-compile`): forward and backward with and without.

    python lab/benchmarks/compiled.py [--quick]

The model and the batches are those of lab/benchmarks/training.py (the 5M body; groups of 20 answers of random lengths
to one prompt), a new batch of other lengths in every step, one thread. First the gradients of both are compared; then
steps of both alternate. *First* is the first step, in which one of them is compiled; the others are given by their
median and spread, and so is the ratio of neighbouring steps.

`--counts` counts kernels in place of that, and times nothing: what one layer launches beside its attention. Compiled,
these are the calls in the code that torch makes for a CPU; on a GPU the same operations are put together. One by one,
they are what a layer more adds to a step on the meta device (kernel_counts.py), where a norm is one kernel already.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import numpy as np
import torch
from kernel_counts import attention_alone, counted, policy_on_meta, step
from kernel_counts import batch_of as meta_batch
from torch._inductor.utils import run_and_get_code

from tba.batch import Batch, collate
from tba.policy.causal import CausalPolicy
from tba.types import Completion, Group, Prompt, StopReason, Trajectory, Version
from training import Shape, model_of, packed_step

SHAPES = (Shape("gsm8k", 100, 20, 200, 0.0), Shape("tldr", 350, 20, 50, 0.0))
VOCABULARY = 2048


def batch_of(shape: Shape, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(shape.groups):
        prompt = Prompt("random", rng.integers(0, VOCABULARY, shape.prompt + int(rng.integers(20))).astype(np.int32))
        rows: list[Trajectory] = []
        for length in rng.integers(shape.shortest, shape.longest, shape.size, endpoint=True):
            tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
            completion = Completion(tokens, "", StopReason.EOS, (Version(), Version()))
            reference = np.full(length, -np.log(VOCABULARY), np.float32)
            rows.append(Trajectory(str(len(rows)), prompt, completion, float(rng.random()), reference, Version()))
        groups.append(Group.of(rows))
    return collate(groups)


def stepped(policy: CausalPolicy, batch: Batch) -> float:
    policy.model.zero_grad()
    began = time.perf_counter()
    packed_step(policy, batch)
    return time.perf_counter() - began


def code_kernels(act: Callable[[], object]) -> int:
    """Returns the kernels in the code that `torch.compile` makes while this acts, for a CPU: each piece of it once."""
    _, codes = run_and_get_code(act)
    calls = "".join(code[code.index("def call(") :] for code in codes)
    return len(re.findall(r"^\s+(?:cpp_fused_\w+|extern_kernels\.\w+)\(", calls, re.MULTILINE))


def print_counts() -> None:
    """Print what a layer launches beside its attention, and what follows for Qwen2.5-0.5B's 24 layers."""
    policy, batch = CausalPolicy(model_of(VOCABULARY), kept_bytes=0, compiled=True), batch_of(SHAPES[0], 0)
    torch._dynamo.utils.counters.clear()
    compiled_count = code_kernels(lambda: packed_step(policy, batch))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]  # of one layer, if all layers share its code
    one, two = (step(policy_on_meta(False, layers=layers), meta_batch()) for layers in (1, 2))
    layer_count = sum(two[part].kernels - one[part].kernels for part in ("forward", "backward"))
    plain_count = layer_count - counted(attention_alone(200)).kernels
    whole_count = sum(
        count.kernels for part, count in step(policy_on_meta(False), meta_batch()).items() if part[0] != "("
    )
    print("| | one by one | compiled |\n|---|---|---|")
    print(f"| a layer beside its attention, forward and backward | {plain_count} | {compiled_count} |")
    print(f"| pieces of code for {policy.model.config.num_hidden_layers} layers | | {graphs} |")
    print(f"| so a step of 24 layers | {whole_count:,} | {whole_count - 24 * (plain_count - compiled_count):,} |")


def farthest(plain: CausalPolicy, compiled: CausalPolicy) -> float:
    """The largest difference of a gradient, as a share of the largest gradient of its parameter."""
    gradients = ([p.grad for p in policy.parameters() if p.grad is not None] for policy in (plain, compiled))
    pairs = zip(*gradients, strict=True)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="3 steps instead of 12")
    parser.add_argument("--counts", action="store_true", help="count kernels, time nothing")
    options = parser.parse_args()
    steps = 3 if options.quick else 12
    torch.set_num_threads(1)
    if options.counts:
        print_counts()
        return
    for shape in SHAPES:
        plain, compiled = CausalPolicy(model_of(VOCABULARY)), CausalPolicy(model_of(VOCABULARY), compiled=True)
        firsts = [stepped(policy, batch_of(shape, 0)) for policy in (plain, compiled)]
        apart = farthest(plain, compiled)
        rows = [[stepped(policy, batch_of(shape, 1 + i)) for policy in (plain, compiled)] for i in range(steps)]
        ratios = [plain_seconds / two for plain_seconds, two in rows]
        for name, first_seconds, column in zip(("plain", "compiled"), firsts, zip(*rows, strict=True), strict=True):
            spread = f"{min(column):.3f} to {max(column):.3f}"
            print(f"{shape.name:6} {name:9} first {first_seconds:6.2f} s, then {median(column):.3f} s ({spread})")
        print(
            f"{shape.name:6} plain / compiled {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
            f"gradients within {apart:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
