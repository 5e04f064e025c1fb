"""Tensors that are made one after the other, and a safetensors file written from them: never a second copy of all.

Invariant: a tensor has the name, type and shape that were declared before it was made. A `Streamed` is read once, by
`items()`, to the end: other ranks may be sending each tensor as it is reached.

The file format is that of the safetensors library (a header of JSON with every tensor's place, then their bytes), whose
own writer needs all tensors at once.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, ItemsView, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
BLOCK = 1 << 24  # bytes that are written at a time
EVEN = 8  # elements of a tensor, or a multiple of them, are written: whatever follows is aligned

_pinned = threading.local()
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer types by their number of bytes


@dataclass(frozen=True)
class Change:
    """Holds what a tensor has become: all of it, or the elements that are other ones. It is cast when it is written."""

    name: str
    values: Tensor
    at: Tensor | None = None  # int32 or int64, ascending, into the flat tensor; None: all


class Streamed(Mapping[str, Tensor]):
    """Tensors by name, each made when it is reached. `like` has their names, types and shapes, as meta tensors.

    `changes`, of tensors that lie on several ranks: reads what has changed since those in a file, in place of `items`.
    `hold`, of copies that are being made: see `HostCopies.hold`; otherwise whoever reads has to be waited for.
    """

    def __init__(
        self,
        like: Mapping[str, Tensor],
        tensors: Callable[[], Iterator[tuple[str, Tensor]]],
        changes: Callable[[Path], Iterator[Change]] | None = None,
        hold: Callable[[], bool] = lambda: False,
    ) -> None:
        self.like = like
        self._tensors = tensors
        self.changes = changes
        self.hold = hold

    def __getitem__(self, name: str) -> Tensor:
        raise TypeError(f"{name} is not the next tensor: read these tensors by items(), in order and to the end")

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)

    def items(self) -> ItemsView[str, Tensor]:
        """(name, tensor), in the order of `like`."""
        return _Items(self, self._tensors)


class _Items(ItemsView[str, Tensor]):
    """The items of a `Streamed`, which can be read once."""

    def __init__(self, mapping: Streamed, tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        super().__init__(mapping)
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors()


def shapes_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns tensors with each one's type and shape: the tensors themselves, or the declared ones of a `Streamed`."""
    return tensors.like if isinstance(tensors, Streamed) else tensors


def bytes_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> int:
    """Returns the bytes of `tensors` as `write_tensors` writes them."""
    return sum(like.numel() * as_written(like.dtype, dtype).itemsize for like in shapes_of(tensors).values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> int:
    """Write `tensors` as a safetensors file, one after the other; returns its bytes.

    Those of floating point are written as `dtype` (None: as they are); the place of one on the meta device is left for
    `write_rows`. Raises `ValueError` when a tensor does not have its declared shape.
    """
    kinds = {name: (as_written(like.dtype, dtype), tuple(like.shape)) for name, like in shapes_of(tensors).items()}
    header, places = _header(kinds)
    sizes = list(kinds.values())
    with path.open("wb") as file:
        file.write(header)
        for name, tensor in tensors.items():
            kind, shape = kinds.pop(name, (None, None))
            if kind is None or shape != tuple(tensor.shape):
                raise ValueError(f"{name} of shape {tuple(tensor.shape)} was read: expected shape {shape}")
            file.seek(len(header) + places[name])
            if not tensor.is_meta:
                write_flat(file, tensor.detach(), kind)
        if kinds:
            raise ValueError(f"{next(iter(kinds))} is missing: the tensors ended before it")
        file.truncate(len(header) + sum(math.prod(shape) * kind.itemsize for kind, shape in sizes))
        return file.seek(0, os.SEEK_END)


def write_rows(path: Path, rows: Mapping[str, tuple[int, Tensor]]) -> None:
    """Write rows of tensors, each with the number of its first one, into the places that `write_tensors` has left in a
    file. They are on the disk when this ends; several processes can do it at once.
    """
    with path.open("r+b") as file:
        room = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(room))
        for name, (first, tensor) in rows.items():
            begin, _ = entries[name]["data_offsets"]
            of_a_row = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
            file.seek(8 + room + begin + first * of_a_row)
            write_flat(file, tensor, tensor.dtype)
        file.flush()
        os.fsync(file.fileno())


