"""Holds the hardware that a run is sized for: this machine, or the nodes of a Ray cluster, live or described.

Invariant: what is not known of a machine is unknown, and never guessed. Ray chooses the nodes of a run's workers, so
that every GPU of a cluster counts as its smallest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tba.gpus import visible_gpus
from tba.record.memory import machine_memory_bytes


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
class ClusterNodes:
    """The machines of a Ray cluster that a run may use."""

    nodes: tuple[Machine, ...]

    @property
    def gpus(self) -> tuple[int, ...]:
        """Returns the bytes of each GPU, node by node: those of the smallest, since a worker may get any of them."""
        sizes = [gpu for node in self.nodes for gpu in node.gpus]
        return (min(sizes),) * len(sizes) if sizes else ()


Hardware: TypeAlias = Machine | ClusterNodes
