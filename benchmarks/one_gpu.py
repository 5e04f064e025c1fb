"""What one GPU does with this program: its tests, a run, and a model of 0.5 B parameters, in under 8 minutes.

    make test-gpu                                        # on a machine with a GPU
    python benchmarks/one_gpu.py --device cpu --small    # the same with a tiny model, to see that the script works

Five parts, each in processes of its own; one that fails, or for which no time is left, is reported, and the others go
on.

- *Tests*: those marked `gpu` (tests/test_gpu.py).
- *Quickstart*: `tba train quickstart` on the device: accuracy, seconds, idle shares.
- *Trainer*: steps of a model of random weights with Qwen2.5-0.5B's shape, alone on the device, checkpointed, in the
  recipe's precision: 3 groups of 20 answers of 200 tokens to prompts of 100. Tokens/s; FLOP that the step needs (6 for
  each parameter and token; recomputing is not needed) as a share of what a large matrix product reaches in the same
  precision; kernels launched (CUDA only); peak memory and what `tba.models.memory` computes; seconds to publish a
  version, and to load it into an engine.
- *Searcher*: tokens/s of the transformers engine with 72 slots, and its peak memory and what is computed.
- *Both*: ten updates of that model by `tba train`: idle shares with both halves on the device.

Prints a table, and writes everything as JSON (`--out`, one_gpu.json).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainer_memory import qwen2
from transformers import Qwen2Config, Qwen2ForCausalLM

from tba.batch import Batch, Fetched, collate
from tba.command.needs import needs
from tba.generation import generate
from tba.models.arithmetic import product_rate
from tba.models.huggingface import HuggingFace
from tba.models.memory import Pass, Shape, total, trainer
from tba.recipe import Recipe
from tba.record.memory import machine, peak_gpu_memory_bytes, peak_memory_bytes, resident_memory_bytes, versions
from tba.runtime.leading import start_policy, start_ranks
from tba.runtime.prompting import prompts_of
from tba.settings import find, override
from tba.training.tiny_models import character_tokenizer
from tba.training.trainer import Trainer
from tba.types import Completion, Group, Prompt, StopReason, Trajectory, Version
from tba.weights.directory import WeightDirectory

ROOT = Path(__file__).parents[1]
STEPS = 5  # timed, after one to warm up
LARGE = ((896, 24, 4864, 14, 2, 151_936), 3, 20, 200, 100)  # shape; groups, answers, tokens of each, of a prompt
SMALL = ((64, 2, 128, 2, 1, 1000), 2, 4, 12, 10)
BEGAN = time.monotonic()
SECONDS = 470.0  # deadline of everything


def config_of(small: bool) -> Qwen2Config:
    return qwen2(*(SMALL if small else LARGE)[0], max_position_embeddings=2048, eos_token_id=0)


def arguments_of(folder: Path, device: str, small: bool) -> list[str]:
    """The recipe's settings, as `tba train quickstart` takes them."""
    _, groups, size, length, _ = SMALL if small else LARGE
    return [
        *("--model.path", str(folder), "--model.device", device, "--model.gradient-checkpointing"),
        *("--model.generation.max-completion-tokens", str(length), "--model.generation.slots", "72"),
        *("--groups-per-step", str(groups), "--group-size", str(size), "--samples-per-prompt", str(size)),
        *("--prompts-per-round", str(groups), "--replay.pacing.warm-up", "0", "--steps", "10"),
        *("--evaluation.every", "0", "--evaluation.problems", "1", "--task.forgotten-carries", "0"),
    ]


def model_in(folder: Path, small: bool) -> None:
    """Write random weights and a tokenizer of characters."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(config_of(small)).to(torch.bfloat16).save_pretrained(folder)
    character_tokenizer("0123456789+=").save_pretrained(folder)


def seconds_of(act: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    act()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def batch_of(small: bool, vocabulary: int) -> Fetched:
    """Answers of random tokens."""
    _, groups, size, length, prompt = SMALL if small else LARGE
    rng = np.random.default_rng(0)

    def answer(asked: Prompt, name: str) -> Trajectory:
        tokens = rng.integers(1, vocabulary, length).astype(np.int32)
        completion = Completion(tokens, "", StopReason.LENGTH, (Version(), Version()))
        reference = np.full(length, -np.log(vocabulary), np.float32)
        return Trajectory(name, asked, completion, float(rng.integers(2)), reference, Version())

    made = []
    for g in range(groups):
        asked = Prompt("random", rng.integers(1, vocabulary, prompt).astype(np.int32), str(g))
        made.append(Group.of([answer(asked, f"{g}-{i}") for i in range(size)]))
    return Fetched(made, collate(made))


def trainer_half(recipe: Recipe, device: str, small: bool) -> dict[str, Any]:
    model = recipe.model
    assert isinstance(model, HuggingFace)
    shape, fetched = Shape.of(config_of(small)), batch_of(small, config_of(small).vocab_size)
    before = resident_memory_bytes() or 0
    policy, optimizer = start_policy(recipe, start_ranks(recipe, 0), None)
    with tempfile.TemporaryDirectory() as folder:
        weights = WeightDirectory(Path(folder), dtype=model.compute)
        own = Trainer(policy, recipe.objective, weights, optimizer, 1, recipe.max_tokens_per_pass, Path(folder))
        seconds_of(lambda: own.step(fetched), device)
        step = min(seconds_of(lambda: own.step(fetched), device) for _ in range(STEPS))
        kernels = launches(lambda: own.step(fetched)) if device == "cuda" else None
        peak = peak_gpu_memory_bytes() or peak_memory_bytes() - before
        published = seconds_of(own.publish, device)
        engine = model.engine(Version())
        loaded = seconds_of(lambda: engine.load(weights.at(own.version).read(), own.version), device)
    tokens = tokens_of(fetched.batch)
    rate = product_rate(model.compute, torch.device(device))
    of = Pass(tokens, model.precision, device, checkpointed=True)
    return {
        "seconds_per_step": step,
        "tokens_per_second": tokens / step,
        "share_of_product_rate": 6 * shape.parameters * tokens / step / rate,
        "product_flop_per_second": rate,
        "kernels_per_step": kernels,
        "peak_bytes": peak,
        "computed_bytes": total(trainer(shape, of)),
        "publish_seconds": published,
        "load_seconds": loaded,
    }


def tokens_of(batch: Batch) -> int:
    return int(batch.length_B.sum() + batch.prompt_length_G.sum())


def launches(act: Callable[[], object]) -> int:
    """Kernels that the device ran meanwhile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        act()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return sum(event.count for event in profile.key_averages() if event.device_type == on_device)


