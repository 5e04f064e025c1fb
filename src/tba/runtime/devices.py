"""Assigns the GPUs of a machine, or of a cluster's nodes, to the workers of a run, before anything starts.

Invariant: a pure function of what the workers need and the GPUs that there are. What a worker is given is all that it
sees (CUDA_VISIBLE_DEVICES), and the shares of memory on one GPU never add up to more than `USABLE`.

- Enough GPUs: each rank of the trainer has one, each searcher one (several for an engine that is spread over them).
- Several nodes: ranks fill the largest node first. An engine is on one node.
- Fewer: the trainer's ranks keep one each, and searchers share those that are left.
- One GPU, one rank: all workers share it. Each half has what it needs and `SLACK` or `LOST` more. The rest is the
  searchers' where vLLM may sample, which makes a larger cache of it; our own engine takes no more, so then it is the
  trainer's.
- No GPU: everything runs on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from tba.errors import UserError
from tba.gpus import GPU_SHARE, VISIBLE_DEVICES, visible_gpus
from tba.protocols import ChoosesEngine, HasGeneration
from tba.recipe import Recipe
from tba.runtime.needs import longest_prompt, needs, with_checkpointing
from tba.training.ranks.messages import name_of_rank

USABLE = 0.95  # of a GPU's memory: the rest is each process's context and what the driver holds
TRAINER = 0.5  # of it, where searchers are on the same GPU and nobody knows what the trainer needs
SLACK = 0.15  # of what is computed, for what an allocator loses
# environment variables by which torch's allocator is set, the one that releases since 2.11 prefer first
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
LOST = 2 << 30  # bytes, if there are as many: of a small model's passes of unequal lengths it loses a larger share


@dataclass(frozen=True)
class Place:
    """The GPUs of one worker, by number among those that are visible, and its share of the memory of each."""

    gpus: tuple[int, ...] = ()
    share: float = 0.0

    def __str__(self) -> str:
        if not self.gpus:
            return "CPU"
        numbers = ", ".join(map(str, self.gpus))
        share_note = "" if self.share >= USABLE else f" ({self.share:.0%} of its memory)"
        return f"GPU{'s' if len(self.gpus) > 1 else ''} {numbers}{share_note}"


def assign_gpus(
    ranks: Sequence[str],
    searchers: Sequence[str],
    gpus: int,
    gpus_each: int = 1,
    owner: str = "this machine shows",
    trainer: float = TRAINER,
    nodes: Sequence[int] = (),
) -> dict[str, Place]:
    """Returns a place for each rank of the trainer and each searcher, whose engine is spread over `gpus_each` GPUs.

    trainer: its share of a GPU that it has with searchers. owner: names in the error whose GPUs they are. nodes: how
    many of the GPUs each node has; empty: all are of one. Raises `UserError` where the workers do not fit.
    """
    if not gpus:
        return dict.fromkeys((*ranks, *searchers), Place())
    if gpus == len(ranks) == 1 and gpus_each == 1:
        searcher_share = (USABLE - trainer) / max(1, len(searchers))
        trainer_place = Place((0,), USABLE if not searchers else trainer)
        return {ranks[0]: trainer_place} | dict.fromkeys(searchers, Place((0,), searcher_share))
    nodes = nodes or (gpus,)
    teams = engine_gpus(nodes, len(ranks), gpus_each)[: len(searchers)]  # each of one searcher, or shared by several
    if gpus < len(ranks) or (searchers and not teams) or (gpus_each > 1 and len(teams) < len(searchers)):
        raise UserError(_too_few_message(len(ranks), len(searchers), gpus, gpus_each, owner))
    places = {rank: Place((gpu,), USABLE) for rank, gpu in zip(ranks, _rank_order(nodes), strict=False)}
    for i, searcher in enumerate(searchers):
        team = i % len(teams)
        sharers = len(range(team, len(searchers), len(teams)))
        places[searcher] = Place(teams[team], USABLE / sharers)
    return places


def _rank_order(nodes: Sequence[int]) -> list[int]:
    """Returns the GPUs of nodes in the order in which ranks take them: all of the largest node, then of the next."""
    firsts = [sum(nodes[:i]) for i in range(len(nodes))]
    node_order = sorted(range(len(nodes)), key=lambda i: -nodes[i])
    return [gpu for i in node_order for gpu in range(firsts[i], firsts[i] + nodes[i])]


def engine_gpus(nodes: Sequence[int], ranks: int, gpus_each: int) -> list[tuple[int, ...]]:
    """Returns the GPUs of each engine that has room beside the ranks: `gpus_each` GPUs of one node.

    nodes: how many GPUs each has.
    """
    rank_gpus, teams, first_gpu = set(_rank_order(nodes)[:ranks]), [], 0
    for count in nodes:
        free_gpus = [gpu for gpu in range(first_gpu, first_gpu + count) if gpu not in rank_gpus]
        team_count = len(free_gpus) // gpus_each
        teams += [tuple(free_gpus[i * gpus_each : (i + 1) * gpus_each]) for i in range(team_count)]
        first_gpu += count
    return teams


def _too_few_message(ranks: int, searchers: int, gpus: int, gpus_each: int, owner: str) -> str:
    searcher_need = "one GPU" if gpus_each == 1 else f"{gpus_each} GPUs, unshared"
    trainer_need = f"{ranks} rank{'s' if ranks > 1 else ''} of the trainer want one GPU each"
    least_gpus = ranks + (gpus_each * searchers if gpus_each > 1 else 1)
    remedy = "use fewer --trainer.ranks" if ranks > 1 else "use fewer --searchers"
    if gpus_each > 1:
        remedy += " or a smaller --model.vllm.tensor-parallel"
    searcher_count = f"{searchers} searcher{'s' if searchers > 1 else ''}"
    return (
        f"{trainer_need}, {searcher_count} {searcher_need} each: at least {least_gpus}, and "
        f"{owner} {gpus}; {remedy}, or let there be more of them ({VISIBLE_DEVICES})"
    )


def places(
    recipe: Recipe, searchers: Sequence[str], gpus: Sequence[int], nodes: Sequence[int] = ()
) -> dict[str, Place]:
    """Returns a place for each worker on GPUs of so many bytes (0: unknown). nodes: how many of them each node has;
    empty: all are of one. Raises `UserError` where they are too few.
    """
    ranks = [name_of_rank(rank) for rank in range(recipe.trainer.count)]
    gpus_each, is_cluster = recipe.model.gpus_per_searcher, recipe.runtime == "cluster"
    if gpus_each and not gpus and is_cluster:
        raise UserError(
            "the model needs GPUs, but the cluster has none that are free: describe the nodes that will join it "
            "(--cluster.nodes), or set --model.device cpu"
        )
    if gpus_each and not gpus:
        raise UserError(f"the model needs GPUs, but this machine has none ({VISIBLE_DEVICES}): set --model.device cpu")
    is_shared = gpus_each and len(gpus) == 1 and gpus[0]
    share = _trainer_share(recipe, gpus[0], len(searchers)) if is_shared else TRAINER
    owner = "the cluster has" if is_cluster else "this machine shows"
    return assign_gpus(ranks, searchers, len(gpus) if gpus_each else 0, max(1, gpus_each), owner, share, nodes)


def _trainer_share(recipe: Recipe, memory: int, searchers: int) -> float:
    """Returns the trainer's share of a GPU of so many bytes, on which the searchers are too."""
    need_of = {need.part: need.total for need in needs(recipe) if need.device == "cuda"}
    if not need_of:
        return TRAINER
    trainer_need, other_need = need_of.pop("trainer"), searchers * sum(need_of.values())  # engine, reference, rewards
    if trainer_need + other_need > USABLE * memory and (smaller_recipe := with_checkpointing(recipe)) is not None:
        return _trainer_share(smaller_recipe, memory, searchers)
    if trainer_need + other_need > USABLE * memory:  # refused; a run that is started all the same shares the GPU so
        return USABLE * trainer_need / (trainer_need + other_need)
    most = USABLE * memory - other_need
    trainer = trainer_need + allocator_slack(trainer_need)
    if not may_use_vllm(recipe):
        slack = searchers * allocator_slack(other_need / max(1, searchers))
        trainer = max(trainer, most - slack)  # what an engine of ours would never use
    return min(trainer, most) / memory


