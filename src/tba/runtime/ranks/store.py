"""Lets the ranks of a trainer find each other in a cluster: a key-value store in an actor, and torch's `Store`
interface to it.

Invariant: a store belongs to one life of the trainer and holds what its ranks tell each other about themselves, nothing
else. It is reached through Ray, by anyone with Ray's token; no port is opened for it. Nobody waits in the actor: ranks
that wait for a key ask again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

_POLL = 0.02  # seconds between two polls for a key


class KeyValueStore:
    """A store of keys and bytes through which the ranks of a trainer find each other."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def append(self, key: str, value: bytes) -> None:
        self._values[key] = self._values.get(key, b"") + value

    def find(self, keys: Sequence[str]) -> list[bytes] | None:
        """Returns the values of all keys, or None while one is missing."""
        return [self._values[key] for key in keys] if all(key in self._values for key in keys) else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return it; as text, like all stores of torch."""
        value = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(value).encode()
        return value

    def exchange(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Put `desired` in the place of `expected` (empty: of no value); returns the value afterwards."""
        current_value = self._values.get(key)
        if current_value == expected or (current_value is None and not expected):
            self._values[key] = desired
        return self._values.get(key, expected)

    def remove(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def count(self) -> int:
        return len(self._values)


class ActorStore(Store):
    """The key-value store in the actor, as torch calls it. `call(method, ...)` reaches the actor; a wait ends after
    `patience` seconds.
    """

    def __init__(self, call: Callable[..., Any], patience: float) -> None:
        super().__init__()
        self._call = call
        self._patience = patience

    def set(self, key: str, value: Any) -> None:
        self._call("put", key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._wait_for([key], self._patience)[0]

    def append(self, key: str, value: Any) -> None:
        self._call("append", key, _bytes(value))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._call("exchange", key, _bytes(expected), _bytes(desired)))

    def delete_key(self, key: str) -> bool:
        return bool(self._call("remove", key))

    def num_keys(self) -> int:
        return int(self._call("count"))

    deleteKey, getNumKeys = delete_key, num_keys  # torch's own code calls them by these names

    def check(self, keys: Sequence[str]) -> bool:
        return self._call("find", list(keys)) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for(keys, self._patience if timeout is None else timeout.total_seconds())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait_for(keys, self._patience)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._patience)

    def clone(self) -> ActorStore:
        return self

    def _wait_for(self, keys: Sequence[str], patience: float) -> list[bytes]:
        deadline = time.monotonic() + patience
        while (values := self._call("find", list(keys))) is None:
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"timed out after {patience:g} s, waiting for {', '.join(keys)}")
            time.sleep(_POLL)
        return list(values)


def _bytes(value: Any) -> bytes:
    """Convert what torch gives: text, bytes, or numbers of one byte each."""
    return value.encode() if isinstance(value, str) else bytes(value)
