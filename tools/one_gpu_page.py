"""Writes docs/one_gpu.md: which settings fit on one GPU, by its memory and the size of the model, and what one does.

    python tools/one_gpu_page.py

Invariant: what fits is computed by `tba.command.needs` and `tba.models.memory`, as `tba check` does. What was measured
is from files that `benchmarks/one_gpu.py` writes; what is in none of them was not measured, and the page says so. A
test keeps the page up to date.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Qwen2Config

from tba.command.needs import Room, needs, refuse_what_cannot_fit
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.models.memory import Shape, total
from tba.policy.lora import LoraSettings
from tba.recipe import Recipe
from tba.runtime.devices import placed
from tba.settings import find

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "one_gpu.md"
BEFORE = DOCS / "results" / "one_gpu_before.json"
AFTER = DOCS / "results" / "one_gpu.json"  # as `benchmarks/one_gpu.py --out` writes it
GB = 10**9
GPUS = (24, 48, 80)  # GB
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
    f"LoRA, rank {RANK}": {"lora": LoraSettings(rank=RANK)},
    "the same, 4-bit": {"lora": LoraSettings(rank=RANK), "dtype": "4-bit"},
}

PLAIN = 4096  # tokens of a pass for which no checkpointing is preferred

HEAD = """\
# One GPU

