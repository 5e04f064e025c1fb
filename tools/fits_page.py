"""Writes docs/fits.md: which settings fit on one GPU, by its memory and the size of the model; and where the paper's
recipes run on one to eight GPUs.

    python tools/fits_page.py

Invariant: every figure is computed by `tba.runtime.sizing` and `tba.models.memory`, as `tba train` and `tba check` do;
nothing was run. The columns *before* are those of the commit before runs were sized (tools/fits_before.csv). A
test keeps the page up to date.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import GPTNeoXConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from tba.apps.preference.tldr import Tldr
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.models.memory import Shape
from tba.policy.lora import LoraSettings
from tba.recipe import Recipe
from tba.runtime.devices import SLACK, USABLE
from tba.runtime.needs import needs, seconds_to_move
from tba.runtime.sizing import Machine, places_on, refuse_what_cannot_fit, sized, too_much, unused
from tba.settings import find, override

PAGE = Path(__file__).parents[1] / "docs" / "fits.md"
BEFORE = Path(__file__).with_name("fits_before.csv")
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
    "the same, moments on the host": {"moments_on_host": True},
    f"LoRA, rank {RANK}": {"lora": LoraSettings(rank=RANK)},
    "LoRA, 4-bit": {"lora": LoraSettings(rank=RANK), "dtype": "4-bit"},
}

PLAIN = 4096  # tokens of a pass for which no checkpointing is preferred

HEAD = """\
# What fits on which GPUs

