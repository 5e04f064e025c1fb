"""Folders that appear whole or not at all: they are filled under a temporary name, then renamed.

Invariant: a folder that is visible under its own name is complete. What a crash leaves behind has a name that begins
with a dot, and `remove_leftovers` deletes it.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Returns the folder of what is made once and kept: `kind` within $TBA_CACHE, or within ~/.cache/tba."""
    return Path(os.environ.get("TBA_CACHE", Path.home() / ".cache" / "tba")) / kind


@contextmanager
def atomic_folder(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yields a new folder to fill, which becomes `path` in one rename when the block ends; if it raises, nothing stays.

    With `durable` it survives a power cut once the block has ended. Raises `FileExistsError` when `path` is a folder
    with something in it, and `FileNotFoundError` when a folder above it was moved away meanwhile, also if what fills it
    makes missing folders anew, as transformers does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _hidden_name(path, "writing")
    temporary.mkdir()
    folders_above = {folder: folder.stat() for folder in temporary.parents[:2]}
    try:
        yield temporary
        if not os.path.samestat(folders_above[path.parent], path.parent.stat()):
            raise FileNotFoundError(errno.ENOENT, "a folder above it was moved away", str(path))
        if durable:
            for root, _, names in os.walk(temporary):
                for name in (*names, "."):
                    sync(Path(root) / name)
        _rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder, stat in folders_above.items():
            with suppress(OSError):  # it is gone, or not empty
                if not os.path.samestat(stat, folder.stat()):  # made anew: nothing takes the moved folder's place
                    folder.rmdir()
        raise
    if durable:
        sync(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder in one step: it is never visible half removed.

    Raises `FileNotFoundError` when it does not exist.
    """
    hidden_path = _hidden_name(path, "removed")
    os.rename(path, hidden_path)
    shutil.rmtree(hidden_path)


def remove_leftovers(parent: Path) -> None:
    """Delete what a crash left in `parent`. Only its one writer may call this, while it writes nothing there."""
    for leftover in parent.glob(".*"):
        if leftover.name.startswith((".writing-", ".removed-")):
            shutil.rmtree(leftover, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden_name(path: Path, purpose: str) -> Path:
    return path.with_name(f".{purpose}-{path.name}-{uuid.uuid4().hex[:12]}")


def _rename(temporary: Path, path: Path) -> None:
    try:
        os.replace(temporary, path)
    except OSError as error:  # "directory not empty", under whichever of its two names the system uses
        if path.is_dir():
            raise FileExistsError(f"{path} is there already") from error
        raise
