"""Which paths lie on a network filesystem, where SQLite's write-ahead log is not safe.

Invariant: the answer is about the mount that holds the path, found by the longest mount point above it.
"""

from __future__ import annotations

from pathlib import Path

# SQLite's WAL needs shared memory and byte-range locks that all writers agree on; these do not promise either.
_NETWORK = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"),
    *("ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "wekafs", "fuse.ceph", "fuse.davfs"),
    *("fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
}


def network_filesystem(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The type of the network filesystem that holds `path`, or None (local, or no mount table to ask)."""
    if not mounts.exists():
        return None
    resolved = path.resolve()
    kind, depth = "", -1
    for line in mounts.read_text().splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_unescape(fields[1]))
        # A later line hides an earlier one on the same mount point.
        if len(point.parts) >= depth and resolved.is_relative_to(point):
            kind, depth = fields[2], len(point.parts)
    return kind if kind in _NETWORK else None


def _unescape(text: str) -> str:
    """The mount table writes blanks and backslashes in octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
