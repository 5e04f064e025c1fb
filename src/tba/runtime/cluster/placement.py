"""Says what each worker of a run asks of a cluster, and where it would go now.

Invariant: the trainer (the first of its ranks), the journal and the driver are on one machine, where the run's
directory is; the other ranks are there too as far as they fit, then on nodes that have ranks already; each searcher is
on the node that has most left of what it asks for, after those before it. In a cluster that was there before, a
searcher without room waits for a node; what else does not fit is refused in a sentence. Ray has the last word: the
driver reserves bundles of placement groups (`driver`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tba.errors import UserError
from tba.gpus import GPU_SHARE, VISIBLE_DEVICES, visible_gpus
from tba.protocols import HasDtype
from tba.recipe import Recipe
from tba.record.memory import machine_memory_bytes, usable_cores
from tba.record.text import size
from tba.runtime.cluster.gateway import KEPT_VERSIONS
from tba.runtime.devices import USABLE, Place, assign_gpus
from tba.training.ranks.messages import name_of_rank

RAY_ADDRESS = "RAY_ADDRESS"  # environment variable: the cluster that Ray's own commands use
NODE_ADDRESS = "TBA_NODE_ADDRESS"  # environment variable: the node that this command was moved to (`relocation`)
_SLACK = 1e-9  # so that thirds of a GPU add up to one


def address_of(recipe: Recipe) -> str | None:
    """Returns the address of the Ray cluster to join: the recipe's, else that of the environment, which a job that was
    submitted to a cluster has. A command that was moved has the environment's. None: the run has a cluster of its own.
    """
    is_moved = NODE_ADDRESS in os.environ
    address = (None if is_moved else recipe.address) or os.environ.get(RAY_ADDRESS)
    return None if address in ("", "local") else address


@dataclass
class Node:
    """A machine, with the resources that are free on it, also of those that the run may use."""

    key: str
    name: str
    cpus: float
    gpus: float
    memory_bytes: float
    here: bool  # whether the driver is on it
    free: dict[str, float] = field(init=False)
    _gpu_shares: list[float] = field(init=False)  # what is left of each GPU: a fraction is taken from a single one

    def __post_init__(self) -> None:
        self.free = {"CPU": self.cpus, "GPU": self.gpus}
        whole_count = int(self.gpus + _SLACK)
        fraction = self.gpus - whole_count  # others have parts of some GPUs: Ray says how much is free, not on which
        self._gpu_shares = [1.0] * whole_count + ([fraction] if fraction > _SLACK else [])

    def fits(self, request: Mapping[str, float]) -> bool:
        """Returns whether the resources of a request are free."""
        return self.free["CPU"] - request["CPU"] > -_SLACK and self._choose_gpus(request["GPU"]) is not None

    def reserve(self, request: Mapping[str, float]) -> None:
        for i in self._choose_gpus(request["GPU"]) or ():
            self._gpu_shares[i] -= min(request["GPU"], 1.0)
        for kind, amount in request.items():
            self.free[kind] -= amount

    def _choose_gpus(self, amount: float) -> list[int] | None:
        """Returns the GPUs for an amount: whole ones, or the fullest with room for a fraction; None for no room."""
        if amount >= 1:
            whole_gpus = [i for i, share in enumerate(self._gpu_shares) if share > 1 - _SLACK]
            return whole_gpus[: round(amount)] if len(whole_gpus) >= amount else None
        roomy_gpus = [i for i, share in enumerate(self._gpu_shares) if share - amount > -_SLACK]
        return ([min(roomy_gpus, key=lambda i: self._gpu_shares[i])] if roomy_gpus else None) if amount else []


def this_machine() -> Node:
    """Returns the single node of a cluster of our own."""
    return Node("here", "this machine", usable_cores(), len(visible_gpus()), machine_memory_bytes() or 0, here=True)


@dataclass(frozen=True)
class Placement:
    """A worker, its node and its resources there."""

    worker: str
    node: Node | None  # None: it waits for one with room
    resources: Mapping[str, float]  # CPU, GPU


def requests(recipe: Recipe, gpus: int, searchers: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns the CPUs and GPUs that each worker asks for, where the cluster has `gpus` free.

    GPUs that no setting names are whole ones in a cluster that was there before, which may grow; on one machine, or one
    GPU, they are assigned as without Ray. Raises `UserError` where they are too few.
    """
    settings, gpus_each = recipe.cluster, recipe.model.gpus_per_searcher
    ranks = [name_of_rank(rank) for rank in range(recipe.trainer.count)]
    workers = (*ranks, *searchers)
    gpu_settings = {worker: settings.trainer_gpus if worker in ranks else settings.searcher_gpus for worker in workers}
    gpu_places = dict.fromkeys(workers, Place())
    if gpus_each and gpus > 1 and address_of(recipe) is not None:
        gpu_places |= {w: Place(tuple(range(1 if w in ranks else gpus_each)), USABLE) for w in workers}
    elif gpus_each and None in gpu_settings.values():
        gpu_places = assign_gpus(ranks, searchers, gpus, gpus_each, "the Ray cluster has free")
        share = min((gpu_places[name].share for name in searchers), default=0.0)
        gpu_places |= {name: replace(gpu_places[name], share=share) for name in searchers}  # equal parts fill any GPU
    resources: dict[str, dict[str, float]] = {}
    for worker in workers:
        amount, place = gpu_settings[worker], gpu_places[worker]
        if amount is None:  # whole GPUs, or a part of one, in Ray's steps of a ten thousandth
            amount = len(place.gpus) * math.floor(1e4 * min(1.0, place.share / USABLE + _SLACK)) / 1e4
        resources[worker] = {"CPU": settings.trainer_cpus if worker in ranks else settings.searcher_cpus, "GPU": amount}
    is_auto = isinstance(recipe.model, HasDtype) and recipe.model.dtype == "auto"
    if is_auto and len({r["GPU"] > 0 for r in resources.values()}) > 1:
        raise UserError(
            "some workers ask for GPUs and others for none, so that trainer and reference would compute in different "
            "precisions: give all of them some (--cluster.trainer-gpus, --cluster.searcher-gpus) or set --model.dtype"
        )
    return resources


