"""A full disk, whichever process meets it, ends in one sentence, and the run can be resumed once there is space.

Invariant: what was acknowledged before is whole. Every file of a run is either appended to, and read up to its last
whole record, or written under a temporary name and renamed; a write that fails takes nothing away.
"""

from __future__ import annotations

import errno
import resource
import shutil
from pathlib import Path

from tba.errors import UserError

_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # no space, no quota, no room under the limit of a file's size
_WORDS = ("no space left", "os error 28", "disk quota exceeded", "file too large", "os error 27", "disk is full")
_NOTHING = 1 << 16  # bytes; less free space than this counts as none


def disk_full(error: BaseException, run: Path) -> UserError | None:
    """Returns the error to raise for `error` if the disk of the run at `run` is full; None when it is another error."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    of_disk = any(
        (isinstance(e, OSError) and e.errno in _ERRNOS) or any(word in str(e).lower() for word in _WORDS) for e in seen
    )
    vague = any("disk i/o error" in str(e).lower() for e in seen)  # SQLite's message, for many causes
    limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    if of_disk or (vague and (limited or shutil.disk_usage(run).free < _NOTHING)):
        return no_space(run)
    return None


def no_space(run: Path) -> UserError:
    """Returns the error with the sentence for a full disk."""
    return UserError(f"the disk of {run} is full: free some space, then continue with `tba train --resume {run}`")
