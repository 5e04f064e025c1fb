"""Rows out of a damaged SQLite file, page by page, without the trees that lead to them.

Invariant: nothing is changed, nothing raises for what the bytes are, and every row whose own pages are whole is given,
with what the write-ahead log has of them in its place. A row may come twice, or have been deleted before: who asks
knows his rows. Format: https://www.sqlite.org/fileformat2.html, sections 1.6 (pages), 2.1 (records) and 4 (the log).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

Row: TypeAlias = tuple[int, tuple[Any, ...]]  # rowid, columns; a rowid's own column is None
MAGIC = b"SQLite format 3\0"
_LEAF = 13
_WAL_MAGIC = 0x377F0682  # and one more when its checksums are of big-endian words
_WAL_HEAD, _FRAME_HEAD = 32, 24
_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}  # serial type -> bytes


@dataclass(frozen=True)
class Frame:
    """One page in the write-ahead log."""

    page: int
    at: int  # where its bytes begin
    commits: bool  # it ends a transaction
    whole: bool  # checksums agree up to it, so that SQLite itself reads it


def wal_frames(wal: Path, page_bytes: int) -> list[Frame]:
    """The frames of the log's present round, in order; none when there is no log."""
    if not wal.exists() or wal.stat().st_size < _WAL_HEAD:
        return []
    frames: list[Frame] = []
    with wal.open("rb") as file:
        head = file.read(_WAL_HEAD)
        magic, _, size, _, *salts = struct.unpack(">6I", head[:24])
        if magic & ~1 != _WAL_MAGIC or size != page_bytes:
            return []
        sums = _Checksum(big=bool(magic & 1))
        state = sums.after((0, 0), head[:24])
        whole = state == struct.unpack(">2I", head[24:])
        while len(block := file.read(_FRAME_HEAD + size)) == _FRAME_HEAD + size:
            page, commit, *frame_salts = struct.unpack(">4I", block[:16])
            if frame_salts != salts or not page:
                break
            state = sums.after(sums.after(state, block[:8]), block[_FRAME_HEAD:])
            whole = whole and state == struct.unpack(">2I", block[16:24])
            frames.append(Frame(page, file.tell() - size, bool(commit), whole))
    return frames


def committed(frames: list[Frame]) -> list[Frame]:
    """Those up to the last that ends a transaction."""
    ends = [i for i, frame in enumerate(frames) if frame.commits]
    return frames[: ends[-1] + 1] if ends else []


def torn(frames: list[Frame]) -> bool:
    """Whether transactions that were on the disk cannot be read by SQLite any more.

    Each was flushed before the next began: two of them behind a frame that is not whole are damage. One may be what a
    power cut left of the last, which nobody was told is done.
    """
    return sum(frame.commits and not frame.whole for frame in frames) >= 2


