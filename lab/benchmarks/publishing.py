"""What publishing the weights costs: between steps, and in the background.

    python lab/benchmarks/publishing.py [--quick]
    python lab/benchmarks/publishing.py --places 512 [--code NAME] [--out publishing.csv]

A random Llama of 50 M parameters (float32), one thread. Three rounds; in each a step with nothing published, one that
publishes before it continues, and one that publishes in the background, in this order. *Time* is that of writing alone
(to a folder on this disk, not flushed); *critical path* is what the step's thread spends in `publish` and `settle`;
*memory* is the largest rise of resident memory while weights are written and nothing else is done.

Then the size of a version in each type, full and as the changes of one step
(`--publish.full-version-every`), at learning
rates of 1e-5 and 1e-6: megabytes, and seconds to write it (medians of three steps).

With `--places`, instead, one version of so many megabytes (float32) is published on the disk and in memory
(`--publish.in-memory`) in turn, three times each, and read into tensors of the same process: CPU seconds of this
process and wall seconds of each, after four versions that are not counted. `--out` appends a row for each, with the
name of the code that was measured: to compare two commits, call this in a working tree of each.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tba.batch import Batch, collate
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.causal import CausalPolicy
from tba.protocols import Manifest
from tba.record.memory import resident_memory_bytes
from tba.schedules import Constant
from tba.training.gradients import backward
from tba.training.optimizer import Optimizer, OptimizerSettings
from tba.types import Completion, Group, Prompt, StopReason, Trajectory, Version
from tba.weights.background import BackgroundPublisher
from tba.weights.directory import PublishSettings, WeightDirectory

ROUNDS = 3
WARM_UP_VERSIONS = 4
PLACE_COLUMNS = (
    *("code", "place", "megabytes", "repeat", "publish_cpu_seconds", "publish_wall_seconds"),
    *("read_cpu_seconds", "read_wall_seconds"),
)


def policy_of(quick: bool) -> CausalPolicy:
    torch.manual_seed(0)
    width, layers, vocabulary = (128, 2, 512) if quick else (512, 13, 8192)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        intermediate_size=int(2.75 * width),
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    return CausalPolicy(LlamaForCausalLM(config))


def batch_of(groups: int, size: int, length: int) -> Batch:
    rng = np.random.default_rng(0)
    batch_groups = []
    for g in range(groups):
        prompt = Prompt("random", rng.integers(1, 500, 64).astype(np.int32), str(g))
        rows = []
        for i in range(size):
            tokens = rng.integers(1, 500, length).astype(np.int32)
            completion = Completion(tokens, "", StopReason.LENGTH, (Version(), Version()))
            reward = float(rng.integers(2))
            rows.append(
                Trajectory(f"{g}-{i}", prompt, completion, reward, np.full(length, -6.0, np.float32), Version())
            )
        batch_groups.append(Group.of(rows))
    return collate(batch_groups)


def step(policy: CausalPolicy, optimizer: Optimizer, batch: Batch, settle: Callable[[], None]) -> float:
    """Seconds that it waited for who still read the weights."""
    backward(policy, TrajectoryBalance(Constant(0.05)), batch, 1, 10**6)
    began = time.perf_counter()
    settle()
    waited = time.perf_counter() - began
    optimizer.step(1)
    return waited


def rise_in_memory(act: Callable[[], object]) -> int:
    """The most that resident memory is above what it was before, in bytes, looked at every 0.2 ms."""
    before, most, done = resident_memory_bytes() or 0, 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not done.wait(0.0002):
            most = max(most, (resident_memory_bytes() or 0) - before)

    looking = threading.Thread(target=look)
    looking.start()
    act()
    done.set()
    looking.join()
    return most


def sizes(policy: CausalPolicy, batch: Batch) -> None:
    """One line for each type and learning rate."""
    print(f"{'type':10} {'lr':>6} {'whole MB':>9} {'s':>6} {'changes MB':>11} {'s':>6}")
    for lr in (1e-5, 1e-6):
        optimizer = OptimizerSettings(lr=lr).start(policy.parameters())
        for _ in range(3):  # the first steps of AdamW are its largest
            step(policy, optimizer, batch, lambda: None)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            rows = []
            for _ in range(ROUNDS):
                with tempfile.TemporaryDirectory() as folder:
                    directory = WeightDirectory(Path(folder), settings=PublishSettings(2), dtype=dtype)
                    row: list[float] = []
                    for i in range(2):
                        began = time.perf_counter()
                        directory.publish(policy.weights(), Version(0, i), Manifest())
                        row += [directory.file(Version(0, i)).stat().st_size / 1e6, time.perf_counter() - began]
                        if i == 0:
                            step(policy, optimizer, batch, lambda: None)
                    rows.append(row)
            whole, whole_s, changes, changes_s = (median(column) for column in zip(*rows, strict=True))
            kind = str(dtype).removeprefix("torch.")
            print(f"{kind:10} {lr:6.0e} {whole:9.1f} {whole_s:6.3f} {changes:11.2f} {changes_s:6.3f}")


def measure_places(megabytes: int, code: str, out: Path | None) -> None:
    """Prints, and appends to `out`, what publishing and reading a version costs in each place."""
    tensors = {f"layer.{i}": torch.randn(megabytes << 14) for i in range(16)}
    engine_tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        places = {
            place: (WeightDirectory(Path(folder) / place, settings=PublishSettings(in_memory=place == "memory")))
            for place in ("disk", "memory")
        }
        readers = {place: WeightDirectory(directory.path) for place, directory in places.items()}
        for i in range(WARM_UP_VERSIONS + ROUNDS):
            for place, directory in places.items():
                publishing = seconds_of(partial(directory.publish, tensors, Version(0, i), Manifest()))
                reading = seconds_of(partial(load_newest, readers[place], engine_tensors))
                assert all(torch.equal(engine_tensors[name], tensor) for name, tensor in tensors.items())
                if i >= WARM_UP_VERSIONS:
                    rows.append([code, place, megabytes, i - WARM_UP_VERSIONS, *publishing, *reading])
        for directory in places.values():
            directory.close()
    for row in rows:
        print(*(f"{value:.3f}" if isinstance(value, float) else value for value in row))
    if out is not None:
        is_new = not out.exists()
        with out.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(PLACE_COLUMNS)
            writer.writerows([[f"{v:.3f}" if isinstance(v, float) else v for v in row] for row in rows])


def load_newest(directory: WeightDirectory, engine_tensors: dict[str, torch.Tensor]) -> None:
    published = directory.newer_than(None)
    assert published is not None
    for name, tensor in published.read().items():
        engine_tensors[name].copy_(tensor)


def seconds_of(act: Callable[[], object]) -> tuple[float, float]:
    """Returns the CPU seconds of this process and the wall seconds that a call takes."""
    cpu, wall = time.process_time(), time.perf_counter()
    act()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--places", type=int, metavar="MB", help="compare the disk and memory with versions of this size"
    )
    parser.add_argument("--code", default="", help="name of the code that is measured, for --out")
    parser.add_argument("--out", type=Path, help="CSV that the rows of --places are appended to")
    parser.add_argument("--quick", action="store_true", help="a small model, to see whether it runs")
    options = parser.parse_args()
    quick = options.quick
    torch.set_num_threads(1)
    if options.places:
        measure_places(options.places, options.code, options.out)
        return
    policy = policy_of(quick)
    batch = batch_of(1 if quick else 2, 10, 16 if quick else 128)
    optimizer = OptimizerSettings(lr=1e-5).start(policy.parameters())
    size = sum(t.numel() * t.element_size() for t in policy.weights().values())
    parameters = sum(p.numel() for p in policy.parameters())
    with tempfile.TemporaryDirectory() as folder:
        directory = WeightDirectory(Path(folder))
        publisher, versions = BackgroundPublisher(directory, 600.0), iter(range(10**6))
        step(policy, optimizer, batch, lambda: None)
        directory.publish(policy.weights(), Version(0, next(versions)), Manifest())
        rows = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            step(policy, optimizer, batch, lambda: None)
            bare = time.perf_counter() - began
            began = time.perf_counter()
            directory.publish(policy.weights(), Version(0, next(versions)), Manifest())
            in_turn = time.perf_counter() - began
            step(policy, optimizer, batch, lambda: None)
            began = time.perf_counter()
            publisher.publish(policy.weights(), Version(0, next(versions)), Manifest())
            publish_seconds = time.perf_counter() - began
            waited = step(policy, optimizer, batch, publisher.settle)
            behind = time.perf_counter() - began
            rows.append((bare, in_turn, publish_seconds + waited, behind))
        memory = rise_in_memory(lambda: directory.publish(policy.weights(), Version(0, next(versions)), Manifest()))
        publisher.close()
    bare, in_turn, critical, behind = (median(column) for column in zip(*rows, strict=True))
    spread = [f"{min(column):.4g} to {max(column):.4g}" for column in zip(*rows, strict=True)]
    print(f"{parameters / 1e6:.1f} M parameters, {size / 1e6:.0f} MB; {int(batch.length_B.sum())} tokens a step")
    print(f"a step that publishes nothing: {bare:.3f} s ({spread[0]})")
    print(f"writing the weights: {in_turn:.3f} s ({spread[1]}), memory {memory / 1e6:.1f} MB above what was there")
    print(f"in the background: critical path {critical:.5f} s ({spread[2]}), {100 * critical / bare:.3f} % of a step")
    print(f"a step with publishing beside it: {behind:.3f} s ({spread[3]}), {behind / bare:.3f} of one without")
    sizes(policy, batch)


if __name__ == "__main__":
    main()
