"""Places each worker of a run on a cluster, before anything starts.

Invariant: the trainer (the first of its ranks) and the journal are on the machine of the driver, where the run's
directory is; its other ranks are there too as far as they fit, then on nodes that have ranks already; each searcher is
on the node that has most left of what it asks for, after those before it. What does not fit is refused in a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tba.cards import GIVEN, VISIBLE, cards
from tba.errors import UserError
from tba.protocols import HasDtype
from tba.recipe import Recipe
from tba.record.memory import machine_memory_bytes, usable_cores
from tba.record.text import size
from tba.runtime.cluster.gateway import KEPT
from tba.runtime.devices import USABLE, Place
from tba.runtime.devices import placed as placed_on_gpus
from tba.training.ranks.messages import name_of_rank

_SLACK = 1e-9  # so that thirds of a GPU add up to one


@dataclass
class Node:
    """A machine: what is free on it when the run begins, and what is left of that."""

    key: str
    name: str
    cpus: float
    gpus: float
    memory_bytes: float
    here: bool  # whether the driver is on it
    left: dict[str, float] = field(init=False)
    _each: list[float] = field(init=False)  # what is left of each GPU: a fraction is taken from a single one

    def __post_init__(self) -> None:
        self.left = {"CPU": self.cpus, "GPU": self.gpus}
        whole = int(self.gpus + _SLACK)
        rest = self.gpus - whole  # others have parts of some GPUs: Ray says how much is free, not on which
        self._each = [1.0] * whole + ([rest] if rest > _SLACK else [])

    def fits(self, asked: Mapping[str, float]) -> bool:
        """Returns whether that much is left."""
        return self.left["CPU"] - asked["CPU"] > -_SLACK and self._gpus(asked["GPU"]) is not None

    def take(self, asked: Mapping[str, float]) -> None:
        for i in self._gpus(asked["GPU"]) or ():
            self._each[i] -= min(asked["GPU"], 1.0)
        for kind, amount in asked.items():
            self.left[kind] -= amount

    def _gpus(self, amount: float) -> list[int] | None:
        """Returns the GPUs that it would be given: whole ones, or the fullest one that has room for a fraction; None:
        there are none.
        """
        if amount >= 1:
            whole = [i for i, left in enumerate(self._each) if left > 1 - _SLACK]
            return whole[: round(amount)] if len(whole) >= amount else None
        room = [i for i, left in enumerate(self._each) if left - amount > -_SLACK]
        return ([min(room, key=lambda i: self._each[i])] if room else None) if amount else []


def this_machine() -> Node:
    """Returns the single node of a cluster of our own."""
    memory = machine_memory_bytes() or 0
    return Node("here", "this machine", usable_cores(), len(cards()), memory, here=True)


@dataclass(frozen=True)
class Placed:
    """A worker and its node."""

    worker: str
    node: Node
    asked: Mapping[str, float]  # CPU, GPU


def requests(recipe: Recipe, gpus: int, searchers: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns the CPUs and GPUs that each worker asks for, where the cluster has `gpus` free.

    GPUs that no setting names are dealt as on one machine (`devices.placed`). Raises `UserError` where they do not do.
    """
    settings, each = recipe.cluster, recipe.model.gpus_per_searcher
    ranks = [name_of_rank(rank) for rank in range(recipe.trainer.count)]
    workers = (*ranks, *searchers)
    given = {worker: settings.trainer_gpus if worker in ranks else settings.searcher_gpus for worker in workers}
    dealt = dict.fromkeys(workers, Place())
    if each and None in given.values():
        dealt = placed_on_gpus(ranks, searchers, gpus, each, "the Ray cluster has free")
        least = min((dealt[name].share for name in searchers), default=0.0)
        dealt |= {name: replace(dealt[name], share=least) for name in searchers}  # equal parts fill GPUs in any order
    wanted: dict[str, dict[str, float]] = {}
    for worker in workers:
        amount, place = given[worker], dealt[worker]
        if amount is None:  # whole GPUs, or a part of one, in Ray's steps of a ten thousandth
            amount = len(place.gpus) * math.floor(1e4 * min(1.0, place.share / USABLE + _SLACK)) / 1e4
        wanted[worker] = {"CPU": settings.trainer_cpus if worker in ranks else settings.searcher_cpus, "GPU": amount}
    is_auto = isinstance(recipe.model, HasDtype) and recipe.model.dtype == "auto"
    if is_auto and len({amounts["GPU"] > 0 for amounts in wanted.values()}) > 1:
        raise UserError(
            "some workers ask for GPUs and others for none, so that trainer and reference would compute in different "
            "precisions: give all of them some (--cluster.trainer-gpus, --cluster.searcher-gpus) or set --model.dtype"
        )
    return wanted