Which settings fit on a single GPU of 24 to 141 GB, for models of 0.5 to 7 B parameters, and where the paper's recipes
run on one to eight of them. **Computed, not measured**: this page is made by `python tools/fits_page.py` from the
formulas by which `tba train` and `tba check` decide (`src/tba/models/memory.py`, `src/tba/runtime/sizing.py`), and a
test keeps it up to date. What the formulas were compared with: [scaling.md](scaling.md#what-the-trainer-holds); what
one card does: [one_gpu.md](one_gpu.md).

## One GPU

On one GPU all parts share it: the trainer has what it needs and {slack:.0%} more, the searcher (engine and
reference) the rest of {usable:.0%} of its memory; the other {rest:.0%} are for contexts of CUDA and the driver. Where
the sum does not fit, the run is refused. The table is `tba train gsm8k` (prompts and answers of up to 512 tokens) with
Qwen2.5's shapes, bfloat16 (`--model.dtype auto` on CUDA) and the transformers engine. A row has as many slots as fit,
then the largest pass, with checkpointing where no pass of {plain} tokens fits without. GB are what each half needs.
"""
TAIL = """\
*No*: not even `--max-tokens-per-pass {fewest}` with checkpointing and `--model.generation.slots {slots}` fits.
Allocators lose some of what is left over: torch's keeps freed blocks, and fewer with
`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. `--model.lora.rank {rank}` trains {share} of 7 B's parameters, on a
base that either half holds once, in bfloat16; *4-bit*: with `--model.dtype 4-bit`, its layers' matrices in NF4.
*Moments on the host*: with `--optimizer.moments-on-host` 8 of the trainer's 16 bytes a parameter are in the machine's
memory. They go to the GPU and back in each update, which for 7 B takes about {seconds:.1f} s at the 43 and 55 GB/s
that were measured on an H200. Updates are the same to the bit, which is tested on a CPU; on a GPU it has not been run.

- *Longer answers* need more for their keys and values (a searcher), and nothing more for the trainer, whose passes are
  bounded by `--max-tokens-per-pass`, as long as one prompt and answer are no more than that.
- *vLLM* has its cache computed: what the slots need, or what weights, reference and a step leave of the searcher's
  part.
- `tba check RECIPE` computes the same for a recipe where it is called; it and `tba train` name a field that helps where
  it does not fit.

## One to eight GPUs

Where `tba train gsm8k`, `math` and `tldr` run as they are, on machines with {memory} GB of memory for each GPU.
Of *n + m*, *n* are ranks of the trainer and *m* searchers; *one* is a GPU that both share. GB are what the fullest
GPU needs of its {usable:.0%}. *Fits with*: what a refusal proposes. *Before*: one rank and the recipes' own searchers
(3, 1, 3), and on a single GPU half of it for the trainer.

The reward models of tldr, which each of its searchers loads as well (0.4 B and, to evaluate, 6.9 B in float32, on the
CPU: {judges:.0f} GB), are counted in the machine's memory; with `--task.device cuda` in that of the searcher's GPU.
"""
COLUMNS = (
    *("GPU", "model", "trained", "`--max-tokens-per-pass`", "`--model.gradient-checkpointing`", "trainer, GB"),
    *("`--model.generation.slots`", "searcher, GB"),
)
PLACED = ("recipe", "GPUs", "before", "fitted", "idle", "now", "fits", "idle", "fullest GPU, GB", "fits with")
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
    head = HEAD.format(**shares, plain=f"{PLAIN:,}")
    judges = next(need.total for need in needs(paper("tldr")) if need.part == "rewards on cpu") / GB
    figures = {"share": share, "seconds": seconds, "judges": judges}
    tail = TAIL.format(**shares, **figures, fewest=TOKENS[-1], slots=SLOTS[-1], rank=RANK, memory=MEMORY)
    return "\n".join([head, *table(), "", tail, *placements(), ""])


def table() -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for gpu in GPUS:
        for name in MODELS:
            for trained, model in KINDS.items():
                cells = (f"{gpu} GB", name, trained, *largest(name, model, Machine(MEMORY * GB, (gpu * GB,))))
                yield f"| {' | '.join(cells)} |"


def largest(name: str, model: Mapping[str, Any], machine: Machine) -> tuple[str, ...]:
    """Tokens of a pass, whether it is checkpointed, the trainer's memory, slots, and the searcher's memory."""
    for slots in SLOTS:
        for checkpointed in (False, True):
            for tokens in TOKENS:
                tried = replace(recipe(name, model, checkpointed, slots), max_tokens_per_pass=tokens)
                if (checkpointed or tokens >= PLAIN) and too_much(tried, machine) is None:
                    halves = (of(tried, ("trainer",)), str(slots), of(tried, ("searcher", "reference")))
                    return f"{tokens:,}", "on" if checkpointed else "off", *halves
    return "no", "", "", "", ""


def recipe(name: str, model: Mapping[str, Any], checkpointed: bool, slots: int) -> Recipe:
    gsm8k = find("gsm8k")
    assert isinstance(gsm8k.model, HuggingFace)
    generation = replace(gsm8k.model.generation, slots=slots)
    model = dict(model)
    optimizer = replace(gsm8k.optimizer, moments_on_host=model.pop("moments_on_host", False))
    own = {"path": folder_of(name), "device": "cuda", "gradient_checkpointing": checkpointed, "generation": generation}
    return replace(gsm8k, model=replace(gsm8k.model, **own, **model), optimizer=optimizer)


def of(tried: Recipe, parts: tuple[str, ...]) -> str:
    """What these parts need, in GB."""
    return f"{sum(need.total for need in needs(tried) if need.part in parts) / GB:.1f}"


def placements() -> Iterator[str]:
    yield f"| {' | '.join(PLACED)} |"
    yield "|---" * len(PLACED) + "|"
    with BEFORE.open(newline="") as file:
        before = {(row["recipe"], int(row["gpu_gb"]), int(row["gpus"])): row for row in csv.DictReader(file)}
    for name in RECIPES:
        for gpu in GPUS:
            for count in COUNTS:
                then = before[name, gpu, count]
                shared = "one" if count == 1 else f"{then['ranks']} + {then['searchers']}"
                old = (shared, then["fits"], then["unused"])
                cells = (
                    name,
                    f"{count} x {gpu} GB",
                    *old,
                    *placement(name, Machine(count * MEMORY * GB, (gpu * GB,) * count)),
                )
                yield f"| {' | '.join(cells)} |"


def placement(name: str, machine: Machine) -> tuple[str, ...]:
    """Ranks and searchers, whether they fit, idle GPUs, what the fullest GPU needs, and what would help."""
    asked = paper(name)
    made = override(asked, sized(asked, machine), "", recorded=True)
    by_part = {need.part: need.total for need in needs(made)}
    full = dict.fromkeys(range(len(machine.gpus)), 0)
    for worker, place in places_on(made, machine).items():
        for gpu in place.gpus:
            full[gpu] += by_part["trainer"] if "trainer" in worker else by_part["searcher"] + by_part["reference"]
    shared = "one" if len(machine.gpus) == 1 else f"{made.trainer.count} + {made.searcher_count}"
    idle = "0" if (said := unused(made, machine)) is None else said.split()[0]
    needed = f"{max(full.values()) / GB:.1f} of {USABLE * machine.gpus[0] / GB:.1f}"
    try:
        refuse_what_cannot_fit(made, machine)
    except UserError as error:
        _, _, flags = str(error).partition(": set ")
        helps = f"`{flags.removesuffix(', with which it fits')}`" if flags else "nothing that is proposed"
        return shared, "no", idle, needed, helps
    return shared, "yes", idle, needed, ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
