"""Tensors that are made one after the other, and a safetensors file written from them: never a second copy of all.

Invariant: a tensor has the name, type and shape that were declared before it was made. A `TensorStream` is read once,
by `items()`, to the end: other ranks may be sending each tensor as it is reached.

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
ALIGNED_ELEMENTS = 8  # a multiple of so many elements is written, so that whatever follows is aligned

_pinned_memory = threading.local()
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer types by their number of bytes


@dataclass(frozen=True)
class TensorChange:
    """Holds a tensor's new values: all, or those of the changed elements. They are cast when they are written."""

    name: str
    values: Tensor
    indices: Tensor | None = None  # int32 or int64, ascending, into the flat tensor; None: all


class TensorStream(Mapping[str, Tensor]):
    """Makes tensors by name, each when it is reached. `declared_tensors` has names, types and shapes, as meta tensors.

    `changes`, for tensors that lie on several ranks, yields the changes since those in a file and replaces `items`.
    `hold` is that of `HostCopies` for copies in the making; without it the caller has to wait for readers.
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
        """Returns (name, tensor) pairs in the order of `declared_tensors`, which can be read once."""
        return _Items(self, self._tensors)


class _Items(ItemsView[str, Tensor]):
    """Yields the items of a `TensorStream`, which can be read once."""

    def __init__(self, mapping: TensorStream, tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        super().__init__(mapping)
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors()


def shapes_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns tensors of the same types and shapes: the tensors themselves, or those that a stream has declared."""
    return tensors.declared_tensors if isinstance(tensors, TensorStream) else tensors


def bytes_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> int:
    """Returns the bytes of `tensors` as `write_tensors` writes them."""
    return sum(shape.numel() * written_type(shape.dtype, dtype).itemsize for shape in shapes_of(tensors).values())


@dataclass(frozen=True)
class FileLayout:
    """Says where the tensors of a safetensors file lie: the widest types first, so that all are aligned."""

    header: bytes
    types: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # by name: the type in the file, and the shape
    offsets: Mapping[str, int]  # from the file's beginning
    size: int  # bytes of the file

    @staticmethod
    def of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> FileLayout:
        """Returns the layout of `tensors`, of which those of floating point are written as `dtype` (None: as they
        are).
        """
        types = {name: (written_type(t.dtype, dtype), tuple(t.shape)) for name, t in shapes_of(tensors).items()}
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
        offset, offsets = 0, {}
        for name, (kind, shape) in sorted(types.items(), key=lambda item: -item[1][0].itemsize):
            size = math.prod(shape) * kind.itemsize
            data_offsets = [offset, offset + size]
            entries[name] = {"dtype": SAFETENSORS_NAMES[kind], "shape": list(shape), "data_offsets": data_offsets}
            offsets[name] = offset
            offset += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        offsets = {name: len(header) + start for name, start in offsets.items()}
        return FileLayout(header, types, offsets, len(header) + offset)

    def places(self, memory: Tensor) -> dict[str, Tensor]:
        """Returns the place of each tensor in `memory`, the bytes of the file."""
        return {
            name: memory[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape)
            for name, start in self.offsets.items()
            for kind, shape in [self.types[name]]
        }

    def check(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the names and tensors, one after the other.

        Raises `ValueError` when one does not have its declared shape, or is missing.
        """
        shapes = {name: shape for name, (_, shape) in self.types.items()}
        for name, tensor in tensors.items():
            shape = shapes.pop(name, None)
            if shape != tuple(tensor.shape):
                raise ValueError(f"{name} of shape {tuple(tensor.shape)} was read: expected shape {shape}")
            yield name, tensor
        if shapes:
            raise ValueError(f"{next(iter(shapes))} is missing: the tensors ended before it")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> int:
    """Writes `tensors` as a safetensors file, one after the other, and returns its bytes.

    Those of floating point are written as `dtype` (None: as they are); a tensor on the meta device only gets a place,
    for `write_rows`. Raises `ValueError` when a tensor does not have its declared shape.
    """
    layout = FileLayout.of(tensors, dtype)
    with path.open("wb") as file:
        file.write(layout.header)
        for name, tensor in layout.check(tensors):
            file.seek(layout.offsets[name])
            if not tensor.is_meta:
                write_flat(file, tensor.detach(), layout.types[name][0])
        file.truncate(layout.size)
    return layout.size


def fill_memory(memory: Tensor, tensors: Mapping[str, Tensor], layout: FileLayout) -> None:
    """Makes the first bytes of `memory` what `write_tensors` would write into a file. A tensor that lies in its place
    already is not copied. Raises `ValueError` when one does not have its declared shape.
    """
    memory[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    places = layout.places(memory)
    for name, tensor in layout.check(tensors):
        if tensor.data_ptr() != places[name].data_ptr():
            copy_in_blocks(tensor.detach(), places[name])


def copy_in_blocks(tensor: Tensor, target: Tensor, non_blocking: bool = False) -> None:
    """Copies a tensor, cast on its own device a block at a time, so that the cast takes little memory."""
    if tensor.dtype == target.dtype:
        target.copy_(tensor, non_blocking=non_blocking)
        return
    size = max(1, BLOCK // target.dtype.itemsize)
    for block, place in zip(tensor.reshape(-1).split(size), target.view(-1).split(size), strict=True):
        place.copy_(block.to(target.dtype), non_blocking=non_blocking)


def write_rows(path: Path, rows: Mapping[str, tuple[int, Tensor]]) -> None:
    """Writes rows of tensors, given with the number of the first row, into the places that `write_tensors` left in a
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
    """Yields the tensors' changes from `base` (a tensor by its name), one after the other, with both as `dtype`.

    Raises `ValueError` when a tensor does not have the declared shape.
    """
    shapes = {name: tuple(declared.shape) for name, declared in shapes_of(tensors).items()}
    for name, tensor in tensors.items():
        if shapes.pop(name, None) != tuple(tensor.shape):
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} was read, which is not its declared shape")
        flat, file_type = tensor.detach().contiguous().view(-1), written_type(tensor.dtype, dtype)
        indices = changed_indices(flat, base(name).contiguous().view(-1), file_type)
        if not len(indices):
            continue
        if is_whole_smaller(len(indices), flat.numel(), file_type):
            yield TensorChange(name, flat)
        else:
            yield TensorChange(name, flat[indices.to(flat.device)], indices.to(index_type(flat.numel())))
    if shapes:
        raise ValueError(f"{next(iter(shapes))} is missing: the tensors ended before it")


