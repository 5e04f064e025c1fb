"""What each part of a run needs of the memory of its device, computed from the recipe before anything is loaded.

Invariant: a pure function of the recipe, the model's shape and what the devices have (`tba.models.memory`). What is
refused could not be held even by an allocator without loss; what is not may still be too much by a few percent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.models.memory import Bytes, Pass, Sampling, Shape, engine, reference, total, trainer, vllm
from tba.recipe import Recipe
from tba.record.text import size

_RANK = 16  # of the adapters that are proposed


@dataclass(frozen=True)
class Need:
    """What one part needs on its device."""

    part: str  # trainer, searcher, reference or replay
    device: str  # cpu or cuda: the memory of the machine, or of a GPU
    parts: Bytes

    def __str__(self) -> str:
        largest = sorted(self.parts.items(), key=lambda item: -item[1])
        named = ", ".join(f"{name} {size(n)}" for name, n in largest if n >= 2**19)  # what reads as 0 MiB is left out
        return f"{size(total(self.parts))} of {_MEMORY[self.device]} ({named})"


_MEMORY = {"cpu": "the machine's memory", "cuda": "its GPU's memory", "mps": "the machine's memory"}


@dataclass(frozen=True)
class Room:
    """The memory that parts find: of the machine in all, and of each GPU what is the part's."""

    machine: int | None = None  # None: unknown
    trainer_gpu: int | None = None
    searcher_gpu: int | None = None


def needs(recipe: Recipe, shape: Shape) -> list[Need]:
    """Returns what a rank of the trainer, a searcher, its reference and the replay buffer need, at most."""
    model = recipe.model
    assert isinstance(model, HuggingFace)
    device, lora = model.trainer_device.type, model.lora
    answer = min(model.max_completion_tokens, shape.positions - 1)
    prompt = min(recipe.prompts.max_tokens, shape.positions - answer)
    batch = recipe.groups_per_step * (prompt + recipe.group_size * answer)
    tokens = max(min(recipe.max_tokens_per_pass, batch), prompt + answer)  # a row is never split
    of_pass = Pass(
        tokens, model.precision, device, lora.rank, lora.targets, model.gradient_checkpointing, recipe.trainer.ranks
    )
    of_searcher = Sampling(
        model.precision,
        model.generation.slots,
        prompt + answer,
        prompt,
        device=device,
        rank=lora.rank,
        targets=lora.targets,
    )
    found = [Need("trainer", device, trainer(shape, of_pass))]
    if model.generation.engine == "vllm":  # its cache takes what there is, if that is less than the slots need
        room = 0 if device == "cuda" else None
        found.append(Need("searcher", device, vllm(shape, of_searcher, model.vllm.tensor_parallel, room)))
    else:
        found.append(Need("searcher", device, engine(shape, of_searcher)))
    found.append(Need("reference", device, reference(shape, of_searcher)))
    buffer = recipe.replay.buffer
    return [*found, Need("replay", "cpu", buffer.memory(answer))]


def refuse_what_cannot_fit(recipe: Recipe, shape: Shape, room: Room) -> None:
    """Raises `UserError` where a part cannot fit into the memory of its device; it names the field that would help."""
    told = _too_much(recipe, needs(recipe, shape), room)
    if told is None:
        return
    half, sentence = told
    for flag, changed in _smaller(recipe, half):
        if _too_much(changed, needs(changed, shape), room) is None:
            raise UserError(f"{sentence}: set {flag}, with which it fits")
    raise UserError(f"{sentence}: use a smaller model, or a machine with more memory")


def _too_much(recipe: Recipe, found: Sequence[Need], room: Room) -> tuple[str, str] | None:
    """Returns which half needs more than there is, and a sentence that says so; None when all fits."""
    on_gpu = [need for need in found if need.device == "cuda"]
    halves = (("trainer", room.trainer_gpu, ("trainer",)), ("searcher", room.searcher_gpu, ("searcher", "reference")))
    for half, there, parts in halves:
        wanted = sum(total(need.parts) for need in on_gpu if need.part in parts)
        if there is not None and wanted > there:
            return half, f"the {half} needs {size(wanted)} of its GPU, and {size(there)} of it are its own"
    copies = {"trainer": recipe.trainer.ranks, "replay": 1}
    each = {
        need.part: total(need.parts) * copies.get(need.part, recipe.searchers)
        for need in found
        if need.device != "cuda"
    }
    if room.machine is not None and recipe.runtime != "cluster" and sum(each.values()) > room.machine:
        named = ", ".join(f"{part} {size(n)}" for part, n in each.items())
        half = "trainer" if 2 * each.get("trainer", 0) > sum(each.values()) else "searcher"
        sentence = f"the run needs {size(sum(each.values()))} of memory ({named}), and this machine has "
        return half, sentence + size(room.machine)
    return None


def _smaller(recipe: Recipe, half: str) -> Iterator[tuple[str, Recipe]]:
    """Yields (flags, the recipe with them) that need less memory, the least intrusive first."""
    model = recipe.model
    assert isinstance(model, HuggingFace)

    def with_model(**changes: Any) -> Recipe:
        return replace(recipe, model=replace(model, **changes))

    if half == "searcher":
        for slots in _halves(model.generation.slots):
            yield f"--model.generation.slots {slots}", with_model(generation=replace(model.generation, slots=slots))
        for searchers in _halves(recipe.searchers):
            yield f"--searchers {searchers}", replace(recipe, searchers=searchers)
    steps: list[tuple[str, Callable[[Recipe], Recipe]]] = [("", lambda r: r)]
    if not model.gradient_checkpointing:
        checkpointed = with_model(gradient_checkpointing=True).model
        steps.append(("--model.gradient-checkpointing ", lambda r: replace(r, model=checkpointed)))
    for flags, step in steps:
        if flags:
            yield flags.strip(), step(recipe)
        for tokens in _halves(recipe.max_tokens_per_pass, 1024 if flags or model.gradient_checkpointing else 4096):
            yield f"{flags}--max-tokens-per-pass {tokens}", replace(step(recipe), max_tokens_per_pass=tokens)
    if not model.lora.rank:
        adapted = with_model(gradient_checkpointing=True, lora=replace(model.lora, rank=_RANK))
        yield f"--model.lora.rank {_RANK} --model.gradient-checkpointing", adapted
    if model.generation.engine != "vllm" and recipe.trainer.ranks == 1:
        lora = replace(model.lora, rank=model.lora.rank or _RANK)
        flags_of_4_bit = f"--model.dtype 4-bit --model.lora.rank {lora.rank} --model.gradient-checkpointing"
        yield flags_of_4_bit, with_model(gradient_checkpointing=True, lora=lora, dtype="4-bit")
    if recipe.runtime != "inline" and recipe.model.gpus_per_searcher:
        for ranks in (2, 4, 8):
            if ranks > recipe.trainer.ranks:
                changed = replace(step(recipe), trainer=replace(recipe.trainer, ranks=ranks))
                yield f"{flags}--trainer.ranks {ranks}, with a GPU for each", changed


def _halves(number: int, least: int = 1) -> Iterator[int]:
    while (number := number // 2) >= least:
        yield number
