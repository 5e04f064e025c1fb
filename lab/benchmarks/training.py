"""Trajectories per second of a trainer step: `CausalPolicy` against a length-sorted padded forward.

    python lab/benchmarks/training.py [--quick]

Both sides run the forward, the Trajectory Balance loss (VarGrad, at the paper's temperature) and the backward of one
step on one thread, with the same model, tokens and loss, and the program first checks that both give the same
gradient. The optimizer is left out of both.

The baseline is what a careful trainer does with transformers alone: prompt + completion of every row through
`model(...)` with causal `sdpa` and `logits_to_keep`, rows sorted by length and padded a few at a time, the loss once a
group is complete (log Z needs all its rows), then its backward. It is given the fastest of several numbers of rows,
measured first. Tokens are those that a step runs through the model, padding and repeated prompts among them. Repeats
are interleaved, so a machine that changes its speed changes both.

FLOP count what the side's computation needs (2 per weight and token, forward and backward 3 times the forward, causal
pairs once, no padding), as a share of a matrix product's rate measured between the repeats. Peak memory is what one
step adds to a fresh process that holds the model and its gradients.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tba.batch import Batch, collate, micro_batches
from tba.models.arithmetic import product_rate
from tba.policy.causal import CausalPolicy
from tba.types import Completion, Group, Prompt, StopReason, Trajectory, Version

BETA = 0.05
TEMPERATURE = 0.7  # the paper's: both sides divide the logits by it
MAX_TOKENS = 2560  # of the policy's micro-batches
ROWS_AT_ONCE = (2, 5, 10)  # of the baseline, to choose from (20, the whole group, was never the fastest)


@dataclass(frozen=True)
class Shape:
    """Groups of `size` completions of lengths drawn uniformly from `shortest`..`longest`."""

    name: str
    prompt: int
    shortest: int
    longest: int
    wanted: float  # times the baseline's trajectories per second
    groups: int = 2
    size: int = 20


SHAPES = {s.name: s for s in (Shape("gsm8k", 100, 20, 200, 1.7), Shape("tldr", 350, 20, 50, 5.0))}
VOCABULARIES = (2048, 32000)


def model_of(vocabulary: int) -> LlamaForCausalLM:
    """The 5M body: 6 layers of 256, 4 heads on 2 of keys and values."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def batch_of(shape: Shape, vocabulary: int) -> Batch:
    rng = np.random.default_rng(0)
    versions = (Version(), Version())
    groups = []
    for _ in range(shape.groups):
        prompt = Prompt("random", rng.integers(0, vocabulary, shape.prompt).astype(np.int32))
        rows: list[Trajectory] = []
        for length in rng.integers(shape.shortest, shape.longest, shape.size, endpoint=True):
            tokens = rng.integers(0, vocabulary, length).astype(np.int32)
            completion = Completion(tokens, "", StopReason.EOS, versions)
            reference = np.full(length, -np.log(vocabulary), np.float32)
            rows.append(Trajectory(str(len(rows)), prompt, completion, float(rng.random()), reference, Version()))
        groups.append(Group.of(rows))
    return collate(groups)


def loss_of(log_policy_BT: Tensor, batch: Batch) -> Tensor:
    """TB-VarGrad of whole groups, (beta / 2) sum (gap - log Z)^2 with log Z the mean gap of the group."""
    gap_B = batch.reward_B / BETA - (log_policy_BT - batch.log_reference_BT).sum(1)
    log_z_G = torch.stack([gap_B[batch.group_B == g].mean() for g in range(batch.groups)]).detach()
    return BETA / 2 * (gap_B - log_z_G[batch.group_B]).square().sum()


def packed_step(policy: CausalPolicy, batch: Batch) -> None:
    """Micro-batches of whole groups, as the trainer makes them."""
    for rows in micro_batches(batch, MAX_TOKENS):
        part = batch.select(rows)
        loss_of(policy.evaluate(part).log_policy_BT, part).backward()


def padded_step(model: LlamaForCausalLM, batch: Batch, rows_at_once: int) -> None:
    """A group at a time."""
    for g in range(batch.groups):
        part = batch.select((batch.group_B == g).nonzero().flatten())
        loss_of(padded_log_policy(model, part, rows_at_once), part).backward()


def padded_log_policy(model: LlamaForCausalLM, batch: Batch, rows_at_once: int) -> Tensor:
    """[B, T]. The prompts of a shape are equally long: right padding needs no mask, for causality hides it."""
    log_policy_BT = torch.zeros_like(batch.log_reference_BT)
    for rows in torch.argsort(batch.length_B).split(rows_at_once):
        part = batch.select(rows)
        steps = part.completion_BT.shape[1]
        tokens_BT = torch.cat([part.prompt_GP[part.group_B], part.completion_BT], 1)
        logits_BTV = model(input_ids=tokens_BT, logits_to_keep=steps + 1, use_cache=False).logits[:, :-1]
        log_BTV = torch.log_softmax(logits_BTV.float() / TEMPERATURE, -1)
        log_BT = log_BTV.gather(2, part.completion_BT[..., None])[..., 0] * part.mask_BT
        missing = batch.completion_BT.shape[1] - steps
        log_policy_BT = log_policy_BT.index_copy(0, rows, torch.nn.functional.pad(log_BT, (0, missing)))
    return log_policy_BT


