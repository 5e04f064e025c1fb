"""Files in the machine's memory that hold one version of the weights after another, mapped once by each process.

Invariant: a slot is written only under an exclusive lock, and while no name leads to it but its own. A published
version is one more name of its slot (a hard link); deleting that name frees the slot. A reader opens the version's
name, takes a shared lock, and then checks that the name leads there still: from then on the slot is not written until
the last of the reader's tensors is gone. So nobody reads a version half written, and nobody waits: a publisher leaves
out a slot that is being read, a reader takes a slot that is being written for a version that is gone. The system frees
the locks of a process that dies.

A slot is longer than the safetensors file in it. What opens a version without a lock (a program that copies a run and
follows its links) so gets a file that `safetensors` refuses, never one that it reads half written.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from tba.device_to_host import register_with_gpu
from tba.weights.chunks import FlatBytes, split_header

# what makes memory (address, bytes, whether it is only read) quick to copy from or to, and returns what undoes this
Register: TypeAlias = Callable[[int, int, bool], Callable[[], None] | None]


class Slot:
    """A file of the publisher's, allocated and mapped when it is made."""

    def __init__(self, path: Path, size: int, register: Register = register_with_gpu) -> None:
        """Raises `OSError` when there is no room."""
        self.path, self.size = path, size  # bytes of the versions that it holds
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(self._descriptor, 0, size + mmap.PAGESIZE)  # a write into memory that is full kills
            mapping = mmap.mmap(self._descriptor, 0)
        except OSError:
            path.unlink()
            os.close(self._descriptor)
            raise
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self._unregister = register(self.memory.data_ptr(), len(self.memory), False)

    @property
    def is_there(self) -> bool:
        """Returns whether the file has its name still: the machine's memory may be emptied."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def lock(self) -> bool:
        """Lock the slot to write a version; returns False where it holds a published one, or somebody reads it."""
        if not self.is_there or os.fstat(self._descriptor).st_nlink > 1:
            return False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Delete the slot's own name, and undo its registration; the mapping ends with the last use of `memory`."""
        self.path.unlink(missing_ok=True)
        if self._unregister is not None:
            self._unregister()
        os.close(self._descriptor)


class ReadLock:
    """Keeps the slot of a version from being written, for as long as this object lives."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` when the version is gone."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.stat(path), os.fstat(self.descriptor)):
                raise FileNotFoundError(f"{path} is another version's now")
        except OSError:
            os.close(self.descriptor)
            raise
        weakref.finalize(self, _unlock, self.descriptor, os.getpid()).atexit = False


class _Mapping:
    """The mapping of a slot that a reader keeps for its next version."""

    def __init__(self, lock: ReadLock, register: Register) -> None:
        # opened anew, since a mapping keeps the locks of the descriptor that it was made from
        self.descriptor = os.open(f"/proc/self/fd/{lock.descriptor}", os.O_RDONLY)
        self.memory = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
        content = np.frombuffer(self.memory, np.uint8)
        unregister = register(content.ctypes.data, len(content), True)
        weakref.finalize(self, _end_mapping, self.memory, self.descriptor, unregister).atexit = False


class SlotMappings:
    """The slots that a process has mapped, each kept until its file is deleted."""

    def __init__(self, register: Register = register_with_gpu) -> None:
        self._register = register
        self._mappings: dict[tuple[int, int], _Mapping] = {}  # by device and inode

    def map(self, lock: ReadLock) -> FlatBytes:
        """Returns all bytes of a locked slot, which stays locked until these and what is made of them are gone."""
        self.forget_deleted()
        status = os.fstat(lock.descriptor)
        key = (status.st_dev, status.st_ino)
        mapping = self._mappings.get(key)
        if mapping is None:
            mapping = self._mappings[key] = _Mapping(lock, self._register)
        content = np.frombuffer(mapping.memory, np.uint8)  # that every part of it, as an array or a tensor, refers to
        weakref.finalize(content, _hold, lock, mapping).atexit = False
        return content

    def forget_deleted(self) -> None:
        """Ends the mappings of deleted slots, once nobody reads these; else their memory would not become free."""
        for key, mapping in list(self._mappings.items()):
            if not os.fstat(mapping.descriptor).st_nlink:
                self._mappings.pop(key, None)  # another thread may do the same


def copy_version(path: Path, copy: Path) -> None:
    """Copy the safetensors file in a slot. Raises `OSError` when the version is gone."""
    lock = ReadLock(path)
    header, content = split_header(SlotMappings(lambda *_: None).map(lock))
    shutil.copyfile(path, copy)
    os.truncate(copy, 8 + len(header.encode()) + len(content))


def _unlock(descriptor: int, process: int) -> None:
    if os.getpid() == process:  # a forked process shares the lock, and must not take it from the one that reads
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also where a forked process has the descriptor still
    os.close(descriptor)


def _end_mapping(memory: mmap.mmap, descriptor: int, unregister: Callable[[], None] | None) -> None:
    """End a registration; the memory itself is unmapped after this, with the last array that refers to it."""
    if unregister is not None:
        unregister()
    os.close(descriptor)


def _hold(lock: ReadLock, mapping: _Mapping) -> None:
    """Does nothing: whoever is to call this has a reference to both until then."""
