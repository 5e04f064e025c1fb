"""A warm start is computed once: its result is stored under a digest of everything that went into it.

Invariant: a folder in the cache is whole, and its name is the digest of what it was made from; two processes that make
the same at once end up with one of the two, whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from tba.training.supervised import Pair
from tba.types import Json
from tba.weights.atomic_dir import atomic_folder

FORMAT = b"1"  # raised when the same input is to give another result


def cached_folder(folder: Path, key: str, make: Callable[[Path], None]) -> Path:
    """Returns the folder of `key` within `folder`; unless it is there, `make` fills it, starting from an empty one."""
    path = folder / key
    if not path.is_dir():
        try:
            with atomic_folder(path, durable=True) as temporary:
                make(temporary)
        except FileExistsError:
            if not path.is_dir():  # made by another process in the meantime: its result is as good
                raise
    return path


def supervised_key(
    settings: Sequence[object], pairs: Sequence[Pair], weights: Mapping[str, Tensor] | None = None
) -> str:
    """Returns 32 hex digits of all that decides the result: settings (dataclasses or JSON), pairs, initial weights."""
    digest = hashlib.blake2b(FORMAT, digest_size=16)
    digest.update(json.dumps([_to_json(value) for value in settings], sort_keys=True, default=str).encode())
    for pair in pairs:
        for ids in (pair.prompt, pair.response):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(np.asarray(ids, dtype="<i4").tobytes())
        if pair.observed:
            digest.update(repr(pair.observed).encode())
        if pair.end is not None:
            digest.update(f"end {pair.end}".encode())
    for name, tensor in sorted((weights or {}).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def _to_json(value: object) -> Json:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, {f.name: _to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}]
    return value