def step_of(side: str, model: LlamaForCausalLM, batch: Batch, rows_at_once: int) -> Callable[[], None]:
    if side == "packed":
        policy = CausalPolicy(model, TEMPERATURE)
        return lambda: packed_step(policy, batch)
    return lambda: padded_step(model, batch, rows_at_once)


def check_gradients(model: LlamaForCausalLM, reference_model: LlamaForCausalLM) -> None:
    """After one step of each: the speeds are of the same computation."""
    for (name, a), b in zip(model.named_parameters(), reference_model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        error = float((a.grad - b.grad).abs().max() / a.grad.abs().max())
        assert error < 1e-4, f"the gradients of {name} differ by {error:.1e}"


def useful_flop(model: LlamaForCausalLM, batch: Batch, share_prompt: bool) -> float:
    """Forward and backward of what is needed: projections, causal attention, the head on completions."""
    config = model.config
    body = sum(p.numel() for p in model.model.layers.parameters())
    prompt_B, length_B = batch.prompt_length_G[batch.group_B].double(), batch.length_B.double()
    prompt_tokens = batch.prompt_length_G.double() if share_prompt else prompt_B
    tokens = float(prompt_tokens.sum() + length_B.sum())
    pairs = float((prompt_tokens**2 / 2).sum() + (length_B * (prompt_B + length_B / 2)).sum())
    attention = 4 * pairs * config.hidden_size * config.num_hidden_layers
    head = 2 * float(length_B.sum()) * config.vocab_size * config.hidden_size
    return 3 * (2 * body * tokens + head + attention)


def tokens_run(batch: Batch, rows_at_once: int) -> dict[str, int]:
    """Tokens that a step of either side runs through the model, padding among them."""
    padded = 0
    for g in range(batch.groups):
        lengths = batch.length_B[batch.group_B == g].sort().values
        prompt = int(batch.prompt_length_G[g])
        padded += sum(len(part) * (prompt + int(part.max())) for part in lengths.split(rows_at_once))
    return {"padded": padded, "packed": int(batch.prompt_length_G.sum() + batch.length_B.sum())}


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_mebibytes() -> float:
    """The most memory this process has held (Linux; `ru_maxrss` would be inherited from the parent)."""
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


def peak_memory(side: str, shape: Shape, vocabulary: int, rows_at_once: int) -> float:
    """MiB that one step of a side adds, in a process of its own."""
    argument = f"{side},{shape.name},{vocabulary},{rows_at_once}"
    output = subprocess.run([sys.executable, __file__, "--peak", argument], capture_output=True, text=True, check=True)
    return float(output.stdout)


def print_peak(argument: str) -> None:
    side, name, vocabulary, rows_at_once = argument.split(",")
    batch = batch_of(SHAPES[name], int(vocabulary))
    step = step_of(side, model_of(int(vocabulary)), batch, int(rows_at_once))
    before = peak_mebibytes()
    step()
    print(peak_mebibytes() - before)


def compare(shape: Shape, vocabulary: int, repeats: int) -> bool:
    """One line of the table; whether the wanted ratio was reached in the median."""
    batch = batch_of(shape, vocabulary)
    models = {"padded": model_of(vocabulary), "packed": model_of(vocabulary)}
    packed = step_of("packed", models["packed"], batch, 0)
    packed()
    padded_step(models["padded"], batch, ROWS_AT_ONCE[0])
    check_gradients(models["padded"], models["packed"])
    trial = {n: seconds(partial(padded_step, models["padded"], batch, n)) for n in ROWS_AT_ONCE}
    best = min(trial, key=trial.__getitem__)
    steps = {"padded": step_of("padded", models["padded"], batch, best), "packed": packed}
    times: dict[str, list[float]] = {"padded": [], "packed": []}
    rates = []
    for _ in range(repeats):
        for side, step in steps.items():
            times[side].append(seconds(step))
        rates.append(product_rate(torch.float32, torch.device("cpu")))
    ratios = [a / b for a, b in zip(times["padded"], times["packed"], strict=True)]
    cells = [f"{shape.name:6} {vocabulary:6}"]
    tokens = tokens_run(batch, best)
    for side in steps:
        low, *_, high = speeds = sorted(batch.rows / t for t in times[side])
        share = useful_flop(models[side], batch, side == "packed") / median(times[side]) / median(rates)
        memory = peak_memory(side, shape, vocabulary, best)
        cells.append(
            f"{tokens[side]:6,} {median(times[side]):5.2f} s {median(speeds):5.1f} ({low:4.1f}-{high:4.1f}) "
            f"{share:4.0%} {memory:5.0f} MiB"
        )
    cells.append(f"{median(ratios):5.2f}x ({min(ratios):.2f}-{max(ratios):.2f}), wanted {shape.wanted}x")
    cells.append(f"{best} rows at once; {median(rates) / 1e9:.0f} GFLOP/s")
    print(" | ".join(cells), flush=True)
    return median(ratios) >= shape.wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 repeats instead of 5")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        print_peak(arguments.peak)
        return 0
    print("forward + loss + backward on one thread; of each side: tokens run in a step, seconds of a step,")
    print(
        "trajectories/s as median (spread), useful FLOP/s as a share of the matrix-product rate, peak memory of a step"
    )
    print("shape   vocab | padded, sorted by length | packed, prompt once per group | ratio | baseline; GEMM")
    reached = [compare(s, v, 2 if arguments.quick else 5) for s in SHAPES.values() for v in VOCABULARIES]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
