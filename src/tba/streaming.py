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
ALIGNED_ELEMENTS = 8  # elements of a tensor, or a multiple of them, are written: whatever follows is aligned

_pinned = threading.local()
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer types by their number of bytes


@dataclass(frozen=True)
class TensorChange:
    """Holds what a tensor has become: all of it, or the elements that are other ones. It is cast when it is written."""

    name: str
    values: Tensor
    indices: Tensor | None = None  # int32 or int64, ascending, into the flat tensor; None: all


class TensorStream(Mapping[str, Tensor]):
    """Tensors by name, each made when it is reached. `like` has their names, types and shapes, as meta tensors.

    `changes`, of tensors that lie on several ranks: reads what has changed since those in a file, in place of `items`.
    `hold`, of copies that are being made: see `HostCopies.hold`; otherwise whoever reads has to be waited for.
    """

    def __init__(
        self,
        declared_tensors: Mapping[str, Tensor],
        tensors: Callable[[], Iterator[tuple[str, Tensor]]],
        changes: Callable[[Path], Iterator[TensorChange]] | None = None,
        hold: Callable[[], bool] = lambda: False,
    ) -> None:
        self.declared_tensors = declared_tensors
        self._tensors = tensors
        self.changes = changes
        self.hold = hold

    def __getitem__(self, name: str) -> Tensor:
        raise TypeError(f"{name} is not the next tensor: read these tensors by items(), in order and to the end")

    def __iter__(self) -> Iterator[str]:
        return iter(self.declared_tensors)

    def __len__(self) -> int:
        return len(self.declared_tensors)

    def items(self) -> ItemsView[str, Tensor]:
        """(name, tensor), in the order of `like`."""
        return _Items(self, self._tensors)


