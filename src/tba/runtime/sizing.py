"""Decides whether a run fits its hardware, before anything is loaded; how many workers it has, where the recipe leaves
that open. One machine and the nodes of a cluster are sized by the same rules.

Invariant: a pure function of a recipe whose model is prepared and the memory that there is. What is refused could not
be held even by an allocator without loss; what is not may still be too much by a few percent. A model of unknown shape
and GPUs of unknown memory are never refused.

- No searchers given: as many as fit on the GPUs that the trainer leaves.
- No ranks given: as few as it takes until the trainer fits, and as many as leave no GPU that no engine can use; beyond
  one node whole nodes, where there are enough. Room for a searcher is left in any case.
- The reference does not fit beside an engine: the trainer scores answers under it.
- Gradient checkpointing open, several ranks: on, where they do not fit without. (One rank decides pass by pass; several
  have to do the same.)
- No slots given, and our own engine samples: as many as a batch has answers, so that few of those that are in flight
  are older than an update; no more than were tried, and fewer where a GPU has no room for them.
- vLLM on one GPU each, and a searcher does not fit there: the engine is spread over as few as it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise, product

from tba.errors import UserError
from tba.protocols import HasAdapters, HasAttentionHeads, HasDevice, HasDtype, HasGeneration, HasGradientCheckpointing
from tba.recipe import Recipe
from tba.record.text import plural, size
from tba.runtime.devices import USABLE, Place, allocator_slack, engine_gpus, may_use_vllm, places
from tba.runtime.hardware import ClusterNodes, Hardware
from tba.runtime.needs import needs, with_checkpointing, with_trainer_scores
from tba.settings import override
from tba.training.ranks.messages import RankSettings

_LORA_RANK = "16"  # that is proposed
_SLOT_STEP = 8
_MOST_SLOTS = 256  # the most that `make test-gpu` measures
_RAY_STEP = 1e-4  # of a GPU: parts of it are reserved in such steps
_TRAINER_SCORES = ("--reference-scorer", "trainer")
_FIXED_FLAGS = {"--model.lora.rank", "--model.dtype"}  # which a run that is resumed keeps


def searchers_of(recipe: Recipe) -> list[str]:
    """Returns the names of the searchers that a run begins with."""
    return [f"searcher-{i}" for i in range(1 if recipe.only_evaluates else recipe.searcher_count)]


def places_on(recipe: Recipe, hardware: Hardware) -> dict[str, Place]:
    """Returns where each worker will be, without searchers that wait for nodes of a cluster. Raises `UserError` where
    the GPUs are too few.
    """
    if recipe.runtime == "inline" and recipe.model.gpus_per_searcher and hardware.gpus:
        return dict.fromkeys(("trainer", *searchers_of(recipe)), Place((0,), USABLE))  # one process
    nodes, searchers = _gpu_counts(hardware), searchers_of(recipe)
    if _has_whole_gpus(recipe, hardware) and (gpus_each := recipe.model.gpus_per_searcher):
        searchers = searchers[: len(engine_gpus(nodes, recipe.trainer.count, gpus_each))]
    return places(recipe, searchers, hardware.gpus, nodes)


def _has_whole_gpus(recipe: Recipe, hardware: Hardware) -> bool:
    """Returns whether workers share no GPU: a searcher without one waits for a node of the cluster."""
    has_whole_gpus = len(hardware.gpus) > 1 or recipe.cluster.trainer_gpus == 1
    return isinstance(hardware, ClusterNodes) and has_whole_gpus


def _gpu_counts(hardware: Hardware) -> list[int]:
    return [len(node.gpus) for node in hardware.nodes]


def device_flags(recipe: Recipe, hardware: Hardware) -> list[str]:
    """Returns the flag for a device that the recipe leaves open and this machine does not have, but the nodes of its
    cluster: a head may be without GPUs.
    """
    is_open = isinstance(recipe.model, HasDevice) and recipe.model.device == "auto"
    has_gpus = isinstance(hardware, ClusterNodes) and any(hardware.gpus)
    is_on_cpu = 0 in (recipe.cluster.trainer_gpus, recipe.cluster.searcher_gpus)
    return ["--model.device", "cuda"] if is_open and has_gpus and not is_on_cpu else []


def sizing_flags(recipe: Recipe, hardware: Hardware) -> list[str]:
    """Returns the flags for what the recipe leaves open: numbers of ranks, searchers and slots, whether several ranks
    checkpoint gradients, over how many GPUs an engine of vLLM is spread, and whether the trainer scores answers under
    the reference, which it does where searchers else lack memory for the default number of slots; none without GPUs.
    """
    flags, scoring_recipe = _count_flags(recipe, hardware), with_trainer_scores(recipe)
    if not flags or scoring_recipe is None:
        return flags
    sized_recipe = override(recipe, flags, "", recorded=True)
    shortage = memory_shortage(sized_recipe, hardware)
    has_few_slots = _slot_count(sized_recipe) < _slot_count(recipe)
    if not has_few_slots and (shortage is None or shortage[0] != "searcher"):
        return flags
    scoring_flags = [*_TRAINER_SCORES, *_count_flags(scoring_recipe, hardware)]
    scoring_recipe = override(recipe, scoring_flags, "", recorded=True)
    is_better = shortage is not None or _slot_count(scoring_recipe) > _slot_count(sized_recipe)
    return scoring_flags if is_better and memory_shortage(scoring_recipe, hardware) is None else flags


def _slot_count(recipe: Recipe) -> int:
    return recipe.model.generation.slot_count if isinstance(recipe.model, HasGeneration) else 0


def _count_flags(recipe: Recipe, hardware: Hardware) -> list[str]:
    """Returns the flags for what the recipe leaves open, with the scorer of the reference as it is."""
    if _reserves_other_gpus(recipe) or not recipe.model.gpus_per_searcher or not hardware.gpus:
        return []
    if recipe.runtime == "inline":
        return _slot_flags(recipe, hardware)
    engine_flags = _tensor_parallel_flags(recipe, hardware)
    recipe = decided_recipe = override(recipe, engine_flags, "", recorded=True)
    nodes, gpus_each = _gpu_counts(hardware), recipe.model.gpus_per_searcher
    for ranks in _rank_counts(recipe, nodes):
        engine_count = max(1, len(engine_gpus(nodes, ranks, gpus_each)))
        searchers = recipe.searchers or (1 if recipe.only_evaluates else engine_count)
        decided_recipe = replace(recipe, trainer=RankSettings(ranks), searchers=searchers)
        if recipe.trainer.ranks or (memory_shortage(decided_recipe, hardware) or ("searcher",))[0] == "searcher":
            break  # the trainer fits
    may_checkpoint = decided_recipe.trainer.count > 1 and with_checkpointing(decided_recipe) is not None
    needs_checkpoints = may_checkpoint and (_memory_shortage(decided_recipe, hardware) or ("",))[0] == "trainer"
    slot_flags = _slot_flags(decided_recipe, hardware)
    decided_recipe = override(decided_recipe, slot_flags, "", recorded=True)
    return [
        *engine_flags,
        *(["--model.gradient-checkpointing"] if needs_checkpoints else []),
        *([] if recipe.trainer.ranks else ["--trainer.ranks", str(decided_recipe.trainer.count)]),
        *([] if recipe.searchers is not None else ["--searchers", str(decided_recipe.searcher_count)]),
        *slot_flags,
        *_share_flags(decided_recipe, hardware),
    ]


def _rank_counts(recipe: Recipe, nodes: list[int]) -> list[int]:
    """Returns the numbers of ranks to try, the fewest first. nodes: how many GPUs each has."""
    if recipe.trainer.ranks:
        return [recipe.trainer.ranks]
    is_quantized = isinstance(recipe.model, HasDtype) and recipe.model.dtype == "4-bit"
    if is_quantized or not needs(recipe):
        return [1]
    gpus_each, counts, previous_gpus = recipe.model.gpus_per_searcher, [], 0
    nodes_by_size = sorted(filter(None, nodes), reverse=True)
    for i, node in enumerate(nodes_by_size):
        is_whole = 0 < i < len(nodes_by_size) - 1  # the last node may be shared with searchers, like the first
        counts += [previous_gpus + n for n in range(node if is_whole else 1, node + 1) if (node - n) % gpus_each == 0]
        previous_gpus += node
    return [count for count in counts if engine_gpus(nodes, count, gpus_each)] or [1]


def _tensor_parallel_flags(recipe: Recipe, hardware: Hardware) -> list[str]:
    """Returns the flag for the GPUs of each vLLM engine, where one is not enough for a searcher and several are."""
    uses_vllm = isinstance(recipe.model, HasGeneration) and recipe.model.generation.engine == "vllm"
    heads = recipe.model.attention_heads if isinstance(recipe.model, HasAttentionHeads) else None
    nodes = list(filter(None, _gpu_counts(hardware)))
    if not uses_vllm or heads is None or recipe.model.gpus_per_searcher > 1 or not all(hardware.gpus):
        return []
    most_gpus = max(nodes) - (1 if len(nodes) == 1 else 0)  # the trainer's
    for gpus_each in (1, 2, 4, 8, 16):
        flags = ["--model.vllm.tensor-parallel", str(gpus_each)]
        if gpus_each > most_gpus or heads % gpus_each:  # vLLM divides them
            break
        if _searcher_bytes(_gpu_bytes(override(recipe, flags, "", recorded=True))) <= USABLE * min(hardware.gpus):
            return flags if gpus_each > 1 else []
    return []


def _slot_flags(recipe: Recipe, hardware: Hardware) -> list[str]:
    """Returns the flag for the slots of an engine of ours, where the recipe leaves them open; none where even few do
    not fit. More than the default are taken only where all needs fit with an allocator's slack, and no checkpointing.
    """
    model = recipe.model
    if not isinstance(model, HasGeneration) or model.generation.slots is not None or may_use_vllm(recipe):
        return []
    if not all(hardware.gpus) or not needs(recipe):
        return []
    default_slots = model.generation.slot_count
    batch_slots = math.ceil(recipe.groups_per_step * recipe.group_size / _SLOT_STEP) * _SLOT_STEP
    for slots in range(min(max(batch_slots, default_slots), _MOST_SLOTS), 0, -_SLOT_STEP):
        flags = ["--model.generation.slots", str(slots)]
        sized_recipe = override(recipe, flags, "", recorded=True)
        shortage = (
            _memory_shortage(sized_recipe, hardware, has_slack=True)
            if slots > default_slots
            else memory_shortage(sized_recipe, hardware)
        )
        if shortage is None:
            return flags
    return []


def _share_flags(recipe: Recipe, hardware: Hardware) -> list[str]:
    """Returns the flags for the parts of a cluster's only GPU that Ray reserves for the trainer and each searcher; none
    where these do not fit on it.
    """
    is_shared = recipe.runtime == "cluster" and len(hardware.gpus) == 1 and hardware.gpus[0] and needs(recipe)
    if not is_shared or memory_shortage(recipe, hardware) is not None:
        return []
    worker_places = places_on(recipe, hardware)
    if (recipe.cluster.trainer_gpus, recipe.cluster.searcher_gpus) != (None, None) or "searcher-0" not in worker_places:
        return []
    shares = {"trainer": worker_places["trainer"].share, "searcher": worker_places["searcher-0"].share}
    parts = {half: math.floor(share / USABLE / _RAY_STEP) * _RAY_STEP for half, share in shares.items()}
    return [word for half, part in parts.items() for word in (f"--cluster.{half}-gpus", f"{part:g}")]


def _reserves_other_gpus(recipe: Recipe) -> bool:
    """Returns whether the recipe has set by hand which parts or numbers of GPUs Ray reserves for each worker."""
    trainer, searcher = recipe.cluster.trainer_gpus, recipe.cluster.searcher_gpus
    is_whole = trainer in (None, 1) and searcher in (None, max(1, recipe.model.gpus_per_searcher))
    return recipe.runtime == "cluster" and not is_whole


def _reserved_gpus(recipe: Recipe) -> tuple[float, float]:
    """Returns the GPUs that Ray reserves for each rank and each searcher, if not for less than whole ones by itself."""
    trainer, searcher = recipe.cluster.trainer_gpus, recipe.cluster.searcher_gpus
    default_searcher = recipe.model.gpus_per_searcher
    return 1.0 if trainer is None else trainer, default_searcher if searcher is None else searcher


def place_descriptions(recipe: Recipe, hardware: Hardware) -> dict[str, str]:
    """Returns where a run will be, to print: by worker on this machine, by node in a cluster. Nodes that are alike have
    one entry; none where Ray's reservations are set by hand, or workers need no GPUs.
    """
    if recipe.runtime != "cluster":
        return {worker: str(place) for worker, place in places_on(recipe, hardware).items()}
    if _reserves_other_gpus(recipe) or not recipe.model.gpus_per_searcher:
        return {}
    worker_places = places_on(recipe, hardware)
    idle_gpus = _idle_gpus(worker_places, hardware)
    texts = list(map(_node_description, _workers_by_node(worker_places, hardware), idle_gpus))
    descriptions = {}
    for text, numbers in groupby(range(1, len(texts) + 1), key=lambda number: texts[number - 1]):
        node_numbers = list(numbers)
        name = (
            f"node {node_numbers[0]}"
            if len(node_numbers) == 1
            else f"nodes {node_numbers[0]} to {node_numbers[-1]}, each"
        )
        descriptions[name] = text
    if waiting_count := recipe.trainer.count + len(searchers_of(recipe)) - len(worker_places):
        descriptions["waiting for more nodes"] = plural(waiting_count, "searcher")
    return descriptions


def _workers_by_node(worker_places: Mapping[str, Place], hardware: Hardware) -> list[list[str]]:
    """Returns the workers of each node, by the first of their GPUs."""
    node_of = [i for i, node in enumerate(hardware.nodes) for _ in node.gpus]
    workers: list[list[str]] = [[] for _ in hardware.nodes]
    for worker, place in worker_places.items():
        workers[node_of[place.gpus[0]]].append(worker)
    return workers


def _idle_gpus(worker_places: Mapping[str, Place], hardware: Hardware) -> list[int]:
    """Returns how many GPUs of each node have no worker."""
    used_gpus = {gpu for place in worker_places.values() for gpu in place.gpus}
    bounds = accumulate(_gpu_counts(hardware), initial=0)
    return [sum(gpu not in used_gpus for gpu in range(*bound)) for bound in pairwise(bounds)]


def _node_description(workers: list[str], idle_count: int) -> str:
    ranks = sum(worker.startswith("trainer") for worker in workers)
    searchers = len(workers) - ranks
    parts = [f"{plural(ranks, 'rank')} of the trainer"] if ranks else []
    parts += [plural(searchers, "searcher")] if searchers else []
    parts += [f"{plural(idle_count, 'GPU')} unused"] if idle_count else []
    return ", ".join(parts) or "no GPU"


def unused_gpus(recipe: Recipe, hardware: Hardware) -> str | None:
    """Returns a sentence about GPUs on which nothing will run; None where there are none."""
    gpus_each = recipe.model.gpus_per_searcher
    if not gpus_each:
        return None
    if _reserves_other_gpus(recipe):
        trainer, searcher = _reserved_gpus(recipe)
        reserved_gpus = recipe.trainer.count * trainer + len(searchers_of(recipe)) * searcher
        unused_count = len(hardware.gpus) - math.ceil(reserved_gpus - 1e-3)  # parts of which Ray rounds down
    else:
        unused_count = sum(_idle_gpus(places_on(recipe, hardware), hardware))
    if unused_count <= 0:
        return None
    remedy = "give more --searchers or --trainer.ranks, or neither, and as many are used as can be"
    if recipe.runtime == "inline":
        remedy = "the inline runtime has one process, --runtime processes has more"
    elif recipe.offline:
        remedy = "--offline nobody samples; more --trainer.ranks share a step"
    elif _reserves_other_gpus(recipe):
        remedy = "give more --searchers or --trainer.ranks, or leave out --cluster.trainer-gpus and .searcher-gpus"
    elif gpus_each > 1 and _free_engines(recipe, hardware) <= 0:
        remedy = f"an engine takes {gpus_each} GPUs of one node; other --trainer.ranks leave as many"
    return f"{unused_count} GPU{'s are' if unused_count > 1 else ' is'} unused: {remedy}"


def _free_engines(recipe: Recipe, hardware: Hardware) -> int:
    """Returns how many more searchers have room."""
    engines = engine_gpus(_gpu_counts(hardware), recipe.trainer.count, recipe.model.gpus_per_searcher)
    return len(engines) - len(searchers_of(recipe))


def unknown_gpus(recipe: Recipe, hardware: Hardware) -> str | None:
    """Returns a sentence about GPUs whose memory nobody knows; None where all are known."""
    if not recipe.model.gpus_per_searcher or all(hardware.gpus):
        return None
    return (
        "how much memory the cluster's GPUs have is not known, since CUDA does not start on some node: whether the run "
        "fits is not checked; describe the nodes with --cluster.nodes, such as 8x8x80"
    )


def refuse_what_cannot_fit(recipe: Recipe, hardware: Hardware, is_resumed: bool = False) -> None:
    """Raises `UserError` where a part cannot fit into the memory of its device; it names the fields that would help.

    is_resumed: the weights that are trained and their base cannot be changed any more.
    """
    if recipe.runtime == "cluster" and not _reserves_other_gpus(recipe):
        places_on(recipe, hardware)
    shortage = memory_shortage(recipe, hardware)
    if shortage is None:
        return
    half, sentence = shortage
    for flags in _memory_saving_flags(recipe, half):
        if is_resumed and _FIXED_FLAGS & {*flags}:
            continue
        try:
            fits = memory_shortage(override(recipe, flags, "", recorded=True), hardware) is None
        except UserError:  # too few GPUs, or what does not go together
            continue
        if fits:
            raise UserError(f"{sentence}: set {' '.join(flags)}, with which it fits")
    raise UserError(
        f"{sentence}: use {'' if is_resumed else 'a smaller model, '}more GPUs, or a machine with more memory"
    )


def memory_shortage(recipe: Recipe, hardware: Hardware) -> tuple[str, str] | None:
    """Returns which half needs more than there is (trainer, searcher, or both where they share a GPU), and a sentence
    that says so; None when all fits. Raises `UserError` where the GPUs are too few.
    """
    shortage = _memory_shortage(recipe, hardware)
    if shortage is not None and (smaller_recipe := with_checkpointing(recipe)) is not None:
        return _memory_shortage(smaller_recipe, hardware)
    return shortage


def _memory_shortage(recipe: Recipe, hardware: Hardware, has_slack: bool = False) -> tuple[str, str] | None:
    """has_slack: each worker needs what an allocator may lose, too."""
    computed_needs = needs(recipe)
    if not computed_needs:
        return None
    has_gpus = bool(hardware.gpus) and recipe.model.trainer_device.type == "cuda"
    is_by_hand = _reserves_other_gpus(recipe)
    worker_places = places_on(recipe, hardware) if has_gpus and not is_by_hand else {}
    if has_gpus and (is_by_hand or _has_whole_gpus(recipe, hardware)):
        shortage = _reservation_shortage(recipe, hardware, has_slack)
    else:
        shortage = _gpu_shortage(worker_places, _gpu_bytes(recipe), hardware.gpus, has_slack)
    if shortage is not None:
        return shortage
    need_of = {need.part: need.total for need in computed_needs if need.device != "cuda"}
    shortages = (load.shortage(need_of) for load in _host_loads(recipe, hardware, worker_places))
    return next(filter(None, shortages), None)


def _gpu_shortage(
    worker_places: Mapping[str, Place], bytes_of: Mapping[str, int], memories: tuple[int, ...], has_slack: bool
) -> tuple[str, str] | None:
    """Returns who needs more than a GPU has, and a sentence. memories: bytes of each GPU, 0 where that is unknown."""
    for gpu, bytes_by_worker in sorted(_needs_by_gpu(worker_places, bytes_of).items()):
        slack = sum(map(allocator_slack, bytes_by_worker.values())) if has_slack else 0
        if memories[gpu] and sum(bytes_by_worker.values()) + slack > USABLE * memories[gpu]:
            return _describe_shortage(gpu, bytes_by_worker, memories[gpu])
    return None


def _gpu_bytes(recipe: Recipe) -> dict[str, int]:
    """Returns what each part needs of a GPU, in bytes."""
    return {need.part: need.total for need in needs(recipe) if need.device == "cuda"}


def _searcher_bytes(bytes_of: Mapping[str, int]) -> int:
    """Returns what a searcher needs of its first GPU, with its reference and the models of rewards."""
    return sum(n for part, n in bytes_of.items() if part != "trainer")


def _needs_by_gpu(worker_places: Mapping[str, Place], bytes_of: Mapping[str, int]) -> dict[int, dict[str, int]]:
    """Returns what each worker needs of each GPU: an engine is on all of its own, reference and rewards on one."""
    bytes_by_gpu: dict[int, dict[str, int]] = {}
    for worker, place in worker_places.items():
        for gpu in place.gpus:
            worker_bytes = _searcher_bytes(bytes_of) if gpu == place.gpus[0] else bytes_of["searcher"]
            is_rank = worker.startswith("trainer")
            bytes_by_gpu.setdefault(gpu, {})[worker] = bytes_of["trainer"] if is_rank else worker_bytes
    return bytes_by_gpu


def _reservation_shortage(recipe: Recipe, hardware: Hardware, has_slack: bool) -> tuple[str, str] | None:
    """Returns the half that needs more of its GPU than is reserved for it, and a sentence."""
    bytes_of, memory = _gpu_bytes(recipe), min(hardware.gpus)
    needed_bytes = {"trainer": bytes_of["trainer"], "searcher": _searcher_bytes(bytes_of)}
    for (half, bytes_needed), reserved_gpus in zip(needed_bytes.items(), _reserved_gpus(recipe), strict=True):
        usable_bytes = int(USABLE * min(1.0, reserved_gpus) * memory)
        slack = allocator_slack(bytes_needed) if has_slack else 0
        if reserved_gpus and memory and bytes_needed + slack > usable_bytes + _RAY_STEP * memory:
            part = f"{reserved_gpus:g} of a GPU" if reserved_gpus < 1 else "its GPU"
            return half, f"the {half} needs {size(bytes_needed)} of {part}, of which {size(usable_bytes)} are usable"
    return None


@dataclass(frozen=True)
class _HostLoad:
    """Holds the workers that share the memory of one machine, with the words for it."""

    need: str  # such as: the run needs
    owner: str  # such as: this machine
    memory: int | None  # bytes; None: unknown
    ranks: int
    searchers: int
    has_replay: bool = True

    def shortage(self, need_of: Mapping[str, int]) -> tuple[str, str] | None:
        """Returns the half that needs most of the memory where that is too little, and a sentence. need_of: bytes of
        each part.
        """
        has_replay = int(self.has_replay)
        copies = {"trainer": self.ranks, "host": self.ranks, "replay": has_replay, "weights in memory": has_replay}
        bytes_by_part = {part: n * copies.get(part, self.searchers) for part, n in need_of.items()}
        needed_bytes = sum(bytes_by_part.values())
        if self.memory is None or needed_bytes <= self.memory:
            return None
        listing = ", ".join(f"{part} {size(n)}" for part, n in bytes_by_part.items() if n)
        half = "trainer" if 2 * bytes_by_part.get("trainer", 0) > needed_bytes else "searcher"
        return half, f"{self.need} {size(needed_bytes)} of memory ({listing}), and {self.owner} has {size(self.memory)}"


def _host_loads(recipe: Recipe, hardware: Hardware, worker_places: Mapping[str, Place]) -> Iterator[_HostLoad]:
    """Yields the workers of each machine. The nodes of a cluster count as one machine where workers have no places."""
    counts = recipe.trainer.count, recipe.searcher_count
    if not isinstance(hardware, ClusterNodes):
        yield _HostLoad("the run needs", "this machine", hardware.memory, *counts)
    elif not worker_places:
        memories = [node.memory for node in hardware.nodes if node.memory is not None]
        is_known = len(memories) == len(hardware.nodes)
        yield _HostLoad("the run needs", "the cluster", sum(memories) if is_known else None, *counts)
    else:
        for i, names in enumerate(_workers_by_node(worker_places, hardware)):
            node, ranks = hardware.nodes[i], sum(name.startswith("trainer") for name in names)
            words = f"the run needs on node {i + 1}", "it"
            yield _HostLoad(*words, node.memory, ranks, len(names) - ranks, "trainer" in names)


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
    if recipe.runtime != "inline" and recipe.model.gpus_per_searcher:
        rank_counts = (str(ranks) for ranks in (2, 4, 8, 16, 32, 64) if ranks > recipe.trainer.count)
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
    slot_flags: list[list[str]] = []
    if isinstance(recipe.model, HasGeneration):
        slot_flags += (["--model.generation.slots", limit] for limit in _halves(recipe.model.generation.slot_count))
    yield from ([], *slot_flags[:1])
    if with_trainer_scores(recipe) is not None:
        yield from ([*_TRAINER_SCORES, *flags] for flags in ([], *slot_flags))
    yield from slot_flags[1:]
    yield from (["--searchers", limit] for limit in _halves(recipe.searcher_count))


def _halves(number: int, least: int = 1) -> Iterator[str]:
    while (number := number // 2) >= least:
        yield str(number)
