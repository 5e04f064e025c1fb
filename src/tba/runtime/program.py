"""Finds the version of this program with which a run is made: all processes that work on it at one time must have the
same.

Invariant: two processes have the same version exactly if every source file of the package is the same, byte for byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tba.errors import UserError

_PACKAGE = Path(__file__).parents[1]
_UNKNOWN = "of an earlier version, which does not say which"


@cache
def version() -> str:
    """Returns the release, and a digest of the source files as they were when this process first asked."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.parent == _PACKAGE / "examples":  # in a wheel only: nothing of the program
            continue
        source = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(source)}\n".encode() + source)
    try:
        release = metadata.version("tba-rl")
    except metadata.PackageNotFoundError:
        release = "not installed"
    return f"{release} ({digest.hexdigest()})"


def version_of(facts: Mapping[str, Any]) -> str:
    """Returns the version of a run's present incarnation, as its recipe.json says."""
    incarnations = facts.get("incarnations")
    incarnation = incarnations[-1] if isinstance(incarnations, list) and incarnations else None
    return str(incarnation.get("program", _UNKNOWN)) if isinstance(incarnation, dict) else _UNKNOWN


def require_same_version(facts: Mapping[str, Any], who: str, build: str | None = None) -> None:
    """Raises `UserError` unless `who`, of version `build` (None: this process's), has the same version as the run."""
    build = version() if build is None else build
    if build != version_of(facts):
        raise UserError(
            f"{who} uses tba {build}, but the run uses tba {version_of(facts)}: start it from the same source files"
        )
