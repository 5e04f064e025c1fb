"""Seconds of a trainer's pass with adapters: our forward of few kernels against peft's own, side by side.

    python lab/benchmarks/adapters.py [--repeats 5]

Forward and backward of four groups of eight answers (prompts of 70 tokens, answers of 20 to 64) on one thread, by a
model of random weights with SmolLM2-135M's shape and adapters of rank 16 on all linear layers. The repeats of the ways
are interleaved. In bfloat16 a third way is ours with attention left in bfloat16, where `policy.varlen` computes it in
float32 on a CPU. Prints medians with the range, and the ratio of each repeat to ours.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from types import MethodType

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tba.batch import Batch, micro_batches
from tba.policy import varlen
from tba.policy.causal import CausalPolicy
from tba.policy.lora import LoraSettings, add_adapters

GROUPS, ANSWERS, PROMPT, SHORTEST, LONGEST = 4, 8, 70, 20, 64
MAX_TOKENS = 1024  # of a pass, as in the recipe `instruct`


def policy_of(dtype: torch.dtype) -> CausalPolicy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return CausalPolicy(add_adapters(LlamaForCausalLM(config).to(dtype), LoraSettings(rank=16), torch.float32))


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    rows = GROUPS * ANSWERS
    length_B = torch.randint(SHORTEST, LONGEST + 1, (rows,), generator=generator)
    return Batch(
        prompt_GP=torch.randint(5, 40_000, (GROUPS, PROMPT), generator=generator),
        prompt_length_G=torch.full((GROUPS,), PROMPT),
        completion_BT=torch.randint(5, 40_000, (rows, LONGEST), generator=generator),
        length_B=length_B,
        mask_BT=torch.arange(LONGEST) < length_B[:, None],
        log_reference_BT=torch.zeros(rows, LONGEST),
        reward_B=torch.zeros(rows),
        group_B=torch.arange(GROUPS).repeat_interleave(ANSWERS),
    )


def as_peft_does(policy: CausalPolicy) -> CausalPolicy:
    """The same policy, its layers with the forward of their class."""
    for module in policy.model.modules():
        if hasattr(module, "lora_A"):
            module.forward = MethodType(type(module).forward, module)
    return policy


def seconds(policy: CausalPolicy, whole: Batch) -> float:
    began = time.perf_counter()
    for rows in micro_batches(whole, MAX_TOKENS):
        policy.evaluate(whole.select(rows)).log_policy_BT.sum().backward()
    return time.perf_counter() - began


def compare(dtype: torch.dtype, repeats: int) -> None:
    adapters, peft, whole = policy_of(dtype), as_peft_does(policy_of(dtype)), batch()

    def with_attention_in_bfloat16() -> float:
        in_float32, varlen._to_compute_dtype = varlen._to_compute_dtype, lambda x: x
        try:
            return seconds(adapters, whole)
        finally:
            varlen._to_compute_dtype = in_float32

    ways: dict[str, Callable[[], float]] = {
        "ours": lambda: seconds(adapters, whole),
        "peft's forward": lambda: seconds(peft, whole),
    }
    if dtype == torch.bfloat16:
        ways["ours, attention in bfloat16"] = with_attention_in_bfloat16
    for way in ways.values():
        way()  # the first pass finds memory
    times = [{name: way() for name, way in ways.items()} for _ in range(repeats)]
    print(f"{dtype}, {int(whole.length_B.sum())} tokens of answers, {repeats} repeats")
    for name in ways:
        times_of_way, ratios = [t[name] for t in times], [t[name] / t["ours"] for t in times]
        print(
            f"{name:28} {median(times_of_way):6.2f} s ({min(times_of_way):.2f} to {max(times_of_way):.2f}), "
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times ours"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in (torch.bfloat16, torch.float32):
        compare(dtype, arguments.repeats)


if __name__ == "__main__":
    main()
