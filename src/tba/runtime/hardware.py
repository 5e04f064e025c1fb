"""Says which hardware a run is sized for: this machine, the nodes of a Ray cluster, or nodes that a setting describes.

Invariant: what is not known of a machine is unknown, and never guessed. Ray chooses the nodes of a run's workers, so
that every GPU of a cluster counts as its smallest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tba.gpus import visible_gpus
from tba.recipe import Recipe
from tba.record.memory import machine_memory_bytes

_GB = 10**9


@dataclass(frozen=True)
class Machine:
    """The memory of a machine and of each of its GPUs, in bytes."""

    memory: int | None = None  # None: unknown
    gpus: tuple[int, ...] = ()  # 0: unknown

    @classmethod
    def here(cls) -> Machine:
        return cls(machine_memory_bytes(), visible_gpus().memory)

    @property
    def nodes(self) -> tuple[Machine, ...]:
        return (self,)


@dataclass(frozen=True)
class Cluster:
    """The machines of a Ray cluster that a run may use."""

    nodes: tuple[Machine, ...]

    @property
    def gpus(self) -> tuple[int, ...]:
        """Returns the bytes of each GPU, node by node: those of the smallest, since a worker may get any of them."""
        sizes = [gpu for node in self.nodes for gpu in node.gpus]
        return (min(sizes),) * len(sizes) if sizes else ()


Hardware: TypeAlias = Machine | Cluster


def hardware_of(recipe: Recipe) -> Hardware:
    """Returns the hardware of a recipe's run. Raises `UserError` where its cluster cannot be reached."""
    if recipe.runtime != "cluster":
        return Machine.here()
    if described_nodes := recipe.cluster.described_nodes():
        return Cluster(tuple(Machine(gpus=(int(gb * _GB),) * gpus) for gpus, gb in described_nodes))
    if recipe.address is None:  # a cluster of its own
        return Machine.here()
    from tba.runtime.cluster.machines import machines_at  # needs Ray

    return Cluster(machines_at(recipe.address))