def allocator_slack(need: float) -> float:
    """Returns the bytes that an allocator may lose beside those that are computed."""
    return max(SLACK * need, LOST)


def environment_of(place: Place, driver_devices: str | None = None) -> dict[str, str]:
    """Returns the environment by which a worker's process sees the GPUs of its place only.

    driver_devices: the driver's own CUDA_VISIBLE_DEVICES, whose entries a place numbers; None: all of the machine's.
    """
    if not place.gpus:
        return {VISIBLE_DEVICES: ""}
    names = None if driver_devices is None else [name.strip() for name in driver_devices.split(",") if name.strip()]
    numbers = [str(gpu) if names is None else names[gpu] for gpu in place.gpus]
    return {VISIBLE_DEVICES: ",".join(numbers), GPU_SHARE: f"{place.share:.4f}"}


def visible_devices() -> str | None:
    """Returns the driver's own CUDA_VISIBLE_DEVICES."""
    return os.environ.get(VISIBLE_DEVICES)


def may_use_vllm(recipe: Recipe) -> bool:
    """Returns whether vLLM may sample, or another engine that nobody knows. The engine `auto` takes vLLM where it is
    installed, and the nodes of a cluster may have it; a recipe that names vLLM is planned with it on any machine.
    """
    model = recipe.model
    if not isinstance(model, ChoosesEngine):
        return True
    if not model.may_use_vllm(longest_prompt(recipe)):
        return False
    is_auto = isinstance(model, HasGeneration) and model.generation.engine == "auto"
    return not is_auto or recipe.runtime == "cluster" or find_spec("vllm") is not None