What fits on one, [what one does](#what-one-card-does), and how [two halves share it](#two-halves-on-one-card). This
page is made by `python tools/one_gpu_page.py`, and a test keeps it up to date.

## What fits

Which settings fit on a single GPU of 24, 48 or 80 GB, for models of 0.5 to 7 B parameters. **Computed, not measured**,
by the formulas that `tba check` uses (`src/tba/models/memory.py`). What they were compared with:
[scaling.md](scaling.md#what-the-trainer-holds).

On one GPU all parts share it: the trainer has {trainer:.0%} of its memory, one searcher (engine and reference)
{searcher:.0%}, and {rest:.0%} are left for contexts of CUDA and the driver. The table is
`tba train gsm8k --searchers 1` (prompts and answers of up to 512 tokens) with Qwen2.5's shapes, bfloat16
(`--model.dtype auto` on CUDA) and the transformers engine. A row has the largest pass and the most slots that fit, and
checkpointing where no pass of {plain} tokens fits without. GB are what each half needs, of what it has.
"""
TAIL = """\
*No*: not even `--max-tokens-per-pass {fewest}` with checkpointing, or `--model.generation.slots {slots}`, fits.
Allocators lose some of what is left over: torch's keeps freed blocks, and fewer with
`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. `--model.lora.rank {rank}` trains {share} of 7 B's parameters, on a
base that either half holds once, in bfloat16; *4-bit*: with `--model.dtype 4-bit`, its layers' matrices in NF4.

- *Longer answers* need more for their keys and values (a searcher), and nothing more for the trainer, whose passes are
  bounded by `--max-tokens-per-pass`, as long as one prompt and answer are no more than that.
- *vLLM* has its cache computed: what the slots need, or what weights, reference and a step leave of the searcher's
  part.
- *The shares are fixed*, so a trainer of all weights is refused although its searcher leaves memory unused. With two
  GPUs each half has one to itself: what 48 GB can do here by themselves, two of 24 GB can do too.
- `tba check RECIPE` computes the same for a recipe where it is called, and names a field that helps where it does not
  fit.
"""
MEASURED = """\
## What one card does

`make test-gpu` (`benchmarks/one_gpu.py`) measures this, part by part, the most telling first, with a model of random
weights of Qwen2.5-0.5B's shape in bfloat16: it needs no network and no download. What a file lacks is said to be so:
nothing here is a guess.

- *Before*: {before}.
  The code that ran on a GPU for the first time: before a decode step was captured, a trainer's kernels became fewer,
  and weights left beside the step. Each of its kernels was launched alone; its log-ratios are of 12 updates without a
  gradient, of answers of 200 tokens; the trainer of its run was checkpointed.
- *After*: {after}.
"""
SHARED = """\
## Two halves on one card

By default trainer and searcher are two processes on the one card: a fault of one does not end the other, neither waits
for the other's Python, and the same code runs on two cards. What this leaves of each half, and what the alternatives
do, `make test-gpu GPU_ARGS="--only sharing arrangements"` measures; {measured}.
*Left* is a share of what a half does when the other is not there: two that merely take turns have 1 together. *Of the
slower half*: the updates a second for which the searcher's tokens suffice, each used once, against those that the
slower half allows alone.
"""
ALTERNATIVES = """\
- *Processes*: without more, the card belongs to one process at a time. A half that waits for its own launches wastes
  its slices of time.
- *MPS*, NVIDIA's Multi-Process Service, runs kernels of several processes side by side. Two lines of a user, before and
  after `tba train`, which needs no setting for it:

        nvidia-cuda-mps-control -d
        echo quit | nvidia-cuda-mps-control

  Not every container permits it. The script starts a server of its own for that row, and ends it. A process that dies
  of a CUDA error under MPS may take the other half with it; each is restarted like any worker.
- *Pinned cores*: each half has half of the cores to itself.
- *Threads, a stream each*: one process, no slices of time, but one interpreter: each half's Python waits for the
  other's.
- *Turns*: one process makes an update, then answers as many tokens as the next one needs, and so on: what overlap has
  to beat.

No alternative is a setting until a card shows that it is better than the default.
"""
NEVER, PENDING = "not measured", "not measured yet"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def gigabytes(value: float) -> str:
    return f"{value / GB:.1f} GB"


OF_ENGINE, OF_REFERENCE = "trainer_against_engine.", "trainer_against_reference."
# part, words, path in the part, what is aimed at, how it is written
FIGURES: tuple[tuple[str, str, str, str, Callable[[float], str]], ...] = (
    ("environment", "to launch a kernel, microseconds", "microseconds_a_launch", "", number),
    ("environment", "a kernel of a captured graph, microseconds", "microseconds_a_kernel_of_a_graph", "", number),
    ("environment", "pinned memory to the card, GB/s", "pinned_to_device_GB_per_second", "", number),
    ("environment", "the card to pinned memory, GB/s", "pinned_to_host_GB_per_second", "", number),
    ("environment", "pageable memory to the card, GB/s", "pageable_to_device_GB_per_second", "", number),
    ("environment", "the card to pageable memory, GB/s", "pageable_to_host_GB_per_second", "", number),
    ("engine", "72 slots: launches a token step", "launches_a_step", "60", number),
    ("engine", "kernels", "kernels_a_step", "", number),
    ("engine", "milliseconds", "milliseconds_a_step", "", number),
    ("engine", "of these in kernels", "kernel_milliseconds_a_step", "", number),
    ("engine", "a round of 3 x 24 answers of 7 to 256 tokens, shapes new, s", "round_cold_seconds", "", number),
    ("engine", "the same round again, s", "round_again_seconds", "", number),
    ("engine", "tokens/s as flow", "flow_tokens_per_second", "12,000", number),
    ("engine", "to load it and test itself, s", "start_seconds", "", number),
    ("engine-256", "256 slots: tokens/s as flow", "flow_tokens_per_second", "25,000", number),
    ("trainer", "60 answers of 200 tokens to 3 prompts: a step, s", "seconds_a_step", "", number),
    ("trainer", "share of a product's rate", "share_of_product_rate", "35 %", percent),
    ("trainer", "launches", "launches_a_step", "3,000", number),
    ("trainer", "peak memory", "peak_bytes", "", gigabytes),
    ("trainer", "computed", "computed_bytes", "", gigabytes),
    ("trainer-checkpointed", "the same step, s", "seconds_a_step", "", number),
    ("trainer-checkpointed", "tokens/s", "tokens_per_second", "", number),
    ("trainer-checkpointed", "share of a product's rate", "share_of_product_rate", "", percent),
    ("trainer-checkpointed", "launches", "launches_a_step", "", number),
    ("trainer-checkpointed", "peak memory", "peak_bytes", "", gigabytes),
    ("trainer-checkpointed", "computed", "computed_bytes", "", gigabytes),
    ("trainer-checkpointed", "a publication alone (1 GB), s", "publication_seconds", "", number),
    ("trainer-checkpointed", "a step beside one, of one alone", "beside_over_alone", "1.1", number),
    ("trainer-checkpointed", "a version in the engine, s after its update", "version_in_engine_seconds", "0.2", number),
    (
        "log-ratio",
        "engine and trainer at version 0: mean square of a token",
        OF_ENGINE + "mean_square_of_a_token",
        "",
        number,
    ),
    ("log-ratio", "of an answer", OF_ENGINE + "mean_square_of_an_answer", "", number),
    ("log-ratio", "of a token, 5 %", OF_ENGINE + "p05_of_a_token", "", number),
    ("log-ratio", "of a token, 95 %", OF_ENGINE + "p95_of_a_token", "", number),
    ("log-ratio", "effective sample size", OF_ENGINE + "effective_sample_size", "", number),
    (
        "log-ratio",
        "reference and trainer: mean square of an answer",
        OF_REFERENCE + "mean_square_of_an_answer",
        "0",
        number,
    ),
    ("both", "both halves, by `tba train`: a step, s", "seconds_a_step", "", number),
    ("both", "the longest step, s", "longest_step_seconds", "", number),
    ("both", "updates a second", "updates_per_second", "", number),
    ("sharing", "updates a second, of the slower half's alone", "processes.of_the_slower_half", "0.7", number),
    ("quickstart", "seconds of training", "wall_seconds.train", "", number),
    ("quickstart", "`pass@1/sampled`", "evaluations.pass@1/sampled", "", percent),
    ("1.5 B", "a step of 1.5 B parameters, checkpointed: peak memory", "peak_bytes", "", gigabytes),
    ("1.5 B", "computed", "computed_bytes", "", gigabytes),
    ("LoRA", "a step under LoRA: peak memory", "peak_bytes", "", gigabytes),
    ("LoRA", "computed", "computed_bytes", "", gigabytes),
    ("smollm2", "SmolLM2-135M under LoRA, both halves: a step, s", "seconds_a_step", "", number),
    ("smollm2", "tokens/s generated", "generated_tokens_per_second", "", number),
)
ARRANGEMENTS = {  # of which part
    "processes": "sharing",
    "processes, pinned cores": "arrangements",
    "processes, MPS": "arrangements",
    "threads, a stream each": "arrangements",
    "turns": "arrangements",
}
COLUMNS = (
    *("GPU", "model", "trained", "`--max-tokens-per-pass`", "`--model.gradient-checkpointing`", "trainer, GB"),
    *("`--model.generation.slots`", "searcher, GB"),
)


def shape(name: str) -> Shape:
    width, layers, ff, heads, kv_heads, vocabulary, tied = MODELS[name]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ff,
        max_position_embeddings=32_768,
        tie_word_embeddings=tied,
    )
    return Shape.of(config)


def page() -> str:
    """The whole page."""
    shares = {part: place.share for part, place in placed(["trainer"], ["searcher"], 1).items()}
    seven = shape("7 B")
    share = f"{100 * seven.adapters(RANK) / seven.parameters:.1f} %"
    rest = 1 - sum(shares.values())
    head = HEAD.format(**shares, rest=rest, plain=f"{PLAIN:,}")
    tail = TAIL.format(fewest=TOKENS[-1], slots=SLOTS[-1], rank=RANK, share=share)
    return "\n".join([head, *table(shares), "", tail, *measured()])


def measured() -> Iterator[str]:
    """What a card was found to do."""
    before, after = (json.loads(file.read_text()) if file.exists() else {} for file in (BEFORE, AFTER))
    yield MEASURED.format(before=card_of(before), after=card_of(after))
    yield "| part | | before | aimed at | after |\n|---|---|---|---|---|"
    said = ""
    for part, words, path, aim, written in FIGURES:
        there, here = figure(before, part, path, written) or NEVER, figure(after, part, path, written) or PENDING
        yield f"| {'' if part == said else part} | {words} | {there} | {aim} | {here} |"
        said = part
    shared = after if "sharing" in after.get("parts", {}) else {}
    yield "\n" + SHARED.format(measured=f"on {card_of(after)}" if shared else f"it was {NEVER} on a card yet")
    yield "| arrangement | trainer, left | searcher, left | of the slower half |\n|---|---|---|---|"
    for name, part in ARRANGEMENTS.items():
        paths = (f"{name}.left.trainer", f"{name}.left.searcher", f"{name}.of_the_slower_half")
        yield f"| {name} | {' | '.join(figure(shared, part, path, number) or PENDING for path in paths)} |"
    yield "\n" + ALTERNATIVES


def card_of(found: Mapping[str, Any]) -> str:
    """The machine and the software that a file is of."""
    if not found:
        return f"**{PENDING}**"
    about = found["about"]
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "transformers"))
    return f"one {' and '.join(about['machine']['gpus'])}, {about['machine']['cores']} cores, {versions}"


def figure(found: Mapping[str, Any], part: str, path: str, written: Callable[[float], str]) -> str:
    """One figure of a file; empty where it has none."""
    value: Any = found.get("parts", {}).get(part, {})
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else written(value)


def table(shares: dict[str, float]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for gpu in GPUS:
        for name in MODELS:
            made = shape(name)
            for trained, model in KINDS.items():
                found = trainer_of(made, model, int(gpu * GB * shares["trainer"]))
                slots = searcher_of(made, model, int(gpu * GB * shares["searcher"]))
                cells = (f"{gpu} GB", name, trained, *found, *slots)
                yield f"| {' | '.join(cells)} |"


def trainer_of(made: Shape, model: Mapping[str, Any], room: int) -> tuple[str, str, str]:
    """Tokens of a pass, whether it is checkpointed, and memory."""
    for checkpointed in (False, True):
        for tokens in TOKENS:
            tried = replace(recipe(model, checkpointed), max_tokens_per_pass=tokens)
            if (checkpointed or tokens >= PLAIN) and fits(tried, made, Room(trainer_gpu=room)):
                return f"{tokens:,}", "on" if checkpointed else "off", of(tried, made, ("trainer",), room)
    return "no", "", ""


def searcher_of(made: Shape, model: Mapping[str, Any], room: int) -> tuple[str, str]:
    """Slots, and memory."""
    for slots in SLOTS:
        tried = recipe(model, True)
        assert isinstance(tried.model, HuggingFace)
        tried = replace(tried, model=replace(tried.model, generation=replace(tried.model.generation, slots=slots)))
        if fits(tried, made, Room(searcher_gpu=room)):
            return str(slots), of(tried, made, ("searcher", "reference"), room)
    return "no", ""


def recipe(model: Mapping[str, Any], checkpointed: bool) -> Recipe:
    gsm8k = find("gsm8k")
    assert isinstance(gsm8k.model, HuggingFace)
    changed = replace(gsm8k.model, device="cuda", gradient_checkpointing=checkpointed, **model)
    return replace(gsm8k, model=changed, searchers=1)


def fits(tried: Recipe, made: Shape, room: Room) -> bool:
    try:
        refuse_what_cannot_fit(tried, made, room)
    except UserError:
        return False
    return True


def of(tried: Recipe, made: Shape, parts: tuple[str, ...], room: int) -> str:
    """What these parts need of what they have."""
    needed = sum(total(need.parts) for need in needs(tried, made) if need.part in parts)
    return f"{needed / GB:.1f} of {room / GB:.1f}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
