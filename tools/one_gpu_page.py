"""Writes docs/one_gpu.md: which settings fit on one GPU, by its memory and the size of the model.

    python tools/one_gpu_page.py

Invariant: every figure is computed by `tba.command.needs` and `tba.models.memory`, as `tba check` does; nothing was
run. A test keeps the page up to date.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

PAGE = Path(__file__).parents[1] / "docs" / "one_gpu.md"
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

Which settings fit on a single GPU of 24, 48 or 80 GB, for models of 0.5 to 7 B parameters. **Computed, not measured**:
this page is made by `python tools/one_gpu_page.py` from the formulas that `tba check` uses
(`src/tba/models/memory.py`), and a test keeps it up to date. Nothing on it was run on a GPU. What the formulas were
compared with: [scaling.md](scaling.md#what-the-trainer-holds).

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
- *vLLM* takes `--model.vllm.memory-share` (half) of the searcher's part; the reference needs its own of the rest.
- *The shares are fixed*, so a trainer of all weights is refused although its searcher leaves memory unused. With two
  GPUs each half has one to itself: what 48 GB can do here by themselves, two of 24 GB can do too.
- `tba check RECIPE` computes the same for a recipe where it is called, and names a field that helps where it does not
  fit.
"""
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
    return "\n".join([head, *table(shares), "", tail])


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