def searcher_half(recipe: Recipe, device: str, small: bool) -> dict[str, Any]:
    model = recipe.model
    assert isinstance(model, HuggingFace)
    before = resident_memory_bytes() or 0
    engine, reference = model.engine(Version()), model.reference(1.0, Version())
    asked = prompts_of(recipe, model.tokenizer(), "train")[: recipe.prompts_per_round]
    rng, answers = np.random.default_rng(0), []

    def a_round() -> None:
        sampling = recipe.exploration.draw(rng)
        answers[:] = generate(engine, asked, recipe.samples_per_prompt, sampling, rng)

    a_round()
    seconds = seconds_of(a_round, device)
    scoring = seconds_of(lambda: reference.log_probabilities_of(list(zip(asked, answers, strict=True))), device)
    tokens = sum(len(c.tokens) for row in answers for c in row)
    found = needs(recipe, Shape.of(config_of(small)))
    return {
        "tokens_per_second": tokens / seconds,
        "scored_tokens_per_second": tokens / scoring,
        "peak_bytes": peak_gpu_memory_bytes() or peak_memory_bytes() - before,
        "computed_bytes": sum(total(need.parts) for need in found if need.part in ("searcher", "reference")),
    }


def a_run(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Accuracy, seconds and idle shares of a `tba train quickstart`."""
    command = [sys.executable, "-m", "tba", "train", "quickstart", "--runs", str(folder), "--run-name", "run"]
    subprocess.run([*command, *arguments], check=True, capture_output=True, text=True, timeout=left())
    summary = json.loads((folder / "run" / "summary.json").read_text())
    kept = ("trainer_idle", "trainer_paced", "searcher_idle", "searcher_paced", "wall_seconds", "peak_memory_bytes")
    values = {e["metric"]: e["value"] for e in summary["evaluations"]}  # the last of each
    return {name: summary[name] for name in kept} | {"evaluations": values}


def tests(device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests" / "test_gpu.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=left(), env=os.environ | {"TBA_TEST_DEVICE": device}
    )
    return {"passed": done.returncode == 0, "said": done.stdout.strip().splitlines()[-1:]}


def in_a_process(half: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """A half of the program alone; what it measured is its last line."""
    command = [sys.executable, __file__, "--device", given.device, "--half", half, str(folder)]
    done = subprocess.run(
        command + ["--small"] * given.small, check=True, capture_output=True, text=True, timeout=left()
    )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def left() -> float:
    """Seconds until the deadline."""
    return max(1.0, SECONDS - (time.monotonic() - BEGAN))


def attempted(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        found = act()
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines()
        found = {"failed": said[-1] if said else str(error)}
    return found | {"seconds": time.perf_counter() - began}


def table(parts: dict[str, dict[str, Any]]) -> str:
    rows = ["| part | | |", "|---|---|---|"]
    for part, found in parts.items():
        rows += [f"| {part} | {name} | {shown(value)} |" for name, value in found.items()]
    return "\n".join(rows)


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model and a short quickstart")
    parser.add_argument("--out", type=Path, default=Path("one_gpu.json"))
    parser.add_argument("--half", nargs=2, metavar=("HALF", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.half:
        arguments = arguments_of(Path(given.half[1]), given.device, given.small)
        recipe = override(find("quickstart"), arguments, "one_gpu", recorded=True)
        half = {"trainer": trainer_half, "searcher": searcher_half}[given.half[0]]
        print(json.dumps(half(replace(recipe, model=recipe.model.prepared(recipe.task)), given.device, given.small)))
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        print("this machine shows no GPU: --device cpu --small proves the script without one", file=sys.stderr)
        return 2
    short = ["--steps", "20", "--evaluation.every", "0", "--evaluation.problems", "50"] if given.small else []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model_in(folder / "model", given.small)
        both = arguments_of(folder / "model", given.device, given.small)
        parts = {
            "tests": attempted(lambda: tests(given.device)),
            "quickstart": attempted(lambda: a_run(["--model.device", given.device, *short], folder / "quickstart")),
            "trainer": attempted(lambda: in_a_process("trainer", folder / "model", given)),
            "searcher": attempted(lambda: in_a_process("searcher", folder / "model", given)),
            "both": attempted(lambda: a_run(both, folder / "both")),
        }
    about = {"device": given.device, "small": given.small, "machine": machine(), "versions": versions()}
    given.out.write_text(json.dumps(about | parts, indent=2) + "\n")
    print(table(parts))
    failed = any("failed" in found for found in parts.values()) or not parts["tests"].get("passed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
