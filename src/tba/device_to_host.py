"""Copies of a GPU's tensors in the host's memory, made beside what the GPU computes next.

Invariant: a copy begins after all that the device had been given before it (the update that made the weights), on a
stream of its own, where it is cast. Whoever changes the tensors calls `hold` first: what is launched from there on
waits for the copy, on the device and not on the host. The memory is that of the file where this lies in memory
(`weights.slots`). Else it is pinned, allocated once and taken again by the next copy, which is begun only when nobody
reads the one before. What lies on the host is not copied but read in place; then
its readers have to be waited for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from tba.streaming import TensorStream, copy_in_blocks, written_type

log = logging.getLogger("tba.weights")
_PORTABLE, _READ_ONLY = 1, 8  # flags of cudaHostRegister: for all GPUs; memory that is mapped to be read only
_ALIGNMENT = 64  # bytes: where a tensor may begin


class WorkPoint(Protocol):
    """A point in a lane's work."""

    def hold(self) -> None:
        """Makes the device reach this point before it begins any work that it is given from here on."""

    def wait(self) -> None:
        """Blocks the caller until this point is reached."""


class Lane(Protocol):
    """Does work at the same time as a device computes."""

    def run(self, function: Callable[[], None]) -> WorkPoint:
        """Runs `function` after all work that the device has been given so far, and returns the point after it."""

    def allocate(self, size: int) -> Tensor:
        """Returns `size` bytes of the host's memory, as uint8, into which the device copies."""


class CudaStream:
    """A stream of a GPU as a `Lane`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, function: Callable[[], None]) -> WorkPoint:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            function()
        return CudaEvent(self._stream.record_event(), self._device)

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)  # torch rounds up to a power of two


class CudaEvent:
    """An event of a GPU as a `WorkPoint`."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def hold(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()


def register_with_gpu(address: int, size: int, is_read_only: bool) -> Callable[[], None] | None:
    """Makes `size` bytes of this process's memory such that a GPU copies from or to them by itself. Returns what undoes
    this, before the memory is given back; None where this process uses no GPU, or the GPU refuses.
    """
    if not torch.cuda.is_initialized():
        return None
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, size, _PORTABLE | (_READ_ONLY if is_read_only else 0))
    if error.value:
        log.warning("%.2f GB of memory are not registered with the GPU: %s (%d)", size / 1e9, error, error.value)
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # raises the error that the runtime keeps, which the next kernel would
        return None
    return lambda: runtime.cudaHostUnregister(address)


def begin_reading(values: Tensor) -> Callable[[], list[float]]:
    """Begins to copy a few numbers [N] to the host, after what the device has been given so far. Returns a function
    that waits for this copy, and for nothing that comes later, and returns the numbers.
    """
    if not values.is_cuda:
        return values.tolist
    copies = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    event = torch.cuda.current_stream(values.device).record_event()

    def read() -> list[float]:
        event.synchronize()
        return copies.tolist()

    return read


class HostCopies:
    """Copies the tensors of one model, version after version, into the same memory."""

    def __init__(self, lane: Lane | None = None) -> None:
        self._lane = lane  # None: a stream of the GPU on which the first tensor lies, if it does
        self._layout: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._copies: dict[str, Tensor] = {}
        self._last_copy: WorkPoint | None = None

    def begin_copy(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype | None = None,
        reserve: Callable[[], Mapping[str, Tensor] | None] = lambda: None,
    ) -> Mapping[str, Tensor]:
        """Begins a copy and returns its tensors, whose `items()` wait for it. Tensors of floating point become `dtype`
        (None: they keep their type).

        They go into the tensors that `reserve` returns, or else into memory of these copies; then earlier copies must
        not be read any more. Where the tensors lie on the host, they are returned themselves.
        """
        device = next((t.device for t in tensors.values()), None)
        if self._lane is None and device is not None and device.type == "cuda":
            self._lane = CudaStream(device)
        if self._lane is None:
            return tensors
        layout = {name: (written_type(t.dtype, dtype), t.shape) for name, t in tensors.items()}
        copies = reserve()
        if copies is None and layout != self._layout:
            self._layout, self._copies = layout, _allocate(layout, self._lane.allocate)
        copies = self._copies if copies is None else copies
        sources = {name: t.detach() for name, t in tensors.items()}

        def copy() -> None:
            for name, tensor in sources.items():
                copy_in_blocks(tensor, copies[name], non_blocking=True)

        point = self._last_copy = self._lane.run(copy)

        def items() -> Iterator[tuple[str, Tensor]]:
            point.wait()
            yield from copies.items()

        meta_tensors = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in copies.items()}
        return TensorStream(meta_tensors, items, hold=self.hold)

    def hold(self) -> bool:
        """Makes work of the device from here on, which may change the tensors, wait for the last copy.

        Returns False where nothing is copied; then the caller has to wait for the readers of the tensors.
        """
        if self._last_copy is None:
            return False
        self._last_copy.hold()
        return True


def _allocate(layout: Mapping[str, tuple[torch.dtype, torch.Size]], room: Callable[[int], Tensor]) -> dict[str, Tensor]:
    """Returns a tensor for each entry, all in one block of memory."""
    sizes = {name: math.prod(shape) * kind.itemsize for name, (kind, shape) in layout.items()}
    aligned_sizes = [size + -size % _ALIGNMENT for size in sizes.values()]
    parts = room(max(sum(aligned_sizes), 1))[: sum(aligned_sizes)].split(aligned_sizes)
    return {
        name: part[: sizes[name]].view(kind).view(shape)
        for part, (name, (kind, shape)) in zip(parts, layout.items(), strict=True)
    }