class _Items(ItemsView[str, Tensor]):
    """The items of a `Streamed`, which can be read once."""

    def __init__(self, mapping: TensorStream, tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        super().__init__(mapping)
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors()


def shapes_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns tensors with each one's type and shape: the tensors themselves, or the declared ones of a `Streamed`."""
    return tensors.declared_tensors if isinstance(tensors, TensorStream) else tensors


def bytes_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> int:
    """Returns the bytes of `tensors` as `write_tensors` writes them."""
    return sum(shape.numel() * written_type(shape.dtype, dtype).itemsize for shape in shapes_of(tensors).values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> int:
    """Write `tensors` as a safetensors file, one after the other; returns its bytes.

    Those of floating point are written as `dtype` (None: as they are); the place of one on the meta device is left for
    `write_rows`. Raises `ValueError` when a tensor does not have its declared shape.
    """
    expected = {name: (written_type(t.dtype, dtype), tuple(t.shape)) for name, t in shapes_of(tensors).items()}
    header, places = _file_header(expected)
    sizes = list(expected.values())
    with path.open("wb") as file:
        file.write(header)
        for name, tensor in tensors.items():
            dtype_written, shape = expected.pop(name, (None, None))
            if dtype_written is None or shape != tuple(tensor.shape):
                raise ValueError(f"{name} of shape {tuple(tensor.shape)} was read: expected shape {shape}")
            file.seek(len(header) + places[name])
            if not tensor.is_meta:
                write_flat(file, tensor.detach(), dtype_written)
        if expected:
            raise ValueError(f"{next(iter(expected))} is missing: the tensors ended before it")
        file.truncate(len(header) + sum(math.prod(shape) * dtype_written.itemsize for dtype_written, shape in sizes))
        return file.seek(0, os.SEEK_END)


def write_rows(path: Path, rows: Mapping[str, tuple[int, Tensor]]) -> None:
    """Write rows of tensors, each with the number of its first one, into the places that `write_tensors` has left in a
    file. They are on the disk when this ends; several processes can do it at once.
    """
    with path.open("r+b") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(header_bytes))
        for name, (first_row, tensor) in rows.items():
            start, _ = entries[name]["data_offsets"]
            row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
            file.seek(8 + header_bytes + start + first_row * row_bytes)
            write_flat(file, tensor, tensor.dtype)
        file.flush()
        os.fsync(file.fileno())


def changes_since(
    base: Callable[[str], Tensor], tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Iterator[TensorChange]:
    """Yields what differs from `base` (a tensor by its name) once both are of type `dtype`, one after the other.

    Raises `ValueError` when a tensor does not have the declared shape.
    """
    shapes = {name: tuple(declared.shape) for name, declared in shapes_of(tensors).items()}
    for name, tensor in tensors.items():
        if shapes.pop(name, None) != tuple(tensor.shape):
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} was read, which is not its declared shape")
        flat, type_written = tensor.detach().contiguous().view(-1), written_type(tensor.dtype, dtype)
        indices = changed_indices(flat, base(name).contiguous().view(-1), type_written)
        if not len(indices):
            continue
        if is_whole_smaller(len(indices), flat.numel(), type_written):
            yield TensorChange(name, flat)
        else:
            yield TensorChange(name, flat[indices.to(flat.device)], indices.to(index_type(flat.numel())))
    if shapes:
        raise ValueError(f"{next(iter(shapes))} is missing: the tensors ended before it")


def changed_indices(values: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns which elements of flat tensors have other bits when both are of type `kind`: int64, on the host. A block
    is compared at a time.
    """
    bits, size = _BITS[dtype.itemsize], BLOCK // dtype.itemsize
    chunks = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, values.numel(), size):
        block, base_block = copy_to_host(values[start : start + size], dtype), base[start : start + size]
        chunks.append(start + (block.view(bits) != base_block.view(bits)).nonzero().view(-1))
    return torch.cat(chunks)


def index_type(count: int) -> torch.dtype:
    """Returns the type of the indices of the changes in so many."""
    return torch.int32 if count <= torch.iinfo(torch.int32).max else torch.int64


def is_whole_smaller(changed_count: int, count: int, dtype: torch.dtype) -> bool:
    """Returns whether so many changes, with their indices, take as many bytes as the whole tensor does, which can be
    written if what follows it is aligned.
    """
    bytes_of_changes = changed_count * (index_type(count).itemsize + dtype.itemsize)
    return count % ALIGNED_ELEMENTS == 0 and bytes_of_changes >= count * dtype.itemsize


def written_type(dtype: torch.dtype, float_type: torch.dtype | None) -> torch.dtype:
    """Returns the type that a tensor is written in: `wanted` if given and the tensor is of floating point."""
    return float_type if float_type is not None and dtype.is_floating_point else dtype


def _file_header(kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Returns the file's first bytes, and where each tensor begins after them: the widest types first, so all are
    aligned.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    offset, places = 0, {}
    for name, (kind, shape) in sorted(kinds.items(), key=lambda item: -item[1][0].itemsize):
        size = math.prod(shape) * kind.itemsize
        data_offsets = [offset, offset + size]
        entries[name] = {"dtype": SAFETENSORS_NAMES[kind], "shape": list(shape), "data_offsets": data_offsets}
        places[name] = offset
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def write_flat(file: BinaryIO, tensor: Tensor, dtype: torch.dtype) -> None:
    """Write a block at a time: what is converted or comes from a device is never in memory as a whole."""
    flat = tensor.contiguous().view(-1)
    for block in flat.split(max(1, BLOCK // dtype.itemsize)):
        host_block = copy_to_host(block, dtype)
        if host_block.numel():
            file.write(host_block.view(torch.uint8).numpy().data)


def copy_to_host(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a flat block of at most `BLOCK` bytes on the host as `kind`. It is cast where it lies; one of a GPU comes
    into pinned memory that the thread's next block takes again.
    """
    if block.device.type != "cuda":
        return block.to("cpu", dtype)
    if not hasattr(_pinned, "room"):
        _pinned.room = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
    buffer: Tensor = _pinned.room[: block.numel() * dtype.itemsize].view(dtype)
    return buffer.copy_(block.to(dtype))
