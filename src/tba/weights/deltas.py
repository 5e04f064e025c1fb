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

_INDICES, _VALUES = "@at", "@is"


def write_changes(
    path: Path, like: Mapping[str, Tensor], changes: Iterable[TensorChange], dtype: torch.dtype | None = None
) -> int:
    """Write the changes of tensors with the names, types and shapes of `like` as a safetensors file, those of floating
    point as `dtype` (None: as they are); returns its bytes.
    """
    entries: dict[str, object] = {}
    with path.open("wb") as file:
        header_bytes = 8 + sum(2 * len(json.dumps(name)) + 300 for name in like) + 64
        header_bytes += -header_bytes % 8
        file.seek(header_bytes)
        for change in changes:
            like_tensor = like[change.name]
            for key, values, shape in _changed_tensors(change, tuple(like_tensor.shape)):
                start = file.tell() - header_bytes
                written_dtype = values.dtype if key.endswith(_INDICES) else written_type(like_tensor.dtype, dtype)
                write_flat(file, values, written_dtype)
                entries[key] = {
                    "dtype": SAFETENSORS_NAMES[written_dtype],
                    "shape": list(shape),
                    "data_offsets": [start, file.tell() - header_bytes],
                }
        end = file.tell()
        _write_header(file, entries, header_bytes)
        return end


def _changed_tensors(change: TensorChange, shape: tuple[int, ...]) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Yields the tensors to write for a change of one tensor: (name, values, their shape)."""
    values, indices = change.values, change.indices
    if indices is None:
        yield change.name, values, shape
        return
    padding = -len(indices) % ALIGNED_ELEMENTS  # repeats the last element, which changes nothing
    yield change.name + _INDICES, torch.cat([indices, indices[-1:].expand(padding)]), (len(indices) + padding,)
    yield change.name + _VALUES, torch.cat([values, values[-1:].expand(padding)]), (len(indices) + padding,)


def _write_header(file: BinaryIO, entries: Mapping[str, object], header_bytes: int) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    file.seek(0)
    file.write((header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8))


class Restored(TensorStream):
    """Restores published weights from their base and changes: a changed tensor is put together whenever it is read, any
    other is the base's own. Whoever copies them one after the other holds one at a time.
    """

    def __init__(self, base: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> None:
        super().__init__(base, lambda: ((name, self[name]) for name in base))
        self._changes = changes

    def __getitem__(self, name: str) -> Tensor:
        base, indices = self.declared_tensors[name], self._changes.get(name + _INDICES)
        if indices is None:
            return self._changes.get(name, base)
        return _apply_change(base, indices, self._changes[name + _VALUES])


def _apply_change(base: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    tensor = base.clone()
    tensor.view(-1)[indices] = values
    return tensor
