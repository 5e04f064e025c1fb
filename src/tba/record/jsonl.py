"""Files of one JSON object per line, which a crash can only shorten.

Invariant: every line but the last is whole. A line is one `write` under the file's lock, so only the last can be torn;
readers skip it, and the next process to append cuts it off first. Several processes may append to one file. A line that
was damaged later is passed over by readers, and reported and counted by `faults.note_unreadable`: none of these files
is needed for a run to continue.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tba.types import Json, Version

BLOCK_BYTES = 1 << 16
# what reading a line of a foreign file can raise
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
T = TypeVar("T")


def as_json(value: object) -> Json:
    """Returns `value` in the types of JSON: numpy numbers as Python's, not-a-number and infinities as None, a dataclass
    as its fields.

    Raises `TypeError`, naming the type, for what has no plain form.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return as_json(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return as_json(value.item())
    if isinstance(value, Version | Path):
        return str(value)
    if isinstance(value, np.ndarray):
        return as_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in fields(value)}
    raise TypeError(f"{type(value).__name__} has no plain JSON form")


class JsonLines:
    """Appends to a file of one JSON object per line; each line is handed to the system at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self.path = path
        self._file: FileIO = path.open("a+b", buffering=0)

    def append(self, line: Mapping[str, object]) -> None:
        """Write one line; it survives this process from here on. Raises `OSError` when the disk is full."""
        encoded_line = json.dumps(as_json(line), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            _cut_torn_line(self._file)
            if self._file.write(encoded_line) != len(encoded_line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._file.close()


def _cut_torn_line(file: FileIO) -> None:
    """Drop what follows the last newline: a line that a crash left unfinished."""
    size = end = file.seek(0, os.SEEK_END)
    width = 1  # nearly always the last byte is the newline
    while end > 0:
        start = max(0, end - width)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end, width = start, BLOCK_BYTES
    if end < size:
        file.truncate(end)


def read_lines_and_errors(path: Path, parse: Callable[[dict[str, Json]], Any]) -> tuple[list[Any], list[int]]:
    """Returns what `parse` makes of each whole line, in order, and the numbers (from 1) of the lines it cannot read.

    Nothing when there is no file. What follows the last newline is not read. A line cannot be read when it is no JSON
    object, or `parse` raises `ValueError`, `KeyError`, `TypeError` or `AttributeError`.
    """
    lines = NewLines(path, parse)
    return lines.read()[1], lines.bad_lines


def read_lines(path: Path, parse: Callable[[dict[str, Json]], Any] = dict) -> list[Any]:
    """Returns what can be read of a file, in order, without the lines that cannot."""
    return read_lines_and_errors(path, parse)[0]


class NewLines:
    """Reads what was appended to a file of JSON lines since it was last read: the cost of a read does not grow with the
    file.

    A last line that is not whole yet waits for the next time. A line that cannot be read is passed over, and its number
    kept in `bad_lines`. A file that was cut or replaced meanwhile is read from its beginning.
    """

    def __init__(self, path: Path, parse: Callable[[dict[str, Json]], Any] = dict) -> None:
        self.path = path
        self._parse = parse
        self._offset = self._lines_read = 0  # bytes, and whole lines, that were read
        self._last_line = b""  # while it is unchanged, what comes before it need not be read again
        self._restart(0)

    def read(self) -> tuple[bool, list[Any]]:
        """Returns (whether the file was read from its beginning, the values of its new lines); none while there is no
        file.
        """
        was_replaced, lines = self._read_new_lines()
        values = []
        for line in lines:
            self._lines_read += 1
            try:
                values.append(self._parse(_parse_object(line)))
            except UNREADABLE:
                self.bad_lines.append(self._lines_read)
        return was_replaced, values

    def _read_new_lines(self) -> tuple[bool, list[bytes]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._last_line))
                inode = os.fstat(file.fileno()).st_ino
                line = file.read(len(self._last_line))
                if was_replaced := not self._offset or inode != self._inode or line != self._last_line:
                    file.seek(0)
                    self._restart(inode)
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            was_replaced, lines = self._offset > 0, []
            self._restart(0)
        if lines:
            self._offset, self._last_line = self._offset + sum(map(len, lines)) + len(lines), lines[-1] + b"\n"
        return was_replaced, lines

    def _restart(self, inode: int) -> None:
        self.bad_lines: list[int] = []  # numbers, from 1, in the file that is read now
        self._inode = inode
        self._offset = self._lines_read = 0
        self._last_line = b""


def read_last_line(path: Path, parse: Callable[[dict[str, Json]], Any] = dict) -> Any | None:
    """Returns the last line that can be read, without reading those long before it; None when there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        start, tail = file.seek(0, os.SEEK_END), b""
        while start > 0:
            end, start = start, max(0, start - BLOCK_BYTES)
            file.seek(start)
            tail = file.read(end - start) + tail
            first_line, *whole_lines = tail.split(b"\n")[:-1] or [b""]
            for line in reversed([first_line, *whole_lines] if start == 0 else whole_lines):
                with suppress(*UNREADABLE):
                    return parse(_parse_object(line))
    return None


def _parse_object(line: bytes) -> dict[str, Json]:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise TypeError("no JSON object")
    return fields


def write_json(path: Path, value: object) -> None:
    """Write a JSON file under a temporary name and rename it: a reader sees the old file or the new one, never a part
    of one.
    """
    text = json.dumps(as_json(value), indent=2, ensure_ascii=False, allow_nan=False)
    path.parent.mkdir(exist_ok=True)  # not its parents: a run that was moved away is not made anew
    with atomic_replacement(path) as temporary, temporary.open("w", encoding="utf-8", errors="replace") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; the file written there replaces `path` when the block ends."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
