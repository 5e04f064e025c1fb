"""Decides whether a run fits the machine that it begins on, before anything is loaded; how many workers it has, where
the recipe leaves that open.

Invariant: a pure function of a recipe whose model is prepared and the memory that there is. What is refused could not
be held even by an allocator without loss; what is not may still be too much by a few percent. A model of unknown shape
is never refused.

- No searchers given: one for each GPU that the trainer leaves.
- No ranks given: as few as it takes until the trainer fits; a GPU is left for a searcher in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from tba.cards import cards
from tba.errors import UserError
from tba.protocols import HasAdapters, HasDtype, HasGeneration, HasGradientCheckpointing
from tba.recipe import Recipe
from tba.record.memory import machine_memory_bytes
from tba.record.text import size
from tba.runtime.devices import USABLE, Place, places
from tba.runtime.needs import checkpointed, needs
from tba.settings import override
from tba.training.ranks.messages import RankSettings

_RANK = "16"  # of the adapters that are proposed
_KEPT = {"--model.lora.rank", "--model.dtype"}  # by a run


@dataclass(frozen=True)
class Machine:
    """The memory of a machine and of each of its GPUs, in bytes."""

    memory: int | None = None  # None: unknown
    gpus: tuple[int, ...] = ()

    @classmethod
    def here(cls) -> Machine:
        return cls(machine_memory_bytes(), cards().memory)


def searchers_of(recipe: Recipe) -> list[str]:
    """Returns the names of the searchers that a run begins with."""
    return [f"searcher-{i}" for i in range(1 if recipe.offline else recipe.searcher_count)]


def places_on(recipe: Recipe, machine: Machine) -> dict[str, Place]:
    """Returns where each worker will be on a machine. Raises `UserError` where its GPUs are too few."""
    if recipe.runtime == "inline" and recipe.model.gpus_per_searcher and machine.gpus:
        return dict.fromkeys(("trainer", *searchers_of(recipe)), Place((0,), USABLE))  # one process
    return places(recipe, searchers_of(recipe), machine.gpus)


def sized(recipe: Recipe, machine: Machine) -> list[str]:
    """Returns the flags that decide what the recipe leaves open; none where no GPU is used."""
    each = recipe.model.gpus_per_searcher
    if recipe.runtime != "processes" or not each or not machine.gpus:
        return []
    count, known = len(machine.gpus), bool(needs(recipe))
    is_quantized = isinstance(recipe.model, HasDtype) and recipe.model.dtype == "4-bit"
    most = count - each if known and not is_quantized else 1
    decided = recipe
    for ranks in range(1, max(1, most) + 1):
        ranks = recipe.trainer.ranks or ranks
        searchers = recipe.searchers or (1 if recipe.offline else max(1, (count - ranks) // each))
        decided = replace(recipe, trainer=RankSettings(ranks), searchers=searchers)
        if recipe.trainer.ranks or (too_much(decided, machine) or ("searcher",))[0] == "searcher":
            break  # the trainer fits
    return [
        *([] if recipe.trainer.ranks else ["--trainer.ranks", str(decided.trainer.count)]),
        *([] if recipe.searchers else ["--searchers", str(decided.searcher_count)]),
    ]


def unused(recipe: Recipe, machine: Machine) -> str | None:
    """Returns a sentence about GPUs on which nothing will run; None where there are none."""
    if not recipe.model.gpus_per_searcher or recipe.runtime == "cluster":
        return None
    used = {gpu for place in places_on(recipe, machine).values() for gpu in place.gpus}
    idle = len(machine.gpus) - len(used)
    if not idle:
        return None
    more = "give more --searchers or --trainer.ranks, or neither, and as many are used as can be"
    if recipe.runtime == "inline":
        more = "the inline runtime has one process, --runtime processes has more"
    elif recipe.offline:
        more = "--offline nobody samples; more --trainer.ranks share a step"
    return f"{idle} GPU{'s are' if idle > 1 else ' is'} unused: {more}"


def refuse_what_cannot_fit(recipe: Recipe, machine: Machine, resumed: bool = False) -> None:
    """Raises `UserError` where a part cannot fit into the memory of its device; it names the fields that would help.

    resumed: what is trained, all weights or adapters, and on which base, cannot be changed any more.
    """
    told = too_much(recipe, machine)
    if told is None:
        return
    half, sentence = told
    for flags in _smaller(recipe, half):
        if resumed and _KEPT & {*flags}:
            continue
        try:
            fits = too_much(override(recipe, flags, "", recorded=True), machine) is None
        except UserError:  # too few GPUs, or what does not go together
            continue
        if fits:
            raise UserError(f"{sentence}: set {' '.join(flags)}, with which it fits")
    raise UserError(f"{sentence}: use {'' if resumed else 'a smaller model, '}more GPUs, or a machine with more memory")


def too_much(recipe: Recipe, machine: Machine) -> tuple[str, str] | None:
    """Returns which half needs more than there is (trainer, searcher, or both where they share a GPU), and a sentence
    that says so; None when all fits. Raises `UserError` where the GPUs are too few.
    """
    told = _too_much(recipe, machine)
    if told is not None and (least := checkpointed(recipe)) is not None:
        return _too_much(least, machine)
    return told


def _too_much(recipe: Recipe, machine: Machine) -> tuple[str, str] | None:
    found = {need.part: need for need in needs(recipe)}
    if not found or recipe.runtime == "cluster":
        return None
    if found["trainer"].device == "cuda":
        bytes_of = {part: need.total for part, need in found.items() if need.device == "cuda"}
        where = places_on(recipe, machine) if machine.gpus else {}
        for gpu, memory in enumerate(machine.gpus):
            on = _needed_of(gpu, where, bytes_of)
            if sum(on.values()) > USABLE * memory:
                return _shortage(gpu, on, memory)
    copies = {"trainer": recipe.trainer.count, "host": recipe.trainer.count, "replay": 1}
    each = {
        part: need.total * copies.get(part, recipe.searcher_count)
        for part, need in found.items()
        if need.device != "cuda"
    }
    if machine.memory is not None and sum(each.values()) > machine.memory:
        named = ", ".join(f"{part} {size(n)}" for part, n in each.items())
        half = "trainer" if 2 * each.get("trainer", 0) > sum(each.values()) else "searcher"
        sentence = f"the run needs {size(sum(each.values()))} of memory ({named}), and this machine has "
        return half, sentence + size(machine.memory)
    return None


def _needed_of(gpu: int, where: Mapping[str, Place], found: Mapping[str, int]) -> dict[str, int]:
    """Returns what each worker needs of one GPU: an engine is on all of its own, reference and rewards on the first."""
    on = {}
    for worker, place in where.items():
        if gpu in place.gpus and worker.startswith("trainer"):
            on[worker] = found["trainer"]
        elif gpu in place.gpus:
            first = sum(n for part, n in found.items() if part not in ("trainer", "searcher"))
            on[worker] = found["searcher"] + (first if gpu == place.gpus[0] else 0)
    return on


def _shortage(gpu: int, on: Mapping[str, int], memory: int) -> tuple[str, str]:
    """Returns who needs more than a GPU has (trainer, searcher, both), and how much, in words."""
    trained = any(worker.startswith("trainer") for worker in on)
    usable, needed = size(int(USABLE * memory)), size(sum(on.values()))
    if len(on) == 1:
        half = "trainer" if trained else "searcher"
        return half, f"the {half} needs {needed} of its GPU, of which {usable} are usable"
    named = ", ".join(f"{worker} {size(own)}" for worker, own in on.items())
    half = "both" if trained else "searcher"
    return half, f"the workers on GPU {gpu} need {needed} of it ({named}), of which {usable} are usable"


def _smaller(recipe: Recipe, half: str) -> Iterator[list[str]]:
    """Yields flags with which less memory is needed, the least intrusive first."""
    to_train, to_search = list(_to_train(recipe)), list(_to_search(recipe))
    if half == "trainer":
        to_search = to_search[:1]
    if half == "searcher":  # adapters leave its reference without weights of its own
        to_train = [flags for flags in to_train if not flags or "--model.lora.rank" in flags]
    pairs = list(product(range(len(to_train)), range(len(to_search))))
    if half == "both":  # something of each
        pairs.sort(key=lambda pair: (sum(pair), pair[1]))
    for flags in ([*to_train[i], *to_search[j]] for i, j in pairs[1:]):
        if half != "searcher" and {"--model.lora.rank", "--optimizer.moments-on-host"} & {*flags}:
            yield from _ranks(recipe)  # which train all weights, and in less time
        yield flags


def _ranks(recipe: Recipe) -> Iterator[list[str]]:
    """Yields flags with which more ranks share the trainer."""
    if recipe.runtime == "processes" and recipe.model.gpus_per_searcher:
        more = (str(ranks) for ranks in (2, 4, 8) if ranks > recipe.trainer.count)
        yield from ([*_checkpointing(recipe), "--trainer.ranks", ranks] for ranks in more)


def _checkpointing(recipe: Recipe) -> list[str]:
    """Returns the flag that switches it on, if it is not."""
    model = recipe.model
    is_off = isinstance(model, HasGradientCheckpointing) and not model.gradient_checkpointing
    return ["--model.gradient-checkpointing"] if is_off else []


def _to_train(recipe: Recipe) -> Iterator[list[str]]:
    """Yields flags with which a trainer needs ever less, the first of them none."""
    model, checkpointing, tokens = recipe.model, _checkpointing(recipe), recipe.max_tokens_per_pass
    yield []
    if checkpointing:
        yield from (["--max-tokens-per-pass", fewer] for fewer in _halves(tokens, 4096))
        yield checkpointing
    yield from ([*checkpointing, "--max-tokens-per-pass", fewer] for fewer in _halves(tokens, 1024))
    if isinstance(model, HasAdapters):
        if not model.lora.rank:
            if model.trainer_device.type == "cuda" and not recipe.optimizer.moments_on_host:
                host = ["--optimizer.moments-on-host", *checkpointing]
                yield host
                yield from ([*host, "--max-tokens-per-pass", fewer] for fewer in _halves(tokens, 4096))
            yield ["--model.lora.rank", _RANK, *checkpointing]
        if recipe.trainer.count == 1:
            yield ["--model.dtype", "4-bit", "--model.lora.rank", str(model.lora.rank or _RANK), *checkpointing]


def _to_search(recipe: Recipe) -> Iterator[list[str]]:
    """Yields flags with which searchers need ever less, the first of them none."""
    yield []
    if isinstance(recipe.model, HasGeneration):
        yield from (["--model.generation.slots", fewer] for fewer in _halves(recipe.model.generation.slots))
    yield from (["--searchers", fewer] for fewer in _halves(recipe.searcher_count))


def _halves(number: int, least: int = 1) -> Iterator[str]:
    while (number := number // 2) >= least:
        yield str(number)
