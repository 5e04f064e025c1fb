"""Decides whether a run fits the machine that it begins on, before anything is loaded; how many workers it has, where
the recipe leaves that open.

Invariant: a pure function of a recipe whose model is prepared and the memory that there is. What is refused could not
be held even by an allocator without loss; what is not may still be too much by a few percent. A model of unknown shape
is never refused.

- No searchers given: one for each GPU that the trainer leaves.
- No ranks given: as few as it takes until the trainer fits; a GPU is left for a searcher in any case.
- The reference does not fit beside an engine: the trainer scores answers under it.
- Gradient checkpointing open, several ranks: on, where they do not fit without. (One rank decides pass by pass; several
  have to do the same.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from tba.errors import UserError
from tba.gpus import visible_gpus
from tba.protocols import HasAdapters, HasDtype, HasGeneration, HasGradientCheckpointing
from tba.recipe import Recipe
from tba.record.memory import machine_memory_bytes
from tba.record.text import size
from tba.runtime.devices import USABLE, Place, places
from tba.runtime.needs import needs, with_checkpointing, with_trainer_scores
from tba.settings import override
from tba.training.ranks.messages import RankSettings

_LORA_RANK = "16"  # that is proposed
_TRAINER_SCORES = ("--reference-scorer", "trainer")
_FIXED_FLAGS = {"--model.lora.rank", "--model.dtype"}  # which a run that is resumed keeps


@dataclass(frozen=True)
class Machine:
    """The memory of a machine and of each of its GPUs, in bytes."""

    memory: int | None = None  # None: unknown
    gpus: tuple[int, ...] = ()

    @classmethod
    def here(cls) -> Machine:
        return cls(machine_memory_bytes(), visible_gpus().memory)


def searchers_of(recipe: Recipe) -> list[str]:
    """Returns the names of the searchers that a run begins with."""
    return [f"searcher-{i}" for i in range(1 if recipe.only_evaluates else recipe.searcher_count)]


def places_on(recipe: Recipe, machine: Machine) -> dict[str, Place]:
    """Returns where each worker will be on a machine. Raises `UserError` where its GPUs are too few."""
    if recipe.runtime == "inline" and recipe.model.gpus_per_searcher and machine.gpus:
        return dict.fromkeys(("trainer", *searchers_of(recipe)), Place((0,), USABLE))  # one process
    return places(recipe, searchers_of(recipe), machine.gpus)


def sizing_flags(recipe: Recipe, machine: Machine) -> list[str]:
    """Returns the flags for what the recipe leaves open: numbers of ranks and searchers, whether several ranks
    checkpoint gradients, and whether the trainer scores answers under the reference; none without GPUs.
    """
    flags, scoring_recipe = _count_flags(recipe, machine), with_trainer_scores(recipe)
    if not flags or scoring_recipe is None:
        return flags
    shortage = memory_shortage(override(recipe, flags, "", recorded=True), machine)
    if shortage is None or shortage[0] != "searcher":
        return flags
    scoring_flags = [*_TRAINER_SCORES, *_count_flags(scoring_recipe, machine)]
    fits = memory_shortage(override(recipe, scoring_flags, "", recorded=True), machine) is None
    return scoring_flags if fits else flags


def _count_flags(recipe: Recipe, machine: Machine) -> list[str]:
    """Returns the flags for what the recipe leaves open, with the scorer of the reference as it is."""
    gpus_each = recipe.model.gpus_per_searcher
    if recipe.runtime != "processes" or not gpus_each or not machine.gpus:
        return []
    count, is_shape_known = len(machine.gpus), bool(needs(recipe))
    is_quantized = isinstance(recipe.model, HasDtype) and recipe.model.dtype == "4-bit"
    most_ranks = count - gpus_each if is_shape_known and not is_quantized else 1
    decided_recipe = recipe
    for ranks in range(1, max(1, most_ranks) + 1):
        ranks = recipe.trainer.ranks or ranks
        searchers = recipe.searchers or (1 if recipe.only_evaluates else max(1, (count - ranks) // gpus_each))
        decided_recipe = replace(recipe, trainer=RankSettings(ranks), searchers=searchers)
        if recipe.trainer.ranks or (memory_shortage(decided_recipe, machine) or ("searcher",))[0] == "searcher":
            break  # the trainer fits
    is_open = decided_recipe.trainer.count > 1 and with_checkpointing(decided_recipe) is not None
    needs_checkpoints = is_open and (_memory_shortage(decided_recipe, machine) or ("",))[0] == "trainer"
    return [
        *(["--model.gradient-checkpointing"] if needs_checkpoints else []),
        *([] if recipe.trainer.ranks else ["--trainer.ranks", str(decided_recipe.trainer.count)]),
        *([] if recipe.searchers is not None else ["--searchers", str(decided_recipe.searcher_count)]),
    ]


def unused_gpus(recipe: Recipe, machine: Machine) -> str | None:
    """Returns a sentence about GPUs on which nothing will run; None where there are none."""
    if not recipe.model.gpus_per_searcher or recipe.runtime == "cluster":
        return None
    used_gpus = {gpu for place in places_on(recipe, machine).values() for gpu in place.gpus}
    unused_count = len(machine.gpus) - len(used_gpus)
    if not unused_count:
        return None
    remedy = "give more --searchers or --trainer.ranks, or neither, and as many are used as can be"
    if recipe.runtime == "inline":
        remedy = "the inline runtime has one process, --runtime processes has more"
    elif recipe.offline:
        remedy = "--offline nobody samples; more --trainer.ranks share a step"
    return f"{unused_count} GPU{'s are' if unused_count > 1 else ' is'} unused: {remedy}"


def refuse_what_cannot_fit(recipe: Recipe, machine: Machine, resumed: bool = False) -> None:
    """Raises `UserError` where a part cannot fit into the memory of its device; it names the fields that would help.

    resumed: the weights that are trained and their base cannot be changed any more.
    """
    shortage = memory_shortage(recipe, machine)
    if shortage is None:
        return
    half, sentence = shortage
    for flags in _memory_saving_flags(recipe, half):
        if resumed and _FIXED_FLAGS & {*flags}:
            continue
        try:
            fits = memory_shortage(override(recipe, flags, "", recorded=True), machine) is None
        except UserError:  # too few GPUs, or what does not go together
            continue
        if fits:
            raise UserError(f"{sentence}: set {' '.join(flags)}, with which it fits")
    raise UserError(f"{sentence}: use {'' if resumed else 'a smaller model, '}more GPUs, or a machine with more memory")


def memory_shortage(recipe: Recipe, machine: Machine) -> tuple[str, str] | None:
    """Returns which half needs more than there is (trainer, searcher, or both where they share a GPU), and a sentence
    that says so; None when all fits. Raises `UserError` where the GPUs are too few.
    """
    shortage = _memory_shortage(recipe, machine)
    if shortage is not None and (smaller_recipe := with_checkpointing(recipe)) is not None:
        return _memory_shortage(smaller_recipe, machine)
    return shortage


def _memory_shortage(recipe: Recipe, machine: Machine) -> tuple[str, str] | None:
    needs_by_part = {need.part: need for need in needs(recipe)}
    if not needs_by_part or recipe.runtime == "cluster":
        return None
    if needs_by_part["trainer"].device == "cuda":
        bytes_of = {part: need.total for part, need in needs_by_part.items() if need.device == "cuda"}
        worker_places = places_on(recipe, machine) if machine.gpus else {}
        for gpu, memory in enumerate(machine.gpus):
            bytes_by_worker = _needs_on_gpu(gpu, worker_places, bytes_of)
            if sum(bytes_by_worker.values()) > USABLE * memory:
                return _describe_shortage(gpu, bytes_by_worker, memory)
    copies = {"trainer": recipe.trainer.count, "host": recipe.trainer.count, "replay": 1}
    bytes_by_part = {
        part: need.total * copies.get(part, recipe.searcher_count)
        for part, need in needs_by_part.items()
        if need.device != "cuda"
    }
    if machine.memory is not None and sum(bytes_by_part.values()) > machine.memory:
        listing = ", ".join(f"{part} {size(n)}" for part, n in bytes_by_part.items())
        half = "trainer" if 2 * bytes_by_part.get("trainer", 0) > sum(bytes_by_part.values()) else "searcher"
        sentence = f"the run needs {size(sum(bytes_by_part.values()))} of memory ({listing}), and this machine has "
        return half, sentence + size(machine.memory)
    return None


def _needs_on_gpu(gpu: int, worker_places: Mapping[str, Place], bytes_of: Mapping[str, int]) -> dict[str, int]:
    """Returns what each worker needs of one GPU: an engine is on all of its own, reference and rewards on the first."""
    bytes_by_worker = {}
    for worker, place in worker_places.items():
        if gpu in place.gpus and worker.startswith("trainer"):
            bytes_by_worker[worker] = bytes_of["trainer"]
        elif gpu in place.gpus:
            reference_bytes = sum(n for part, n in bytes_of.items() if part not in ("trainer", "searcher"))
            bytes_by_worker[worker] = bytes_of["searcher"] + (reference_bytes if gpu == place.gpus[0] else 0)
    return bytes_by_worker


def _describe_shortage(gpu: int, bytes_by_worker: Mapping[str, int], memory: int) -> tuple[str, str]:
    """Returns who needs more than a GPU has (trainer, searcher, both), and how much, in words."""
    has_trainer = any(worker.startswith("trainer") for worker in bytes_by_worker)
    usable_size, needed_size = size(int(USABLE * memory)), size(sum(bytes_by_worker.values()))
    if len(bytes_by_worker) == 1:
        half = "trainer" if has_trainer else "searcher"
        return half, f"the {half} needs {needed_size} of its GPU, of which {usable_size} are usable"
    listing = ", ".join(f"{worker} {size(n)}" for worker, n in bytes_by_worker.items())
    half = "both" if has_trainer else "searcher"
    return half, f"the workers on GPU {gpu} need {needed_size} of it ({listing}), of which {usable_size} are usable"


def _memory_saving_flags(recipe: Recipe, half: str) -> Iterator[list[str]]:
    """Yields flags with which less memory is needed, the least intrusive first."""
    trainer_savings, searcher_savings = list(_trainer_savings(recipe)), list(_searcher_savings(recipe))
    if half == "trainer":
        searcher_savings = searcher_savings[:1]
    if half == "searcher":  # adapters leave its reference without weights of its own
        trainer_savings = [flags for flags in trainer_savings if not flags or "--model.lora.rank" in flags]
    pairs = list(product(range(len(trainer_savings)), range(len(searcher_savings))))
    if half == "both":  # something of each
        pairs.sort(key=lambda pair: (sum(pair), pair[1]))
    for flags in ([*trainer_savings[i], *searcher_savings[j]] for i, j in pairs[1:]):
        if half != "searcher" and {"--model.lora.rank", "--optimizer.moments-on-host"} & {*flags}:
            yield from _rank_flags(recipe)  # which train all weights, and in less time
        yield flags


def _rank_flags(recipe: Recipe) -> Iterator[list[str]]:
    """Yields flags with which more ranks share the trainer."""
    if recipe.runtime == "processes" and recipe.model.gpus_per_searcher:
        rank_counts = (str(ranks) for ranks in (2, 4, 8) if ranks > recipe.trainer.count)
        yield from ([*_checkpointing_flags(recipe), "--trainer.ranks", ranks] for ranks in rank_counts)


def _checkpointing_flags(recipe: Recipe) -> list[str]:
    """Returns the flag that switches gradient checkpointing on, if it is off."""
    model = recipe.model
    is_off = isinstance(model, HasGradientCheckpointing) and not model.gradient_checkpointing
    return ["--model.gradient-checkpointing"] if is_off else []


def _trainer_savings(recipe: Recipe) -> Iterator[list[str]]:
    """Yields flags with which a trainer needs ever less, the first of them none."""
    model, checkpointing, tokens = recipe.model, _checkpointing_flags(recipe), recipe.max_tokens_per_pass
    yield []
    if checkpointing:
        yield from (["--max-tokens-per-pass", limit] for limit in _halves(tokens, 4096))
        yield checkpointing
    yield from ([*checkpointing, "--max-tokens-per-pass", limit] for limit in _halves(tokens, 1024))
    if isinstance(model, HasAdapters):
        if not model.lora.rank:
            if model.trainer_device.type == "cuda" and not recipe.optimizer.moments_on_host:
                host_flags = ["--optimizer.moments-on-host", *checkpointing]
                yield host_flags
                yield from ([*host_flags, "--max-tokens-per-pass", limit] for limit in _halves(tokens, 4096))
            yield ["--model.lora.rank", _LORA_RANK, *checkpointing]
        if recipe.trainer.count == 1:
            yield ["--model.dtype", "4-bit", "--model.lora.rank", str(model.lora.rank or _LORA_RANK), *checkpointing]


def _searcher_savings(recipe: Recipe) -> Iterator[list[str]]:
    """Yields flags with which searchers need ever less, the first of them none."""
    yield []
    if isinstance(recipe.model, HasGeneration):
        yield from (["--model.generation.slots", limit] for limit in _halves(recipe.model.generation.slots))
    yield from (["--searchers", limit] for limit in _halves(recipe.searcher_count))


def _halves(number: int, least: int = 1) -> Iterator[str]:
    while (number := number // 2) >= least:
        yield str(number)
