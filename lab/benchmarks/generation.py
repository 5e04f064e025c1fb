"""Tokens per second of `TransformersEngine` against `model.generate`, on the same model through the same modules.

    python lab/benchmarks/generation.py [--quick]

Both sides sample at temperature 1 without top-k or top-p from one random Llama, on one thread, in float32. The lengths
are ragged because the model itself ends its completions: its head has a bias that makes EOS about equally likely at
every position, which gives a mean of about 51 of at most 128 tokens. Lengths are not imposed, so that they favour
neither side; tokens are counted up to and including EOS.

`generate` is given batches of as many rows as the engine has slots, prompts of equal length (no padding), its cache,
and stops when the last row of a batch has ended. Repeats are interleaved, so that a change of the machine's speed
affects both. Exits with 1 when the median ratio of the 5M case is below 2.0 (not with --quick).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.generation import generate
from tba.types import Prompt, Sampling

EOS = 1
WANTED = 2.0


@dataclass(frozen=True)
class Case:
    """A model, and a round of `prompts` x `count` completions of it."""

    name: str
    model: LlamaConfig
    prompt_tokens: int
    max_tokens: int
    end: float  # probability of EOS at each position
    prompts: int
    count: int
    slots: int  # and rows in a batch of generate
    repeats: int


def llama(hidden: int, layers: int, inner: int, heads: int, key_heads: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=EOS,
    )


CASES = (
    Case("5M", llama(256, 6, 704, 4, 2, 2048), 64, 128, 0.019, prompts=8, count=20, slots=40, repeats=5),
    Case("quickstart", llama(96, 3, 384, 4, 4, 16), 8, 8, 0.1, prompts=7, count=20, slots=140, repeats=25),
)


class Numbers:
    """A tokenizer that costs nothing: `generate` returns no text either."""

    eos_token_id = EOS

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return ""


def build(case: Case) -> LlamaForCausalLM:
    """The case's random model, with a head that gives EOS its probability."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(case.model)
    model.lm_head = nn.Linear(case.model.hidden_size, case.model.vocab_size)
    model.lm_head.weight = model.model.embed_tokens.weight
    nn.init.zeros_(model.lm_head.bias)
    with torch.no_grad():
        model.lm_head.bias[EOS] = math.log(case.end / (1 - case.end) * (case.model.vocab_size - 1))
    return model.eval()


def lengths_of_engine(engine: TransformersEngine, case: Case, prompts: list[Prompt], seed: int) -> list[int]:
    completions = generate(engine, prompts, case.count, Sampling(), np.random.default_rng(seed))
    return [len(c.tokens) for group in completions for c in group]


@torch.inference_mode()
def lengths_of_generate(model: LlamaForCausalLM, case: Case, prompts: list[Prompt], seed: int) -> list[int]:
    torch.manual_seed(seed)
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=case.max_tokens,
        num_return_sequences=case.count,
        eos_token_id=EOS,
        pad_token_id=EOS,
        use_cache=True,
    )
    lengths: list[int] = []
    together = case.slots // case.count
    for i in range(0, len(prompts), together):
        ids = torch.from_numpy(np.stack([p.tokens for p in prompts[i : i + together]]).astype(np.int64))
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        ended = out[:, case.prompt_tokens :] == EOS
        lengths += torch.where(ended.any(1), ended.int().argmax(1) + 1, ended.shape[1]).tolist()
    return lengths


def measure(case: Case, repeats: int) -> float:
    """Print both sides' speed and their ratio; returns the median ratio."""
    model = build(case)
    settings = EngineSettings(slots=case.slots, max_completion_tokens=case.max_tokens)
    engine = TransformersEngine(model, Numbers(), settings)
    rng = np.random.default_rng(0)
    prompts = [
        Prompt("benchmark", rng.integers(2, case.model.vocab_size, case.prompt_tokens).astype(np.int32))
        for _ in range(case.prompts)
    ]
    sides = {
        "engine": lambda seed: lengths_of_engine(engine, case, prompts, seed),
        "generate": lambda seed: lengths_of_generate(model, case, prompts, seed),
    }
    speed: dict[str, list[float]] = {side: [] for side in sides}
    length: dict[str, list[int]] = {side: [] for side in sides}
    for run in sides.values():
        run(0)  # warm: buffers, caches, clocks
    for repeat in range(repeats):
        for side, run in sides.items():
            start = time.perf_counter()
            lengths = run(repeat + 1)
            speed[side].append(sum(lengths) / (time.perf_counter() - start))
            length[side] += lengths
    ratios = [a / b for a, b in zip(speed["engine"], speed["generate"], strict=True)]
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{case.name}: {parameters / 1e6:.2f}M parameters, {case.prompts} prompts x {case.count}, {case.slots} rows")
    for side in sides:
        mean = float(np.mean(length[side]))
        tokens = median(speed[side])
        print(f"  {side:9} {tokens:7.0f} tokens/s {tokens / mean:7.0f} completions/s  mean length {mean:.1f}")
    print(f"  ratio {median(ratios):.2f} (of {repeats}: {min(ratios):.2f} to {max(ratios):.2f})", flush=True)
    return median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat of the 5M case, for a rough figure")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    ratio = {case.name: measure(case, 1 if quick and case.name == "5M" else case.repeats) for case in CASES}
    if quick:
        return 0
    print(f"wanted: at least {WANTED:.1f} on 5M: {'reached' if ratio['5M'] >= WANTED else 'MISSED'}")
    return 0 if ratio["5M"] >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
