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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tba.streaming import ALIGNED_ELEMENTS, SAFETENSORS_NAMES, TensorChange, TensorStream, write_flat, written_type

_AT, _IS = "@at", "@is"


def write_changes(
    path: Path, like: Mapping[str, Tensor], changes: Iterable[TensorChange], dtype: torch.dtype | None = None
) -> int:
    """Write the changes of tensors with the names, types and shapes of `like` as a safetensors file, those of floating
    point as `dtype` (None: as they are); returns its bytes.
    """
    entries: dict[str, object] = {}
    with path.open("wb") as file:
        room = 8 + sum(2 * len(json.dumps(name)) + 300 for name in like) + 64
        room += -room % 8
        file.seek(room)
        for change in changes:
            own = like[change.name]
            for key, written, shape in _written(change, tuple(own.shape)):
                begin = file.tell() - room
                kind = written.dtype if key.endswith(_AT) else written_type(own.dtype, dtype)
                write_flat(file, written, kind)
                entries[key] = {
                    "dtype": SAFETENSORS_NAMES[kind],
                    "shape": list(shape),
                    "data_offsets": [begin, file.tell() - room],
                }
        end = file.tell()
        _write_header(file, entries, room)
        return end


def _written(change: TensorChange, shape: tuple[int, ...]) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Yields what is to be written of a tensor: (name, values, their shape)."""
    values, at = change.values, change.indices
    if at is None:
        yield change.name, values, shape
        return
    more = -len(at) % ALIGNED_ELEMENTS  # repeats the last element, which changes nothing
    yield change.name + _AT, torch.cat([at, at[-1:].expand(more)]), (len(at) + more,)
    yield change.name + _IS, torch.cat([values, values[-1:].expand(more)]), (len(at) + more,)


def _write_header(file: BinaryIO, entries: Mapping[str, object], room: int) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    file.seek(0)
    file.write((room - 8).to_bytes(8, "little") + text.ljust(room - 8))


class Restored(TensorStream):
    """Reads what was published: a tensor that has changed is put together whenever it is asked for, any other is the
    base's own. Whoever copies them one after the other holds one at a time.
    """

    def __init__(self, base: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> None:
        super().__init__(base, lambda: ((name, self[name]) for name in base))
        self._changes = changes

    def __getitem__(self, name: str) -> Tensor:
        base, at = self.declared_tensors[name], self._changes.get(name + _AT)
        return self._changes.get(name, base) if at is None else _changed(base, at, self._changes[name + _IS])


def _changed(base: Tensor, at: Tensor, values: Tensor) -> Tensor:
    whole = base.clone()
    whole.view(-1)[at] = values
    return whole
