"""A version of the weights as its difference from another one, its base.

Invariant: base and changes together are what was published, bit for bit; two numbers are the same when their bits are.
Of a tensor that has not changed nothing is kept; of one where few elements have, their indices (`NAME@at`, four bytes
each below 2^31 elements) and their new values (`NAME@is`); of any other everything, under its own name. A tensor is
compared block by block when it is reached, and put together when it is asked for: there is never a second copy of all.

The number of changes is known only at the end, so the file's header is given more room than it can need, and written
last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tba.streaming import BLOCK, SAFETENSORS_NAMES, Streamed, as_written, shapes_of, write_flat

_AT, _IS = "@at", "@is"
_EVEN = 8  # elements that are written at a time: whatever follows is aligned
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer types by their number of bytes


def write_changes(
    path: Path, tensors: Mapping[str, Tensor], base: Callable[[str], Tensor], dtype: torch.dtype | None = None
) -> int:
    """Write what differs from `base` (a tensor by its name) as a safetensors file; returns its bytes.

    Raises `ValueError` when a tensor does not have the declared shape.
    """
    shapes = {name: tuple(like.shape) for name, like in shapes_of(tensors).items()}
    entries: dict[str, object] = {}
    with path.open("wb") as file:
        room = 8 + sum(2 * len(json.dumps(name)) + 300 for name in shapes) + 64
        room += -room % 8
        file.seek(room)
        for name, tensor in tensors.items():
            if shapes.pop(name, None) != tuple(tensor.shape):
                raise ValueError(f"{name} of shape {tuple(tensor.shape)} was read, which is not its declared shape")
            kind = as_written(tensor.dtype, dtype)
            for key, written, shape in _changes(name, tensor.detach().contiguous().view(-1), base(name), kind):
                begin = file.tell() - room
                of = written.dtype if key.endswith(_AT) else kind
                write_flat(file, written, of)
                entries[key] = {
                    "dtype": SAFETENSORS_NAMES[of],
                    "shape": list(tensor.shape if shape is None else shape),
                    "data_offsets": [begin, file.tell() - room],
                }
        if shapes:
            raise ValueError(f"{next(iter(shapes))} is missing: the tensors ended before it")
        end = file.tell()
        _write_header(file, entries, room)
        return end


def _changes(name: str, new: Tensor, old: Tensor, kind: torch.dtype) -> Iterator[tuple[str, Tensor, tuple[int] | None]]:
    """Yields what is to be written of a flat tensor: (name, values, their shape if that is not the tensor's own)."""
    old = old.contiguous().view(-1)
    places = [begin + at for begin, at in _differing(new, old, kind)]
    at = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
    if not len(at):
        return
    index = torch.int32 if new.numel() <= torch.iinfo(torch.int32).max else torch.int64
    if new.numel() % _EVEN == 0 and len(at) * (index.itemsize + kind.itemsize) >= new.numel() * kind.itemsize:
        yield name, new, None
        return
    at = torch.cat([at, at[-1:].expand(-len(at) % _EVEN)])  # repeats the last index, which changes nothing
    yield name + _AT, at.to(index), (len(at),)
    yield name + _IS, new[at.to(new.device)], (len(at),)


def _differing(new: Tensor, old: Tensor, kind: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yields (where a block begins, which of its elements have other bits)."""
    bits = _BITS[kind.itemsize]
    size = BLOCK // kind.itemsize
    for begin in range(0, new.numel(), size):
        one, other = new[begin : begin + size].to("cpu", kind), old[begin : begin + size]
        yield begin, (one.view(bits) != other.view(bits)).nonzero().view(-1)


def _write_header(file: BinaryIO, entries: Mapping[str, object], room: int) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    file.seek(0)
    file.write((room - 8).to_bytes(8, "little") + text.ljust(room - 8))


class Restored(Streamed):
    """What was published: a tensor that has changed is put together whenever it is asked for, any other is the base's
    own. Whoever copies them one after the other holds one at a time.
    """

    def __init__(self, base: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> None:
        super().__init__(base, lambda: ((name, self[name]) for name in base))
        self._changes = changes

    def __getitem__(self, name: str) -> Tensor:
        base, at = self.like[name], self._changes.get(name + _AT)
        return self._changes.get(name, base) if at is None else _changed(base, at, self._changes[name + _IS])


def _changed(base: Tensor, at: Tensor, values: Tensor) -> Tensor:
    whole = base.clone()
    whole.view(-1)[at] = values
    return whole
