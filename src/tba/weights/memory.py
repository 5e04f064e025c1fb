"""The newest weights in memory that other processes of this machine read: of a GPU by CUDA IPC, of the host shared.

Beside the folder of versions, never in its place: a version is announced there, with the address of the memory, and is
read from there by whoever cannot map it or comes too late. Both are torch's way to share tensors between processes.

Invariant: nobody waits for anybody. There is one copy, used again by every version. Whoever writes it counts up before
and after; whoever reads makes a copy, and looks whether the count was even and has stayed the same: else the file is
read. Only processes that were forked from one forge can connect: they share a key that was never outside of memory.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from multiprocessing.process import current_process
from pathlib import Path

import torch
import torch.multiprocessing  # teaches connections to send tensors as what they are: handles of their memory
from torch import Tensor

from tba.errors import UserError
from tba.protocols import PublishedWeights, WeightSource
from tba.streaming import as_written
from tba.types import Version

log = logging.getLogger("tba.weights")
ADDRESS = "memory"  # in a version's manifest
_PATIENCE = 10.0  # seconds to wait for an answer of who publishes
_COUNT, _INCARNATION, _STEP = range(3)  # of `Shared.state`


@dataclass(frozen=True)
class Shared:
    """What is mapped by both sides."""

    state: Tensor  # int64 [3]: a count, odd while it is written, and the version that is there
    flat: Mapping[torch.dtype, Tensor]  # one after the other, those of one type
    places: Mapping[str, tuple[torch.dtype, int, tuple[int, ...]]]  # type, where it begins, shape

    @classmethod
    def like(cls, weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> Shared:
        """Room for such weights, where they are, those of floating point as `dtype`."""
        sizes: dict[torch.dtype, int] = {}
        places = {}
        for name, tensor in weights.items():
            kind = as_written(tensor.dtype, dtype)
            places[name] = kind, sizes.get(kind, 0), tuple(tensor.shape)
            sizes[kind] = sizes.get(kind, 0) + tensor.numel()
        device = next(iter(weights.values())).device
        flat = {kind: torch.empty(size, dtype=kind, device=device) for kind, size in sizes.items()}
        return cls(torch.zeros(3, dtype=torch.int64), flat, places)

    def views(self) -> dict[str, Tensor]:
        """By name, where they lie."""
        return {
            name: self.flat[kind][begin : begin + torch.Size(shape).numel()].view(shape)
            for name, (kind, begin, shape) in self.places.items()
        }

    def settle(self) -> None:
        """Until what was asked of a GPU is done."""
        for flat in self.flat.values():
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)


class WeightMemory:
    """The side that writes: one buffer, and a thread that hands it out."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        self._shared = Shared.like(weights, dtype)
        self._folder = Path(
            tempfile.mkdtemp(prefix="tba-")
        )  # short, as the names of sockets have to be, and ours alone
        self.address = str(self._folder / "weights")
        try:
            self._listener = Listener(self.address, "AF_UNIX", backlog=64, authkey=current_process().authkey)
        except OSError as error:  # the name is too long
            raise UserError(f"weights cannot be handed out at {self.address} ({error}): set TMPDIR=/tmp") from error
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def write(self, weights: Mapping[str, Tensor], version: Version) -> Mapping[str, Tensor]:
        """Copy `weights` in; what comes back is the copy, which stays as it is until the next is written."""
        state, views = self._shared.state, self._shared.views()
        state[_COUNT] += 1
        with torch.no_grad():
            for name, tensor in weights.items():
                views[name].copy_(tensor)
        self._shared.settle()
        state[_INCARNATION], state[_STEP] = version.incarnation, version.step
        state[_COUNT] += 1
        return views

    def close(self) -> None:
        """Hand it out no more. Who has it keeps it."""
        self._closed = True
        with suppress(OSError, EOFError, AuthenticationError):  # what wakes the thread
            Client(self.address, "AF_UNIX", authkey=current_process().authkey).close()
        self._thread.join(_PATIENCE)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while not self._closed:
            try:
                with self._listener.accept() as connection:
                    if not self._closed:
                        connection.send(self._shared)
                        connection.poll(_PATIENCE)  # until it has been taken: its memory is named by open files
            except (OSError, EOFError, AuthenticationError) as error:  # theirs, who read the file then
                log.debug("weights were not handed out: %r", error)


class MemoryFirst:
    """A `WeightSource` over another, of which the newest version is taken from memory where that can be mapped."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._address: str | None = None  # that was tried last
        self._shared: Shared | None = None  # what came of it

    def newer_than(self, version: Version | None) -> PublishedWeights | None:
        """As the source's."""
        found = self._source.newer_than(version)
        address = None if found is None else found.manifest.get(ADDRESS)
        if found is None or not isinstance(address, str):
            return found

        def read() -> dict[str, Tensor]:
            copy = self._copied(address, found.version)
            return found.read() if copy is None else copy

        return PublishedWeights(found.version, found.manifest, read)

    def at(self, version: Version) -> PublishedWeights:
        """As the source's."""
        return self._source.at(version)

    def _copied(self, address: str, version: Version) -> dict[str, Tensor] | None:
        """What is in memory, if it is that version and nobody wrote meanwhile."""
        if address != self._address:
            self._address, self._shared = address, _handed_out(address)
            where = "the trainer's memory" if self._shared is not None else "files: its memory cannot be reached"
            log.info("weights are taken from %s", where)
        shared = self._shared
        if shared is None:
            return None
        count, *there = shared.state.tolist()
        if count % 2 or there != [version.incarnation, version.step]:
            return None
        copy = {name: view.clone() for name, view in shared.views().items()}
        shared.settle()
        return copy if int(shared.state[_COUNT]) == count else None


def _handed_out(address: str) -> Shared | None:
    """By whoever publishes, within the time that there is; None where it is not to be had."""
    found: list[Shared] = []

    def ask() -> None:
        with (
            suppress(OSError, EOFError, AuthenticationError),
            Client(address, "AF_UNIX", authkey=current_process().authkey) as connection,
        ):
            if connection.poll(_PATIENCE):
                found.append(connection.recv())
                connection.send(None)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return found[0] if found else None
