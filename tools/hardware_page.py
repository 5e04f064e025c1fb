"""Writes docs/hardware.md: which settings fit on one GPU, by its memory and the size of the model; where the paper's
recipes run on one to eight GPUs; and what one GPU was measured to do.

    python tools/hardware_page.py

Invariant: what fits is computed by `tba.runtime.sizing` and `tba.models.memory`, as `tba train` and `tba check` do;
nothing of it was run. What was measured is from `one_gpu_figures.py`. A test keeps the page up to date.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from one_gpu_figures import measured
from transformers import GPTNeoXConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from tba.apps.preference.tldr import Tldr
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.models.memory import Shape
from tba.policy.lora import LoraSettings
from tba.recipe import Recipe
from tba.runtime.devices import SLACK, USABLE
from tba.runtime.hardware import Machine
from tba.runtime.needs import needs, seconds_to_move
from tba.runtime.sizing import memory_shortage, places_on, refuse_what_cannot_fit, sizing_flags, unused_gpus
from tba.settings import find, override

PAGE = Path(__file__).parents[1] / "docs" / "hardware.md"
GB = 10**9
GPUS = (24, 48, 80, 141)  # GB
COUNTS = (1, 2, 4, 8)  # GPUs of a machine
MEMORY = 256  # GB of each of the machines' own memory, for each GPU
MODELS = {  # Qwen2.5's: width, layers, feed-forward width, heads, key-value heads, vocabulary, tied embeddings
    "0.5 B": (896, 24, 4864, 14, 2, 151_936, True),
    "1.5 B": (1536, 28, 8960, 12, 2, 151_936, True),
    "3 B": (2048, 36, 11_008, 16, 2, 151_936, True),
    "7 B": (3584, 28, 18_944, 28, 4, 152_064, False),
}
TOKENS = (16_384, 8192, 4096, 2048)  # of a pass, the most that fit
SLOTS = (64, 32, 16, 8)  # completions at a time
RANK = 16
KINDS: dict[str, dict[str, Any]] = {  # what is trained: fields of the model
    "all weights": {},
    "moments on host": {"moments_on_host": True},
    f"LoRA, rank {RANK}": {"lora": LoraSettings(rank=RANK)},
    "LoRA, 4-bit": {"lora": LoraSettings(rank=RANK), "dtype": "4-bit"},
}

PLAIN = 4096  # tokens of a pass for which no checkpointing is preferred

HEAD = """\
# Hardware