def changes_since(
    base: Callable[[str], Tensor], tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Iterator[Change]:
    """Yields what differs from `base` (a tensor by its name) once both are of type `dtype`, one after the other.

    Raises `ValueError` when a tensor does not have the declared shape.
    """
    shapes = {name: tuple(like.shape) for name, like in shapes_of(tensors).items()}
    for name, tensor in tensors.items():
        if shapes.pop(name, None) != tuple(tensor.shape):
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} was read, which is not its declared shape")
        new, kind = tensor.detach().contiguous().view(-1), as_written(tensor.dtype, dtype)
        at = differing(new, base(name).contiguous().view(-1), kind)
        if not len(at):
            continue
        if smaller_whole(len(at), new.numel(), kind):
            yield Change(name, new)
        else:
            yield Change(name, new[at.to(new.device)], at.to(index_type(new.numel())))
    if shapes:
        raise ValueError(f"{next(iter(shapes))} is missing: the tensors ended before it")


def differing(new: Tensor, old: Tensor, kind: torch.dtype) -> Tensor:
    """Returns which elements of flat tensors have other bits when both are of type `kind`: int64, on the host. A block
    is compared at a time.
    """
    bits, size = _BITS[kind.itemsize], BLOCK // kind.itemsize
    found = [torch.empty(0, dtype=torch.int64)]
    for begin in range(0, new.numel(), size):
        one, other = on_host(new[begin : begin + size], kind), old[begin : begin + size]
        found.append(begin + (one.view(bits) != other.view(bits)).nonzero().view(-1))
    return torch.cat(found)


def index_type(numbers: int) -> torch.dtype:
    """Returns the type of the indices of the changes in so many."""
    return torch.int32 if numbers <= torch.iinfo(torch.int32).max else torch.int64


def smaller_whole(changed: int, numbers: int, kind: torch.dtype) -> bool:
    """Returns whether so many changes, with their indices, take as many bytes as the whole tensor does, which can be
    written if what follows it is aligned.
    """
    return numbers % EVEN == 0 and changed * (index_type(numbers).itemsize + kind.itemsize) >= numbers * kind.itemsize


def as_written(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Returns the type that a tensor is written in: `wanted` if given and the tensor is of floating point."""
    return wanted if wanted is not None and own.is_floating_point else own


def _header(kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Returns the file's first bytes, and where each tensor begins after them: the widest types first, so all are
    aligned.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    at, places = 0, {}
    for name, (kind, shape) in sorted(kinds.items(), key=lambda item: -item[1][0].itemsize):
        size = math.prod(shape) * kind.itemsize
        entries[name] = {"dtype": SAFETENSORS_NAMES[kind], "shape": list(shape), "data_offsets": [at, at + size]}
        places[name] = at
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def write_flat(file: BinaryIO, tensor: Tensor, kind: torch.dtype) -> None:
    """Write a block at a time: what is converted or comes from a device is never in memory as a whole."""
    flat = tensor.contiguous().view(-1)
    for block in flat.split(max(1, BLOCK // kind.itemsize)):
        own = on_host(block, kind)
        if own.numel():
            file.write(own.view(torch.uint8).numpy().data)


def on_host(block: Tensor, kind: torch.dtype) -> Tensor:
    """Returns a flat block of at most `BLOCK` bytes on the host as `kind`. It is cast where it lies; one of a GPU comes
    into pinned memory that the thread's next block takes again.
    """
    if block.device.type != "cuda":
        return block.to("cpu", kind)
    if not hasattr(_pinned, "room"):
        _pinned.room = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
    room: Tensor = _pinned.room[: block.numel() * kind.itemsize].view(kind)
    return room.copy_(block.to(kind))
