"""Versions that lie in the machine's memory for as long as that is enough: their folder holds links to them.

They lie in slots (`slots`), which are used again.

Invariant: each process that writes has a folder of its own there, which only its user can read and which names the
folder that its files belong to. A file there is deleted only for that folder: a copy of a run has links to files of the
run that it was copied from. What a killed process left is removed by the next one that begins or ends, once no link
leads to it. Where the memory is emptied (by a restart of the machine, or by hand) a link leads nowhere, and its file is
gone.
"""

from __future__ import annotations

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
        self._slots: list[Slot] = []
        self._slot_count = 0  # of all that were made, also of those that are gone
        self._reserved_slot: Slot | None = None  # locked, for the next version
        self._was_refused = False

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
        if self._memory_folder is None:
            self.remove_leftovers()
        needed_bytes = (size if self._memory_folder else SLOTS * size) + _SPARE_BYTES
        free_bytes = self._free_bytes()
        if free_bytes < needed_bytes or len(self._slots) >= 2 * SLOTS:
            self._refuse(needed_bytes, free_bytes)
            return None
        try:
            return self._make_slot(size)
        except OSError as error:  # somebody else took the room meanwhile
            log.warning("a version of the weights is written to the disk: %s", error)
            return None

    def _make_slot(self, size: int) -> Slot | None:
        if self._memory_folder is None or not self._memory_folder.is_dir():
            self._memory_folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._memory_root))
            (self._memory_folder / _OWNER).symlink_to(self._folder.resolve())
        self._slot_count += 1
        slot = Slot(self._memory_folder / f"{_SLOT}{self._slot_count}", size, self._register)
        self._slots.append(slot)
        return slot if slot.lock() else None

    def _free_bytes(self) -> int:
        if not self._memory_root.is_dir():
            return 0
        file_bytes, host_bytes = shutil.disk_usage(self._memory_root).free, free_host_bytes()
        return file_bytes if host_bytes is None else min(file_bytes, host_bytes)

    def _refuse(self, needed_bytes: int, free_bytes: int) -> None:
        """Say once that versions are written to the disk; from the start on they then all are."""
        text = (
            f"{self._memory_root} and the machine's memory have {free_bytes / 1e9:.2f} GB free, and weights in memory "
            f"need {needed_bytes / 1e9:.2f} GB"
        )
        if self._memory_folder is None and self._is_wanted:
            raise UserError(
                f"--publish.in-memory: {text}; give a container more by --shm-size, or leave this setting out"
            )
        if self._memory_folder is None:
            self._is_wanted = False
        if not self._was_refused:
            log.info("weights are written to the disk: %s", text)
        self._was_refused = True

    def close(self) -> None:
        """Remove the folder in memory with what is in it, and those of killed processes that nothing needs any more."""
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        self._reserved_slot = None
        if self._memory_folder is not None:
            shutil.rmtree(self._memory_folder, ignore_errors=True)
            self._memory_folder = None
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove what killed processes of this user left in memory: files of folders that are gone, and files of this
        folder to which no link leads. Only the folder's publisher may call this.
        """
        published_folder = self._folder.resolve()
        linked_folders = {file.readlink().parent for file in published_folder.iterdir() if file.is_symlink()}
        for folder in self._memory_root.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                owner = (folder / _OWNER).readlink()
                is_needed = folder in linked_folders or (owner != published_folder and owner.is_dir())
                if folder.lstat().st_uid == os.getuid() and folder != self._memory_folder:
                    if not is_needed:
                        shutil.rmtree(folder, ignore_errors=True)
                    elif owner == published_folder:  # of its slots only those that hold a version
                        for slot_file in folder.glob(f"{_SLOT}*"):
                            slot_file.unlink()


def is_lost(path: Path) -> bool:
    """Returns whether `path` is a link to a file that was in memory and is gone."""
    return memory_target(path) is not None and not path.exists()


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
    target = path.readlink() if path.is_symlink() else None
    return target if target is not None and target.parent.name.startswith(_PREFIX) else None


def _belongs_to(target: Path, folder: Path) -> bool:
    """Returns whether a file in memory belongs to a folder, by the mark that its writer made beside it."""
    try:
        return target.parent.parent == MEMORY_ROOT and (target.parent / _OWNER).readlink() == folder.resolve()
    except OSError:
        return False
