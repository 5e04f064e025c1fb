"""A full disk, whichever process meets it, ends in one sentence, and the run can be resumed once there is space. So do
a run's folder that is taken away, a disk that gives errors, and memory that is used up.

Invariant: what was acknowledged before is whole. Every file of a run is either appended to, and read up to its last
whole record, or written under a temporary name and renamed; a write that fails takes nothing away.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from pathlib import Path

from tba.errors import UserError

_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # no space, no quota, no room under the limit of a file's size
_FAILURES = ("EIO", "ESTALE", "EROFS", "ENODEV", "ENXIO", "EUCLEAN", "ESHUTDOWN")  # of a disk, or its file system
_BROKEN = {getattr(errno, name) for name in _FAILURES if hasattr(errno, name)}
_OS_ERROR = re.compile(r"\b(?:os error|code:) (\d+)\b")  # in the words of a library in Rust
_WORDS = ("no space left", "os error 28", "disk quota exceeded", "file too large", "os error 27", "disk is full")
# of the system, of torch, of a library in C++, and of a thread without room for its stack
_NO_MEMORY = ("cannot allocate memory", "can't allocate memory", "bad_alloc", "can't start new thread")
_LEAST_FREE_BYTES = 1 << 16  # less free space than this counts as none


def disk_full(error: BaseException, run: Path) -> UserError | None:
    """Returns the error to raise for `error` if the disk of the run at `run` is full; None when it is another error."""
    chain = _causes(error)
    is_full = any(
        (isinstance(e, OSError) and e.errno in _ERRNOS) or any(word in str(e).lower() for word in _WORDS) for e in chain
    )
    is_vague = any("disk i/o error" in str(e).lower() for e in chain)  # SQLite's message, for many causes
    has_size_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    if is_full or (is_vague and (has_size_limit or shutil.disk_usage(run).free < _LEAST_FREE_BYTES)):
        return no_space(run)
    return None


def outside_cause(error: BaseException, run: Path) -> UserError | None:
    """Returns the error to raise for `error` if what is around the run at `run` has caused it: its disk is full or
    gives errors, its folder or a part of it was taken away, or there is no memory left. None when it is another error.
    """
    if not (run / "recipe.json").exists():
        return UserError(
            f"the folder of the run, {run}, was moved or deleted while it was in use: put it back (nothing is written "
            f"in its place), then continue with `tba resume {run}`"
        )
    if (full := disk_full(error, run)) is not None:
        return full
    for cause in _causes(error):
        if isinstance(cause, MemoryError) or any(word in str(cause).lower() for word in _NO_MEMORY):
            return UserError(
                f"a process of the run at {run} could not get the memory it needs: give it more, or make the run "
                "smaller (`tba check` says what takes how much: --model.generation.slots, --max-tokens-per-pass), then "
                f"continue with `tba resume {run}`"
            )
        filename = getattr(cause, "filename", None)
        is_in_run = isinstance(filename, str) and run.resolve() in Path(filename).resolve().parents
        if isinstance(cause, OSError) and (is_in_run or cause.errno in _BROKEN):
            return UserError(
                f"{filename or f'a file of the run at {run}'} cannot be read or written ({cause.strerror}): it was "
                f"taken away, or its disk gives errors; put it right, then continue with `tba resume {run}`"
            )
        if (number := _OS_ERROR.search(str(cause))) is not None and int(number[1]) in _BROKEN:
            return UserError(
                f"a file of the run at {run} cannot be read or written ({os.strerror(int(number[1]))}): its disk gives "
                f"errors; put it right, then continue with `tba resume {run}`"
            )
    return None


def _causes(error: BaseException) -> list[BaseException]:
    """Returns an error with the errors that have led to it."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def no_space(run: Path) -> UserError:
    """Returns the error with the sentence for a full disk."""
    return UserError(f"the disk of {run} is full: free some space, then continue with `tba resume {run}`")
