"""Versions that lie in the machine's memory for as long as that is enough: their folder holds links to them.

They lie in slots (`slots`), which are used again.

Invariant: each process that writes has a folder of its own there, which only its user can read and which names the
folder that its files belong to. A file there is deleted only for that folder: a copy of a run has links to files of the
run that it was copied from. The process holds a lock on its folder while it lives, and on that of a killed process
whose versions it took over. So nobody else removes them, also where containers share this memory and see other files. A
process forked from it holds these locks too, until it ends.

What a killed process left is removed by the next one of the same user that begins or ends: its slots at once, its
versions once no link leads to them from where they belong. Versions stay until then, and until their run is resumed or
its folder deleted; where their folder cannot be seen, as in another container, they are removed too, and that run
publishes anew when it is resumed. Where the memory is emptied (by a restart of the machine, or by hand) a link leads
nowhere, and its file is gone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from tba.device_to_host import register_with_gpu
from tba.errors import UserError
from tba.host_memory import free_host_bytes
from tba.streaming import FileLayout, fill_memory
from tba.weights.atomic_dir import sync
from tba.weights.slots import Register, Slot, copy_version

log = logging.getLogger("tba.weights")
MEMORY_ROOT = Path("/dev/shm")  # noqa: S108 (where Linux keeps files in memory; each folder there is its user's alone)
_PREFIX = "tba-published-"
_OWNER = "of"  # a link to the folder that the files belong to
_SLOT = "slot-"
SLOTS = 4  # two versions that are published, one that is being written, and an earlier one that is still being read
_SPARE_BYTES = 1 << 28  # bytes that stay free beside the slots


class InMemory:
    """Keeps the tensors of versions in slots of the machine's memory, whose folder is made with the first of them.

    is_wanted: None where there is room for all slots at the start, and otherwise not; True: else that is an error.
    """

    def __init__(self, folder: Path, is_wanted: bool | None, register: Register = register_with_gpu) -> None:
        self._folder = folder
        self._is_wanted = is_wanted
        self._register = register
        self._memory_root = MEMORY_ROOT
        self._memory_folder: Path | None = None
        self._folder_locks: list[int] = []  # descriptors that have the locks of its folder and of killed publishers'
        self._slots: list[Slot] = []
        self._slot_count = 0  # of all that were made, also of those that are gone
        self._is_restart = False  # a killed publisher of this folder had its versions in memory
        self._reserved_slot: Slot | None = None  # locked, for the next version
        self._logged_refusals: set[str] = set()

    def reserve(self, layout: FileLayout) -> Mapping[str, Tensor] | None:
        """Returns the places of the next version's tensors in memory; None where it is written to the disk."""
        slot = self._reserved_slot
        if slot is None or slot.size != layout.size or not slot.is_there:
            slot = self._reserved_slot = self._lock_slot(layout.size)
        return None if slot is None else layout.places(slot.memory)

    def write(self, path: Path, tensors: Mapping[str, Tensor], layout: FileLayout) -> bool:
        """Write a version's tensors into memory and make `path` a link to them; returns False, with nothing done,
        where they are to be written to the disk.

        Raises `UserError` when memory is wanted, and has no room at the start.
        """
        if self.reserve(layout) is None:
            return False
        slot, self._reserved_slot = self._reserved_slot, None
        assert slot is not None
        try:
            fill_memory(slot.memory, tensors, layout)
            target = slot.path.with_name(path.name.lstrip("."))
            path.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            os.link(slot.path, target)
            path.symlink_to(target)
        except FileNotFoundError:  # the machine's memory was emptied meanwhile: only the names are gone
            path.write_bytes(slot.memory[: layout.size].numpy().data)
        finally:
            slot.unlock()
        return True

    def _lock_slot(self, size: int) -> Slot | None:
        """Returns a slot to write a version into, None where there is no room for one."""
        if self._is_wanted is False:
            return None
        for slot in list(self._slots):
            is_free = slot.lock()
            if is_free and slot.size == size:
                return slot
            if is_free or not slot.is_there:  # of another size, or deleted by another program
                self._slots.remove(slot)
                slot.close()
        if len(self._slots) >= 2 * SLOTS:
            self._refuse("slots", f"{len(self._slots)} versions in memory are all published or still being read")
            return None
        shortage = self._shortage(size)
        if shortage is not None:
            self._refuse("room", shortage)
            return None
        try:
            return self._make_slot(size)
        except OSError as error:  # somebody else took the room meanwhile
            self._refuse("error", f"{self._memory_root} takes no file ({error})")
            return None

    def _make_slot(self, size: int) -> Slot | None:
        if self._memory_folder is None or not self._memory_folder.is_dir():
            self._memory_folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._memory_root))
            self._folder_locks.append(os.open(self._memory_folder, os.O_RDONLY | os.O_DIRECTORY))
            fcntl.flock(self._folder_locks[-1], fcntl.LOCK_EX)  # before the mark: nobody touches a folder without one
            (self._memory_folder / _OWNER).symlink_to(self._folder.resolve())
        slot = Slot(self._memory_folder / f"{_SLOT}{self._slot_count + 1}", size, self._register)
        self._slot_count += 1
        self._slots.append(slot)
        return slot if slot.lock() else None

    def _shortage(self, size: int) -> str | None:
        """Returns what has too little room for one more slot (at the start: for all of them), as a sentence."""
        needed_bytes = size
        if not self._slot_count:
            self.remove_leftovers()
            leftover_bytes = self._leftover_bytes()
            self._is_restart |= leftover_bytes > 0
            needed_bytes = max(size, SLOTS * size - leftover_bytes)
        needed_bytes += _SPARE_BYTES
        # workers that have not begun yet need memory too, beside which `runtime.needs` counts the slots that are wanted
        host_share = 2 if self._is_start and self._is_wanted is None else 1
        file_bytes = shutil.disk_usage(self._memory_root).free if self._memory_root.is_dir() else 0
        rooms = (
            (self._memory_root, file_bytes, needed_bytes),
            ("the machine's memory", free_host_bytes(), host_share * needed_bytes),
        )
        for place, free_bytes, least_bytes in rooms:
            if free_bytes is not None and free_bytes < least_bytes:
                free, least = f"{free_bytes / 1e9:.2f} GB", f"{least_bytes / 1e9:.2f} GB"
                return f"{place} has {free} free, and weights in memory need {least}"
        return None

    def _leftover_bytes(self) -> int:
        """Returns the bytes in memory of versions that a killed publisher of this folder left, which are freed as newer
        ones come.
        """
        targets = [target for file in self._folder.iterdir() if (target := memory_target(file)) is not None]
        return sum(t.stat().st_size for t in targets if _belongs_to(t, self._folder) and t.exists())

    @property
    def _is_start(self) -> bool:
        """Returns whether no version of this run has been in memory."""
        return not self._slot_count and not self._is_restart

    def _refuse(self, kind: str, text: str) -> None:
        """Say once for each kind that versions are written to the disk; from the start on they then all are.

        Raises `UserError` instead when memory is wanted, and this is the start.
        """
        if self._is_start and self._is_wanted:
            raise UserError(
                f"--publish.in-memory: {text}; give a container more by --shm-size, or leave this setting out"
            )
        if self._is_start:
            self._is_wanted = False
        if kind not in self._logged_refusals:
            log.info("weights are written to the disk: %s", text)
        self._logged_refusals.add(kind)

    def close(self) -> None:
        """Remove the folder in memory with what is in it, and those of killed processes that nothing needs any more."""
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        self._reserved_slot = None
        self._slot_count = 0
        if self._memory_folder is not None:
            shutil.rmtree(self._memory_folder, ignore_errors=True)
            self._memory_folder = None
        while self._folder_locks:
            os.close(self._folder_locks.pop())
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove what killed processes of this user left in memory: all but the versions to which a link leads, from
        the folder that they belong to or from this one. Only the folder's publisher may call this.
        """
        for folder in self._memory_root.glob(f"{_PREFIX}*"):
            if folder != self._memory_folder:
                with suppress(OSError):  # it is locked, another user's, or gone
                    self._remove_unlinked(folder)

    def _remove_unlinked(self, folder: Path) -> None:
        """Raises `OSError` where another process has the folder."""
        owner = (folder / _OWNER).readlink()
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_uid != os.getuid():
                return
            targets, owner_targets = (
                {memory_target(file) for file in linking_folder.iterdir()} if linking_folder.is_dir() else set()
                for linking_folder in (self._folder, owner)
            )
            unlinked = {file for file in folder.iterdir() if file.name != _OWNER} - targets - owner_targets
            for file in unlinked:
                file.unlink()
            versions = set(folder.iterdir())
            if not versions & (targets | owner_targets):
                shutil.rmtree(folder, ignore_errors=True)
            elif versions & targets:  # this run has them until newer ones come
                self._folder_locks.append(os.dup(lock))
        finally:
            os.close(lock)


def is_lost(path: Path) -> bool:
    """Returns whether `path` is a link to a file that was in memory and is gone."""
    target = memory_target(path)
    # the link is looked at again, since a file that is pruned or moved to the disk loses its link first
    return target is not None and not target.exists() and memory_target(path) == target


def remove(path: Path) -> None:
    """Delete a file if it exists, and the file in memory that it links to."""
    target = memory_target(path)
    path.unlink(missing_ok=True)
    if target is not None and _belongs_to(target, path.parent):
        target.unlink(missing_ok=True)


def bring_to_disk(path: Path) -> None:
    """Replace a link to memory by the file itself, which then survives a power cut. A file on the disk is only flushed.
    Readers that have it open go on reading.

    Raises `FileNotFoundError` when it is gone.
    """
    target = memory_target(path)
    if target is not None:
        copy = path.with_name(f".{path.name}")
        copy.unlink(missing_ok=True)
        copy_version(target, copy)
        sync(copy)
        os.replace(copy, path)
        if _belongs_to(target, path.parent):
            target.unlink(missing_ok=True)
    sync(path)


def memory_target(path: Path) -> Path | None:
    """Returns the file in memory that a link leads to; any other link is none of ours, and nothing of it is touched."""
    try:
        target = path.readlink()
    except OSError:  # no link, or gone meanwhile
        return None
    return target if target.parent.name.startswith(_PREFIX) else None


def _belongs_to(target: Path, folder: Path) -> bool:
    """Returns whether a file in memory belongs to a folder, by the mark that its writer made beside it."""
    try:
        return target.parent.parent == MEMORY_ROOT and (target.parent / _OWNER).readlink() == folder.resolve()
    except OSError:
        return False