This page answers four questions: [what fits on one GPU](#what-fits-on-one-gpu), [what fits on one to
eight](#what-fits-on-one-to-eight-gpus), [what one card does](#what-one-card-does), and [how trainer and searcher share
it](#two-halves-on-one-card). For your own recipe run `tba check RECIPE`, which uses the same formulas and names fields
that help.

What fits is **computed, not measured**. [Scaling](scaling.md#what-the-trainer-holds) compares the formulas with
measurements. `python tools/hardware_page.py` makes this page, and a test keeps it up to date.

## What fits on one GPU

Trainer and searcher share the GPU. The searcher has engine and reference. CUDA and the driver have {rest:.0%} of the
memory. The other {usable:.0%} is shared out in this order:

1. Each half gets what it needs.
2. The trainer gets a reserve of {slack:.0%} of its need, at least 2 GiB, and then the searcher likewise.
3. The trainer gets the rest. Where vLLM may sample, the searcher gets it, because vLLM makes a larger cache of it.

The table is for `tba train gsm8k`, with prompts and answers of up to 512 tokens each, Qwen2.5's shapes, bfloat16 and
the transformers engine. A cell has three figures: the largest `--max-tokens-per-pass` that fits, and the GB of trainer
and of searcher. *Checkpointing* is `--model.gradient-checkpointing`, and is used if {plain} tokens do not fit without.
A searcher generates {slots} answers at a time (slots), unless the cell has another number. Recipes that leave the slots
open get more where a card has room ([how](scaling.md#what-is-sized-and-how)).
"""
TAIL = """\
*No* means that even `--max-tokens-per-pass {fewest}` with checkpointing and `--model.generation.slots {least}` does
not fit. Torch's allocator keeps freed blocks. In the processes of a run its segments grow, so that it keeps fewer
([how](scaling.md#the-allocator)).

- *LoRA* is `--model.lora.rank {rank}`. It trains {share} of a 7 B model's parameters. Trainer and searcher each hold
  the base in bfloat16.
- *4-bit* is `--model.dtype 4-bit`, which stores the matrices of the base's layers in NF4.
- *Moments on host* is `--optimizer.moments-on-host`. It keeps 8 of the 16 bytes a parameter in the machine's memory.
  The moments move there and back in each update. For 7 B this takes about {seconds:.1f} s, at the 43 and 55 GB/s that
  an H200 reached. Updates are the same to the bit in tests on a CPU. It has not run on a GPU.
- *Longer answers* need more memory for the searcher's keys and values. The trainer needs no more while a prompt and
  its answer fit in a pass.
- *vLLM*'s cache is computed. It is what the slots need, at most what weights, reference and a step leave.

## What fits on one to eight GPUs

The table has the paper's recipes without changes, on machines with {memory} GB of memory for each GPU. A cell says how
many ranks of the trainer and how many searchers there are, one on each GPU. The GB are those of the fullest GPU
without checkpointing. Checkpointing is turned on if more than {usable:.0%} of a GPU would be needed.
"""
REFUSED = """\
Where the table says *no*, `tba train` refuses the recipe and proposes:
"""
JUDGES = """\
Each searcher of tldr also loads two reward models, of 0.4 B and of 6.9 B to evaluate. They take {judges:.0f} GB in
float32, of the machine's memory, or with `--task.device cuda` of the GPU's memory.
"""
RECIPES: dict[str, PretrainedConfig] = {
    "gsm8k": LlamaConfig(  # realtreetune/rho-1b-sft-GSM8K
        vocab_size=32_000,
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        max_position_embeddings=2048,
    ),
    "math": Qwen2Config(  # Qwen2.5-7B
        vocab_size=152_064,
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18_944,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
    ),
    "tldr": GPTNeoXConfig(  # mnoukhov/pythia410m-sft-tldr
        vocab_size=50_304,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=2048,
    ),
}
GOLD = GPTNeoXConfig(  # cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr
    vocab_size=50_304,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    intermediate_size=16_384,
    max_position_embeddings=2048,
)


def config_of(name: str) -> Qwen2Config:
    width, layers, ff, heads, kv_heads, vocabulary, tied = MODELS[name]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ff,
        max_position_embeddings=32_768,
        tie_word_embeddings=tied,
    )


@cache
def folder_of(name: str) -> str:
    """A folder with the configuration of a model, which is all that sizes need."""
    folder = tempfile.mkdtemp()
    config = GOLD if name == "gold" else RECIPES[name] if name in RECIPES else config_of(name)
    config.save_pretrained(folder)
    return folder


def paper(name: str) -> Recipe:
    """A recipe of the paper's on CUDA, with configurations alone."""
    asked = find(name)
    assert isinstance(asked.model, HuggingFace)
    task = asked.task
    if isinstance(task, Tldr):
        task = replace(task, reward_model=folder_of(name), gold=folder_of("gold"))
    return replace(asked, model=replace(asked.model, path=folder_of(name), device="cuda"), task=task)


def page() -> str:
    """The whole page."""
    seven = Shape.of(config_of("7 B"))
    share = f"{100 * seven.adapters(RANK) / seven.parameters:.1f} %"
    seconds = seconds_to_move(recipe("7 B", {"moments_on_host": True}, True, SLOTS[0]))
    shares = {"slack": SLACK, "usable": USABLE, "rest": 1 - USABLE}
    head = HEAD.format(**shares, slots=SLOTS[0], plain=f"{PLAIN:,}")
    figures = {"share": share, "seconds": seconds}
    tail = TAIL.format(**shares, **figures, fewest=TOKENS[-1], least=SLOTS[-1], rank=RANK, memory=MEMORY)
    judges = next(need.total for need in needs(paper("tldr")) if need.part == "rewards on cpu") / GB
    return "\n".join([head, *table(), "", tail, *placements(), "", JUDGES.format(judges=judges), *measured()])


def table() -> Iterator[str]:
    yield f"| model | trained | {' | '.join(f'{gpu} GB' for gpu in GPUS)} |"
    yield "|---" * (2 + len(GPUS)) + "|"
    for name in MODELS:
        for trained, model in KINDS.items():
            cells = (largest(name, model, Machine(MEMORY * GB, (gpu * GB,))) for gpu in GPUS)
            yield f"| {name} | {trained} | {' | '.join(cells)} |"


def largest(name: str, model: Mapping[str, Any], machine: Machine) -> str:
    """Tokens of a pass, whether it is checkpointed, the memory of trainer and searcher, and slots if they are few."""
    for slots in SLOTS:
        for checkpointed in (False, True):
            for tokens in TOKENS:
                tried = replace(recipe(name, model, checkpointed, slots), max_tokens_per_pass=tokens)
                if (checkpointed or tokens >= PLAIN) and memory_shortage(tried, machine) is None:
                    memory = f"{of(tried, ('trainer',))} + {of(tried, ('searcher', 'reference'))} GB"
                    few = "" if slots == SLOTS[0] else f", {slots} slots"
                    return f"{tokens:,} tokens{' with checkpointing' if checkpointed else ''}{few}, {memory}"
    return "no"


def recipe(name: str, model: Mapping[str, Any], checkpointed: bool, slots: int) -> Recipe:
    gsm8k = find("gsm8k")
    assert isinstance(gsm8k.model, HuggingFace)
    generation = replace(gsm8k.model.generation, slots=slots)
    model = dict(model)
    optimizer = replace(gsm8k.optimizer, moments_on_host=model.pop("moments_on_host", False))
    sized = replace(gsm8k.model, path=folder_of(name), device="cuda", generation=generation)
    sized = replace(sized, gradient_checkpointing=checkpointed, **model)
    return replace(gsm8k, model=sized, optimizer=optimizer)


def of(tried: Recipe, parts: tuple[str, ...]) -> str:
    """What these parts need, in GB."""
    return f"{sum(need.total for need in needs(tried) if need.part in parts) / GB:.1f}"


def placements() -> Iterator[str]:
    """The table of recipes on machines, then what is proposed where they do not fit."""
    yield f"| recipe | GPU | {' | '.join('1 GPU' if count == 1 else f'{count} GPUs' for count in COUNTS)} |"
    yield "|---" * (2 + len(COUNTS)) + "|"
    proposed: dict[str, list[str]] = {}
    for name in RECIPES:
        of_cells: dict[str, list[int]] = {}  # what stands in a row -> the GPUs for which it does
        for gpu in GPUS:
            cells = []
            for count in COUNTS:
                cell, helps = placement(name, Machine(count * MEMORY * GB, (gpu * GB,) * count))
                cells.append(cell)
                if helps:
                    proposed.setdefault(helps, []).append(f"{name} on {count} x {gpu} GB")
            of_cells.setdefault(" | ".join(cells), []).append(gpu)
        yield from (f"| {name} | {', '.join(map(str, gpus))} GB | {row} |" for row, gpus in of_cells.items())
    yield f"\n{REFUSED}"
    yield from (f"- {', '.join(where)}: {helps}" for helps, where in proposed.items())


def placement(name: str, machine: Machine) -> tuple[str, str]:
    """Ranks and searchers, or no, with what the fullest GPU needs; and what would help where it does not fit."""
    asked = paper(name)
    made = override(asked, sizing_flags(asked, machine), "", recorded=True)
    assert unused_gpus(made, machine) is None
    by_part = {need.part: need.total for need in needs(made)}
    full = dict.fromkeys(range(len(machine.gpus)), 0)
    for worker, place in places_on(made, machine).items():
        for gpu in place.gpus:
            searcher_bytes = by_part["searcher"] + by_part.get("reference", 0)
            full[gpu] += by_part["trainer"] if "trainer" in worker else searcher_bytes
    ranks = "1 rank" if made.trainer.count == 1 else f"{made.trainer.count} ranks"
    searchers = "1 searcher" if made.searcher_count == 1 else f"{made.searcher_count} searchers"
    shared = "both on it" if len(machine.gpus) == 1 else f"{ranks} + {searchers}"
    needed = f"{max(full.values()) / GB:.1f} GB"
    try:
        refuse_what_cannot_fit(made, machine)
    except UserError as error:
        _, _, flags = str(error).partition(": set ")
        helps = f"`{flags.removesuffix(', with which it fits')}`" if flags else "nothing"
        return f"no, {needed}", helps
    return f"{shared}, {needed}", ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