@contextmanager
def searcher_share(recipe: Recipe) -> Iterator[None]:
    """Have the searcher that is loaded meanwhile take no more of this process's GPU than the trainer leaves, which the
    process will have beside it.
    """
    gpus = visible_gpus().memory if recipe.model.gpus_per_searcher else ()
    if not any(gpus):
        yield
        return
    names = {GPU_SHARE, *_ALLOCATOR_SETTINGS} - set(os.environ)
    os.environ[GPU_SHARE] = f"{USABLE - _trainer_share(recipe, gpus[0], 1):.4f}"
    try:
        yield
    finally:
        for name in names:  # a later run of this process has its own
            os.environ.pop(name, None)


def extend_segments(recipe: Recipe, worker: str) -> None:
    """Have torch's allocator extend its segments in the process of a worker that was given a GPU: blocks that were
    freed then serve requests of any size. Called before CUDA starts, which reads the setting.

    The user's own setting stays. A searcher that may sample by vLLM has none: what vLLM's ranks share with one another,
    and its sleep mode, need segments of a fixed size.
    """
    model = recipe.model
    is_own_engine = isinstance(model, HasGeneration) and model.generation.engine == "transformers"
    has_setting = any(name in os.environ for name in _ALLOCATOR_SETTINGS)
    if GPU_SHARE in os.environ and not has_setting and (is_own_engine or worker.startswith("trainer")):
        os.environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def limit_gpu_memory() -> None:
    """Limit this process to its share of its GPU's memory, if the environment names one."""
    share = float(os.environ.get(GPU_SHARE, "0"))
    if 0 < share < USABLE and torch.cuda.is_available():
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(share, gpu)