def share_of_gpu(gpus: float) -> dict[str, str]:
    """Returns the environment of a worker that was given so many GPUs: its share of each one's memory. One that was
    given none sees none; of the others Ray says which they see.
    """
    return {GPU_SHARE: f"{min(gpus, 1.0) * USABLE:.4f}"} if gpus else {VISIBLE_DEVICES: ""}


def plan(recipe: Recipe, nodes: Sequence[Node], searchers: Sequence[str]) -> list[Placement]:
    """Assign nodes: the trainer's ranks first, then the searchers. Raises `UserError` when they do not fit.

    The trainer is on the driver's node, or on another one where that has no room: then the driver moves there.
    """
    driver_node = next(node for node in nodes if node.here)
    is_joined = address_of(recipe) is not None
    placements: list[Placement] = []
    for worker, request in requests(recipe, whole_gpus(nodes), searchers).items():
        is_rank = worker.startswith("trainer")
        stays_here = worker == "trainer" and (driver_node.fits(request) or not is_joined)
        candidates = [driver_node] if stays_here else nodes
        rank_nodes = {p.node.key for p in placements if p.node} if is_rank else set()
        node = reserve_roomiest(candidates, request, rank_nodes)
        if node is None and (is_rank or not is_joined):
            raise UserError(_too_much(worker, request, candidates))
        placements.append(Placement(worker, node, request))
    return placements


def whole_gpus(nodes: Sequence[Node]) -> int:
    """Returns how many whole GPUs are free."""
    return sum(int(node.gpus + _SLACK) for node in nodes)


def reserve_roomiest(
    nodes: Sequence[Node], request: Mapping[str, float], preferred: Collection[str] = ()
) -> Node | None:
    """Reserve a request on the node that has most left of it, a preferred one first; None: on no node is room."""
    fitting_nodes = [node for node in nodes if node.fits(request)]
    if not fitting_nodes:
        return None
    kind = "GPU" if request["GPU"] > 0 else "CPU"
    node = max(fitting_nodes, key=lambda n: (n.key in preferred, n.free[kind], n.here))
    node.reserve(request)
    return node


def request_text(request: Mapping[str, float]) -> str:
    """Returns a request in words."""
    return f"{request['CPU']:g} CPU and {request['GPU']:g} GPU"


