"""The memory of a searcher's engine and reference: computed by `tba.models.memory`, and measured for the same case.

    python lab/benchmarks/searcher_memory.py [--quick]

Each case is a process of its own on one thread, with random weights in float32, in the sizes of `trainer_memory.py`
and measured as there. *Engine*: 64 slots answer 32 prompts of 64 tokens twice at temperature 0.7, in two rounds.
*Reference*: one pass of 8,192 tokens (0.5 B: 1,024), a prompt and its answers. With adapters (LoRA, rank 16) the
reference shares the base of the engine, which is there before: what is measured is what comes on top.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import numpy as np
import torch
from trainer_memory import RANK, RETURNED, SIZES, config_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.generation import generate
from tba.models import memory
from tba.models.precision import choose_precision
from tba.policy.lora import LoraSettings, add_adapters, copy_on_same_base, switch_adapters
from tba.policy.reference import FrozenReference
from tba.record.memory import peak_memory_bytes, resident_memory_bytes
from tba.types import Completion, Prompt, Sampling, StopReason, Version

SLOTS, PROMPT = 64, 64
WORK = {"tiny": (8, 512), "9 M": (128, 8192), "50 M": (64, 8192), "0.5 B": (8, 1024)}  # tokens of an answer, of a pass
CASES = {  # part, whether there are adapters
    "engine": ("engine", False),
    "engine, adapters": ("engine", True),
    "reference": ("reference", False),
    "reference, adapters": ("reference", True),
}


class Numbers:
    """A tokenizer of which only the end of text is used."""

    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


def computed(size: str, case: str) -> memory.Bytes:
    part, adapters = CASES[case]
    low = choose_precision("float32", "cpu", adapters)
    of = memory.SearcherWorkload(low, SLOTS, PROMPT + WORK[size][0], PROMPT, WORK[size][1], "cpu", RANK * adapters)
    shape = memory.Shape.of(config_of(size))
    return memory.engine_bytes(shape, of) if part == "engine" else memory.reference_bytes(shape, of)


def measured(size: str, case: str) -> int:
    """In this process: bytes at the peak above those after a tiny model."""
    torch.set_num_threads(1)
    part, adapters = CASES[case]
    act = sampled if part == "engine" else scored
    act(model_of("tiny", adapters), "tiny")
    base = model_of(size, adapters) if part == "reference" and adapters else None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident_memory_bytes() or 0
    if base is not None:
        searcher_model = copy_on_same_base(base)
        switch_adapters(searcher_model, enabled=False)
    else:
        searcher_model = model_of(size, adapters)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again: see `trainer_memory.train`
    act(searcher_model, size)
    return peak_memory_bytes() - before


def model_of(size: str, adapters: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.float32).eval()
    return add_adapters(model, LoraSettings(rank=RANK)) if adapters else model


def prompts(count: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt("random", rng.integers(1, 500, PROMPT).astype(np.int32), str(i)) for i in range(count)]


def sampled(model: PreTrainedModel, size: str) -> None:
    settings = EngineSettings(slots=SLOTS, max_completion_tokens=WORK[size][0])
    engine = TransformersEngine(model, Numbers(), settings, Version())
    for _ in range(2):  # the second round has the cache of the first beside it while it reads prompts
        generate(engine, prompts(SLOTS // 2), 2, Sampling(0.7, 1.0), np.random.default_rng(0))


def scored(model: PreTrainedModel, size: str) -> None:
    rng, (length, tokens) = np.random.default_rng(1), WORK[size]
    completions = [
        Completion(rng.integers(1, 500, length).astype(np.int32), "", StopReason.LENGTH, (Version(), Version()))
        for _ in range((tokens - PROMPT) // length)
    ]
    FrozenReference(model, Version(), tokens_per_pass=tokens).log_probabilities_of([(prompts(1)[0], completions)])


def in_a_process(size: str, case: str) -> int:
    command = [sys.executable, __file__, "--one", size, case]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | RETURNED)
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="the smallest model only")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES)[1:], default=list(SIZES)[1:])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(measured(*options.one))
        return
    print("| model | case | computed, MB | measured, MB | computed / measured |\n|---|---|---|---|---|")
    for size in options.sizes[: 1 if options.quick else None]:
        for case in options.cases:
            needed, live = memory.total(computed(size, case)), in_a_process(size, case)
            cells = (size, case, f"{needed / 1e6:,.0f}", f"{live / 1e6:,.0f}", f"{needed / live:.2f}")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
