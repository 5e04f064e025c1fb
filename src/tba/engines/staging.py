"""Newer weights on the engine's device before they are loaded: copied beside what the device computes.

Invariant: the copy is made on a lane of its own, and only loading waits for it. So decoding goes on while weights come
from the host, and replacing them is a copy within the device's memory. The device waits for the copy before it loads.
The host waits for it once it has told the device all of the loading, or when staged weights are dropped: what is copied
from is held until then, since its memory takes another version once nobody holds it. Where the device's memory has no
room for a second copy beside all that this process has needed at once, and on a host, whose engine reads them in place,
nothing is staged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from tba.device_to_host import CudaStream, Lane
from tba.gpus import free_gpu_bytes
from tba.streaming import TensorStream, bytes_of, shapes_of

_ROOM_SHARE = 0.5  # of the device's memory that stays free which staged weights may take


def _bytes_never_needed(device: torch.device) -> int | None:
    """Returns the bytes of a GPU that are free when this process needs most, such as to read long prompts; None for
    another device.
    """
    if (free_bytes := free_gpu_bytes(device)) is None:
        return None
    return free_bytes - (torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))


class Staging:
    """Stages the weights of one engine, version after version, from any thread."""

    def __init__(
        self,
        device: torch.device,
        lane: Lane | None = None,
        free_bytes: Callable[[torch.device], int | None] = _bytes_never_needed,
    ) -> None:
        """lane: copies to the device; None: a stream of a GPU."""
        self._device, self._free_bytes = device, free_bytes
        self._lane = CudaStream(device) if lane is None and device.type == "cuda" else lane
        self._end_copy: Callable[[], None] = lambda: None  # of the last copy

    def begin_copy(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the weights as tensors on the device, whose `items()` make the device wait for them, or the weights
        themselves where they are not staged.
        """
        free_bytes = self._free_bytes(self._device)
        if self._lane is None or (free_bytes is not None and bytes_of(weights) > _ROOM_SHARE * free_bytes):
            return weights
        staged_weights: dict[str, Tensor] = {}

        def copy() -> None:
            for name, tensor in weights.items():
                staged_weights[name] = tensor.to(self._device, non_blocking=True, copy=True)

        self._end_copy()
        point = self._lane.run(copy)
        sources = [weights]  # until the copy is made

        def end_copy() -> None:
            """Wait until the copy is made, and give its source free, which may be memory that is then written anew."""
            if sources:
                point.wait()
                sources.clear()

        self._end_copy = end_copy

        def items() -> Iterator[tuple[str, Tensor]]:
            point.hold()
            while staged_weights:
                name = next(iter(staged_weights))
                tensor = staged_weights.pop(name)
                if tensor.is_cuda:  # made on another stream, which must not give its memory away before it is read
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
                yield name, tensor
            end_copy()

        meta_tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in shapes_of(weights).items()}
        stream = TensorStream(meta_tensors, items)
        weakref.finalize(stream, end_copy).atexit = False  # where loading fails, or they are never loaded
        return stream