def share_of_gpu(gpus: float) -> dict[str, str]:
    """Returns the environment of a worker that was given so many GPUs: its share of each one's memory. One that was
    given none sees none; of the others Ray says which they see.
    """
    return {GIVEN: f"{min(gpus, 1.0) * USABLE:.4f}"} if gpus else {VISIBLE: ""}


def plan(recipe: Recipe, nodes: Sequence[Node], searchers: Sequence[str]) -> list[Placed]:
    """Assign nodes: the trainer's ranks first, then the searchers. Raises `UserError` when they do not fit."""
    here = next(node for node in nodes if node.here)
    found: list[Placed] = []
    for worker, wanted in requests(recipe, sum(int(n.gpus + _SLACK) for n in nodes), searchers).items():
        candidates = [here] if worker == "trainer" else nodes
        free = [node for node in candidates if node.fits(wanted)]
        if not free:
            raise UserError(_too_much(worker, wanted, candidates))
        kind = "GPU" if wanted["GPU"] > 0 else "CPU"
        with_ranks = {p.node.key for p in found} if worker.startswith("trainer") else set()
        node = max(free, key=lambda n: (n.key in with_ranks, n.left[kind], n.here))
        node.take(wanted)
        found.append(Placed(worker, node, wanted))
    return found


def _too_much(worker: str, asked: Mapping[str, float], candidates: Sequence[Node]) -> str:
    where = f"{candidates[0].name}, where the run is" if worker == "trainer" else f"any of {len(candidates)} nodes"
    left = "; ".join(f"{n.name} has {n.left['CPU']:g} CPU and {n.left['GPU']:g} GPU left" for n in candidates)
    less = "use fewer --searchers, let each ask for less (--cluster.searcher-cpus 0.5, --cluster.searcher-gpus 0.5)"
    if worker.startswith("trainer-"):
        less = "use fewer --trainer.ranks, let each ask for less (--cluster.trainer-cpus 0.5)"
    return (
        f"{worker} asks for {asked['CPU']:g} CPU and {asked['GPU']:g} GPU, which do not fit on {where} ({left}): "
        f"{less}, or add nodes"
    )


def whereabouts(placed: Sequence[Placed]) -> list[str]:
    """Returns a line for each node: what runs there, and how many of it."""
    return [_line(node, placed) for node in _nodes(placed)]


def table(placed: Sequence[Placed], trainer_bytes: int, searcher_bytes: int, weights_bytes: int) -> list[str]:
    """Returns a line for each node, with the memory that it needs. Raises `UserError` when there is less.

    `trainer_bytes` is the sum over all ranks (each has about its share), `weights_bytes` the size of one version, of
    which the trainer's node keeps several in its object store, and the other nodes the newest two.
    """
    lines, all_ranks = [], sum(p.worker.startswith("trainer") for p in placed)
    for node in _nodes(placed):
        workers = [p.worker for p in placed if p.node.key == node.key]
        ranks = sum(worker.startswith("trainer") for worker in workers)
        versions = KEPT + 1 if "trainer" in workers else 2
        needed = (len(workers) - ranks) * searcher_bytes + versions * weights_bytes + trainer_bytes * ranks // all_ranks
        lines.append(f"{_line(node, placed)}, about {size(needed)} of {size(int(node.memory_bytes))}")
        if 0 < node.memory_bytes < needed:
            raise UserError(
                f"{lines[-1]}: that is more than there is; use a smaller model, fewer --searchers or more nodes"
            )
    return lines


def _nodes(placed: Sequence[Placed]) -> list[Node]:
    return list({p.node.key: p.node for p in placed}.values())


def _line(node: Node, placed: Sequence[Placed]) -> str:
    workers = [p.worker for p in placed if p.node.key == node.key]
    all_ranks = sum(p.worker.startswith("trainer") for p in placed)
    ranks = sum(worker.startswith("trainer") for worker in workers)
    searchers = len(workers) - ranks
    several = f" ({ranks} of {all_ranks} ranks)" if all_ranks > 1 else ""
    what = [f"trainer{several} and journal"] if "trainer" in workers else []
    what += [f"{ranks} rank{'s' if ranks > 1 else ''} of the trainer"] if ranks and "trainer" not in workers else []
    what += [f"{searchers} searcher{'s' if searchers > 1 else ''}"] if searchers else []
    used = {kind: sum(p.asked[kind] for p in placed if p.node.key == node.key) for kind in ("CPU", "GPU")}
    return (
        f"{node.name}{' (here)' if node.here else ''}: {' and '.join(what)}; {used['CPU']:g} of {node.cpus:g} CPU, "
        f"{used['GPU']:g} of {node.gpus:g} GPU"
    )