def _too_much(worker: str, request: Mapping[str, float], candidates: Sequence[Node]) -> str:
    is_here = worker == "trainer" and len(candidates) == 1
    location = f"{candidates[0].name}, where the run is" if is_here else f"any of {len(candidates)} nodes"
    remainders = "; ".join(f"{n.name} has {n.free['CPU']:g} CPU and {n.free['GPU']:g} GPU left" for n in candidates)
    remedy = "use fewer --searchers, let each ask for less (--cluster.searcher-cpus 0.5, --cluster.searcher-gpus 0.5)"
    if worker.startswith("trainer-"):
        remedy = "use fewer --trainer.ranks, let each ask for less (--cluster.trainer-cpus 0.5)"
    return (
        f"{worker} asks for {request_text(request)}, which do not fit on {location} "
        f"({remainders}): {remedy}, or add nodes"
    )


def placement_lines(placements: Sequence[Placement]) -> list[str]:
    """Returns a line for each node, with the workers that it runs, and one for those that wait for a node."""
    return [*(_describe_node(node, placements) for node in _nodes_of(placements)), *_waiting_lines(placements)]


def _waiting_lines(placements: Sequence[Placement]) -> list[str]:
    pending_searchers = [p for p in placements if p.node is None]
    if not pending_searchers:
        return []
    request = pending_searchers[0].resources
    remedy = "; a smaller --cluster.searcher-gpus, such as 0.5, lets several share a GPU" if request["GPU"] == 1 else ""
    count = f"{len(pending_searchers)} searcher{'s' if len(pending_searchers) > 1 else ''}"
    return [f"{count} will wait for nodes with {request_text(request)} free{remedy}"]


def memory_lines(
    placements: Sequence[Placement], trainer_bytes: int, searcher_bytes: int, weights_bytes: int
) -> list[str]:
    """Returns a line for each node, with the memory that its workers need. Raises `UserError` when it has less.

    `trainer_bytes` is the sum over all ranks (each has about its share), `weights_bytes` the size of one version, of
    which the trainer's node keeps several in its object store, and the other nodes the newest two.
    """
    lines, all_ranks = [], sum(p.worker.startswith("trainer") for p in placements)
    for node in _nodes_of(placements):
        workers = [p.worker for p in _on(node, placements)]
        ranks = sum(worker.startswith("trainer") for worker in workers)
        versions = KEPT_VERSIONS + 1 if "trainer" in workers else 2
        needed = (len(workers) - ranks) * searcher_bytes + versions * weights_bytes + trainer_bytes * ranks // all_ranks
        lines.append(f"{_describe_node(node, placements)}, about {size(needed)} of {size(int(node.memory_bytes))}")
        if 0 < node.memory_bytes < needed:
            raise UserError(f"{lines[-1]}: more than there is; use a smaller model, fewer --searchers or more nodes")
    return [*lines, *_waiting_lines(placements)]


def _nodes_of(placements: Sequence[Placement]) -> list[Node]:
    return list({p.node.key: p.node for p in placements if p.node}.values())


def _on(node: Node, placements: Sequence[Placement]) -> list[Placement]:
    return [p for p in placements if p.node and p.node.key == node.key]


def _describe_node(node: Node, placements: Sequence[Placement]) -> str:
    workers = [p.worker for p in _on(node, placements)]
    all_ranks = sum(p.worker.startswith("trainer") for p in placements)
    ranks = sum(worker.startswith("trainer") for worker in workers)
    searchers = len(workers) - ranks
    rank_note = f" ({ranks} of {all_ranks} ranks)" if all_ranks > 1 else ""
    parts = [f"trainer{rank_note} and journal"] if "trainer" in workers else []
    parts += [f"{ranks} rank{'s' if ranks > 1 else ''} of the trainer"] if ranks and "trainer" not in workers else []
    parts += [f"{searchers} searcher{'s' if searchers > 1 else ''}"] if searchers else []
    amounts = {kind: sum(p.resources[kind] for p in _on(node, placements)) for kind in ("CPU", "GPU")}
    return (
        f"on {node.name}{' (here)' if node.here else ''}: {' and '.join(parts)}; "
        f"{amounts['CPU']:g} of {node.cpus:g} CPU, {amounts['GPU']:g} of {node.gpus:g} GPU"
    )