class _Checksum:
    """The log's running sum over pairs of words: s0 += x0 + s1; s1 += x1 + s0, modulo 2^32.

    It is linear: after n pairs it is M^n s + the sum of M^(n-1-i) B x_i, with M = [[1, 1], [1, 2]] and
    B = [[1, 0], [1, 1]], whose powers are made once.
    """

    def __init__(self, big: bool) -> None:
        self._words = np.dtype(">u4" if big else "<u4")
        self._powers: dict[int, tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]] = {}

    def after(self, state: tuple[int, ...], data: bytes) -> tuple[int, int]:
        """The state once `data` (a multiple of 8 bytes) has been added."""
        pairs = np.frombuffer(data, self._words).astype(np.uint32).reshape(-1, 2)
        weights, power = self._weights(len(pairs))
        added = (weights * pairs[:, None, :]).sum(axis=(0, 2), dtype=np.uint32)
        moved = (power * np.array(state, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
        total = (added + moved).tolist()
        return total[0], total[1]

    def _weights(self, pairs: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        if pairs not in self._powers:
            rows, power = [], (1, 0, 0, 1)
            for _ in range(pairs):
                a, b, c, d = power
                rows.append((((a + b) & _WORD, b), ((c + d) & _WORD, d)))  # times B
                power = ((a + b) & _WORD, (a + 2 * b) & _WORD, (c + d) & _WORD, (c + 2 * d) & _WORD)  # times M
            weights = np.array(rows[::-1], dtype=np.uint32).reshape(-1, 2, 2)
            self._powers[pairs] = weights, np.array(power, dtype=np.uint32).reshape(2, 2)
        return self._powers[pairs]


_WORD = 0xFFFFFFFF


@dataclass
class Pages:
    """The pages of a file, each as the log has it last."""

    file: IO[bytes]
    page_bytes: int
    count: int
    wal: IO[bytes] | None = None
    newer: Mapping[int, int] = field(default_factory=dict)  # page -> where it lies in the log

    def read(self, number: int) -> bytes:
        """Page `number`, from 1; short or empty where the file ends."""
        if self.wal is not None and number in self.newer:
            self.wal.seek(self.newer[number])
            return self.wal.read(self.page_bytes)
        self.file.seek((number - 1) * self.page_bytes)
        return self.file.read(self.page_bytes)


def page_bytes_of(path: Path) -> int | None:
    """The page size that the file's header states; None when there is no such header."""
    with path.open("rb") as file:
        head = file.read(100)
    if not head.startswith(MAGIC) or len(head) < 100:
        return None
    size = int.from_bytes(head[16:18], "big")
    size = 65536 if size == 1 else size
    return size if 512 <= size <= 65536 and not size & (size - 1) else None


def rows_of(path: Path, wal: Path, page_bytes: int) -> Iterator[Row]:
    """All rows of all tables with a rowid, in the order of pages."""
    frames = committed(wal_frames(wal, page_bytes))
    newer = {frame.page: frame.at for frame in frames}
    with path.open("rb") as file:
        count = max(-(-path.stat().st_size // page_bytes), *newer, 0)
        pages = Pages(file, page_bytes, count)
        if not newer:
            yield from _all(pages)
            return
        with wal.open("rb") as pages.wal:
            pages.newer = newer
            yield from _all(pages)


def _all(pages: Pages) -> Iterator[Row]:
    for number in range(1, pages.count + 1):
        page = pages.read(number)
        start = 100 if number == 1 else 0
        if len(page) < start + 8 or page[start] != _LEAF:
            continue
        cells = int.from_bytes(page[start + 3 : start + 5], "big")
        for i in range(min(cells, (len(page) - start) // 4)):
            place = start + 8 + 2 * i
            try:
                yield _row(pages, page, int.from_bytes(page[place : place + 2], "big"))
            except (IndexError, ValueError, struct.error):
                continue  # this row is damaged, the others of the page need not be


def _row(pages: Pages, page: bytes, at: int) -> Row:
    size, at = _varint(page, at)
    rowid, at = _varint(page, at)
    rowid = rowid - (1 << 64) if rowid >> 63 else rowid
    usable = pages.page_bytes
    local = size
    if size > usable - 35:
        least = (usable - 12) * 32 // 255 - 23
        local = least + (size - least) % (usable - 4)
        local = local if local <= usable - 35 else least
    payload = page[at : at + local]
    if len(payload) != local:
        raise ValueError("a row reaches over the end of its page")
    if local < size:
        payload += _overflow(pages, int.from_bytes(page[at + local : at + local + 4], "big"), size - local)
    return rowid, _record(payload)


def _overflow(pages: Pages, number: int, size: int) -> bytes:
    if size > pages.count * pages.page_bytes:
        raise ValueError("a row larger than its file")
    pieces = []
    while size > 0:
        page = pages.read(number)
        if len(page) != pages.page_bytes or not number:
            raise ValueError("a row continues on a page that is not there")
        pieces.append(page[4 : 4 + size])
        size -= len(pieces[-1])
        number = int.from_bytes(page[:4], "big")
    return b"".join(pieces)


def _record(payload: bytes) -> tuple[Any, ...]:
    end, at = _varint(payload, 0)
    kinds = []
    while at < end:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    columns: list[Any] = []
    for kind in kinds:
        if kind in (0, 8, 9):
            columns.append((None, 0, 1)[(0, 8, 9).index(kind)])
            continue
        length = _INTEGERS.get(kind, 8 if kind == 7 else (kind - 12) // 2)
        data = payload[at : at + length]
        if kind in (10, 11) or len(data) != length:
            raise ValueError("a column reaches over the end of its row")
        at += length
        if kind == 7:
            columns.append(struct.unpack(">d", data)[0])
        elif kind < 7:
            columns.append(int.from_bytes(data, "big", signed=True))
        else:
            columns.append(data.decode() if kind & 1 else data)
    return tuple(columns)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(8):
        byte = data[at + i]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + i + 1
    return value << 8 | data[at + 8], at + 9
