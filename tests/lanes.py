"""A lane of copies on a machine without a GPU: a thread, which works in order once its gate is open."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

DEADLINE = 60.0


@dataclass
class Done:
    """When the host is the device, both wait for the thread."""

    copied: Future[None]

    def hold(self) -> None:
        self.copied.result(DEADLINE)

    def wait(self) -> None:
        self.copied.result(DEADLINE)


@dataclass
class ThreadLane:
    gate: threading.Event = field(default_factory=threading.Event)
    rooms: list[int] = field(default_factory=list)  # bytes of each that was made
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def run(self, act: Callable[[], None]) -> Done:
        def later() -> None:
            assert self.gate.wait(DEADLINE)
            act()

        return Done(self._thread.submit(later))

    def allocate(self, size: int) -> Tensor:
        self.rooms.append(size)
        return torch.empty(size, dtype=torch.uint8)


def open_lane() -> ThreadLane:
    lane = ThreadLane()
    lane.gate.set()
    return lane