def changed_indices(values: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the int64 indices, on the host, of elements of flat tensors whose bits differ when both are of `dtype`.
    They are compared a block at a time.
    """
    bits, size = _BITS[dtype.itemsize], BLOCK // dtype.itemsize
    chunks = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, values.numel(), size):
        block, base_block = copy_to_host(values[start : start + size], dtype), base[start : start + size]
        chunks.append(start + (block.view(bits) != base_block.view(bits)).nonzero().view(-1))
    return torch.cat(chunks)


def index_type(count: int) -> torch.dtype:
    """Returns the integer type that can index `count` elements."""
    return torch.int32 if count <= torch.iinfo(torch.int32).max else torch.int64


def is_whole_smaller(changed_count: int, count: int, dtype: torch.dtype) -> bool:
    """Returns whether the whole tensor takes no more bytes than its changes with their indices. A tensor of a size that
    would leave the next one unaligned is never written as a whole.
    """
    bytes_of_changes = changed_count * (index_type(count).itemsize + dtype.itemsize)
    return count % ALIGNED_ELEMENTS == 0 and bytes_of_changes >= count * dtype.itemsize


def written_type(dtype: torch.dtype, float_type: torch.dtype | None) -> torch.dtype:
    """Returns the type that a tensor of `dtype` is written in: `float_type`, if given, for one of floating point."""
    return float_type if float_type is not None and dtype.is_floating_point else dtype


def write_flat(file: BinaryIO, tensor: Tensor, dtype: torch.dtype) -> None:
    """Writes a tensor a block at a time, so that it is never converted or copied from a device as a whole."""
    flat = tensor.contiguous().view(-1)
    for block in flat.split(max(1, BLOCK // dtype.itemsize)):
        host_block = copy_to_host(block, dtype)
        if host_block.numel():
            file.write(host_block.view(torch.uint8).numpy().data)


def copy_to_host(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a flat block of at most `BLOCK` bytes on the host as `dtype`. It is cast on its own device; a GPU's block
    goes into pinned memory that the thread's next block overwrites.
    """
    if block.device.type != "cuda":
        return block.to("cpu", dtype)
    if not hasattr(_pinned_memory, "buffer"):
        _pinned_memory.buffer = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
    buffer: Tensor = _pinned_memory.buffer[: block.numel() * dtype.itemsize].view(dtype)
    return buffer.copy_(block.to(dtype))
