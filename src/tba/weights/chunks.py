"""A version's file as flat arrays that can be sent, and back.

Invariant: the bytes of a safetensors file after its header, in order, are cut into pieces of at most `CHUNK_BYTES`; put
together by the file's own header they are the tensors that were published, bit for bit. Only a tensor that lies across
a cut is copied: pieces are views of the mapped file, tensors are views of the pieces.
"""

from __future__ import annotations

import json
import mmap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 512 << 20
FlatBytes: TypeAlias = npt.NDArray[np.uint8]
_DTYPES = {  # as safetensors and as torch name them
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def map_tensors_file(path: Path) -> tuple[str, FlatBytes]:
    """Returns the header of a safetensors file (JSON) and the bytes of its tensors, memory-mapped: they outlive the
    file's name.

    Raises `FileNotFoundError` when there is no such file.
    """
    return split_header(map_file(path))


def split_header(content: FlatBytes) -> tuple[str, FlatBytes]:
    """Returns the header of a safetensors file (JSON), and the bytes of its tensors, without what lies behind them."""
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = content[8:start].tobytes().decode()
    end_offsets = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
    return header, content[start : start + max(end_offsets, default=0)]


def map_file(path: Path) -> FlatBytes:
    """Returns all bytes of a file, memory-mapped; they outlive its name."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, np.uint8)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def cut_pieces(content: FlatBytes, most_bytes: int = CHUNK_BYTES) -> Iterator[FlatBytes]:
    """Yields the pieces of `content`, of at most `most_bytes` bytes each."""
    for start in range(0, len(content), most_bytes):
        yield content[start : start + most_bytes]


def tensors(header: str, parts: Sequence[FlatBytes]) -> dict[str, torch.Tensor]:
    """Returns name -> tensor: read-only views of the parts, where a tensor lies in one of them."""
    entries: dict[str, Any] = json.loads(header)
    entries.pop("__metadata__", None)
    size = len(parts[0]) if parts else 0
    return {name: _view_tensor(entry, parts, size) for name, entry in entries.items()}


def _view_tensor(entry: dict[str, Any], parts: Sequence[FlatBytes], size: int) -> torch.Tensor:
    """Returns one tensor of a file. `size`: bytes of every part but the last."""
    import torch

    start, end = entry["data_offsets"]
    dtype = getattr(torch, _DTYPES[entry["dtype"]])
    if start == end:
        return torch.empty(entry["shape"], dtype=dtype)
    first_part, last_part = start // size, (end - 1) // size
    if first_part == last_part:
        array = parts[first_part][start - first_part * size : end - first_part * size]
    else:
        array = np.concatenate(parts[first_part : last_part + 1])[start - first_part * size : end - first_part * size]
    with warnings.catch_warnings():  # torch warns that it cannot prevent writes into shared memory: nobody writes
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(array, dtype=dtype).reshape(entry["shape"])
