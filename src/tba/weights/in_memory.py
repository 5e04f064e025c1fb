"""Files of a folder that lie in the machine's memory for as long as that is enough: the folder holds links to them.

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
from contextlib import suppress
from pathlib import Path

from tba.weights.atomic_dir import sync

log = logging.getLogger("tba.weights")
MEMORY_ROOT = Path("/dev/shm")  # noqa: S108 (where Linux keeps files in memory; each folder there is its user's alone)
_PREFIX = "tba-published-"
_OWNER = "of"  # a link to the folder that the files belong to
_SPARE_BYTES = 1 << 28  # bytes that stay free beside a file


class InMemory:
    """Keeps large files of `folder` in a folder of the machine's memory, which is made with the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._memory_root = MEMORY_ROOT
        self._memory_folder: Path | None = None
        self._was_refused = False

    def link(self, path: Path, size: int) -> None:
        """Make `path` a link to a new file in memory, if there is room for `size` bytes; else it stays as it is, so
        that what is written there is on the disk. The first time that there is none is logged.
        """
        free = shutil.disk_usage(self._memory_root).free if self._memory_root.is_dir() else 0
        if free < size + _SPARE_BYTES:
            if not self._was_refused:
                log.warning(
                    "weights are written to the disk: a version is of %.2f GB, and %s has %.2f GB free (a container is "
                    "given more by --shm-size)",
                    size / 1e9,
                    self._memory_root,
                    free / 1e9,
                )
            self._was_refused = True
            return
        if self._memory_folder is None or not self._memory_folder.is_dir():  # or was deleted by another program
            self._remove_leftovers()
            self._memory_folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._memory_root))
            (self._memory_folder / _OWNER).symlink_to(self._folder.resolve())
        path.unlink(missing_ok=True)
        path.symlink_to(self._memory_folder / path.name.lstrip("."))

    def close(self) -> None:
        """Remove the folder in memory with what is in it, and those of killed processes that nothing needs any more."""
        if self._memory_folder is not None:
            shutil.rmtree(self._memory_folder, ignore_errors=True)
            self._memory_folder = None
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove what killed processes of this user left in memory: files of folders that are gone, and files of this
        folder to which no link leads.
        """
        published_folder = self._folder.resolve()
        linked_folders = {file.readlink().parent for file in published_folder.iterdir() if file.is_symlink()}
        for folder in self._memory_root.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                owner = (folder / _OWNER).readlink()
                is_needed = folder in linked_folders or (owner != published_folder and owner.is_dir())
                if folder.lstat().st_uid == os.getuid() and not is_needed:
                    shutil.rmtree(folder, ignore_errors=True)


def is_lost(path: Path) -> bool:
    """Returns whether `path` is a link to a file that was in memory and is gone."""
    return _memory_target(path) is not None and not path.exists()


def remove(path: Path) -> None:
    """Delete a file if it exists, and the file in memory that it links to."""
    target = _memory_target(path)
    path.unlink(missing_ok=True)
    if target is not None and _belongs_to(target, path.parent):
        target.unlink(missing_ok=True)


def bring_to_disk(path: Path) -> None:
    """Replace a link to memory by the file itself, which then survives a power cut. A file on the disk is only flushed.
    Readers that have it open go on reading.

    Raises `FileNotFoundError` when it is gone.
    """
    target = _memory_target(path)
    if target is not None:
        copy = path.with_name(f".{path.name}")
        copy.unlink(missing_ok=True)
        shutil.copyfile(target, copy)
        sync(copy)
        os.replace(copy, path)
        if _belongs_to(target, path.parent):
            target.unlink(missing_ok=True)
    sync(path)


def _memory_target(path: Path) -> Path | None:
    """Returns the file in memory that a link leads to; any other link is none of ours, and nothing of it is touched."""
    target = path.readlink() if path.is_symlink() else None
    return target if target is not None and target.parent.name.startswith(_PREFIX) else None


def _belongs_to(target: Path, folder: Path) -> bool:
    """Returns whether a file in memory belongs to a folder, by the mark that its writer made beside it."""
    try:
        return target.parent.parent == MEMORY_ROOT and (target.parent / _OWNER).readlink() == folder.resolve()
    except OSError:
        return False
