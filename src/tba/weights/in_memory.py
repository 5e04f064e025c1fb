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
PLACE = Path("/dev/shm")  # noqa: S108 (where Linux keeps files in memory; each folder there is its user's alone)
_PREFIX = "tba-published-"
_OWNER = "of"  # a link to the folder that the files belong to
_SPARE = 1 << 28  # bytes that stay free beside a file


class InMemory:
    """A folder in the machine's memory for large files of `folder`, made with the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = PLACE
        self._own: Path | None = None
        self._refused = False

    def link(self, path: Path, size: int) -> None:
        """Make `path` a link to a new file in memory, if there is room for `size` bytes; else it stays as it is, so
        that what is written there is on the disk. The first time that there is none is logged.
        """
        free = shutil.disk_usage(self._place).free if self._place.is_dir() else 0
        if free < size + _SPARE:
            if not self._refused:
                log.warning(
                    "weights are written to the disk: a version is of %.2f GB, and %s has %.2f GB free (a container is "
                    "given more by --shm-size)",
                    size / 1e9,
                    self._place,
                    free / 1e9,
                )
            self._refused = True
            return
        if self._own is None or not self._own.is_dir():  # or was deleted by another program
            self._sweep()
            self._own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._place))
            (self._own / _OWNER).symlink_to(self._folder.resolve())
        path.unlink(missing_ok=True)
        path.symlink_to(self._own / path.name.lstrip("."))

    def close(self) -> None:
        """Remove the folder in memory with what is in it, and those of killed processes that nothing needs any more."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None
        self._sweep()

    def _sweep(self) -> None:
        """Remove what killed processes of this user left in memory: of folders that are gone, and of this one, where no
        link leads to it.
        """
        own = self._folder.resolve()
        linked = {file.readlink().parent for file in own.iterdir() if file.is_symlink()}
        for left in self._place.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                folder = (left / _OWNER).readlink()
                needed = left in linked or (folder != own and folder.is_dir())
                if left.lstat().st_uid == os.getuid() and not needed:
                    shutil.rmtree(left, ignore_errors=True)


def is_lost(path: Path) -> bool:
    """Returns whether `path` is of a file that was in memory and is gone."""
    return _target(path) is not None and not path.exists()


def remove(path: Path) -> None:
    """Delete a file if it is there, and what is in memory for it."""
    target = _target(path)
    path.unlink(missing_ok=True)
    if target is not None and _is_of(target, path.parent):
        target.unlink(missing_ok=True)


def bring_to_disk(path: Path) -> None:
    """Put the file itself in the place of a link to memory: from here on it survives a power cut. One that is on the
    disk is only made to be really there. Readers that have it open go on reading.

    Raises `FileNotFoundError` when it is gone.
    """
    target = _target(path)
    if target is not None:
        copy = path.with_name(f".{path.name}")
        copy.unlink(missing_ok=True)
        shutil.copyfile(target, copy)
        sync(copy)
        os.replace(copy, path)
        if _is_of(target, path.parent):
            target.unlink(missing_ok=True)
    sync(path)


def _target(path: Path) -> Path | None:
    """Returns the file in memory that a link leads to; any other link is none of ours, and nothing of it is touched."""
    target = path.readlink() if path.is_symlink() else None
    return target if target is not None and target.parent.name.startswith(_PREFIX) else None


def _is_of(target: Path, folder: Path) -> bool:
    """Returns whether a file in memory belongs to a folder, by the mark that its writer made beside it."""
    try:
        return target.parent.parent == PLACE and (target.parent / _OWNER).readlink() == folder.resolve()
    except OSError:
        return False
