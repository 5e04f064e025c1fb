"""What is wrong with the files of a journal, and whether the log beside it belongs to it. Nothing here changes a file.

Each transaction draws a number, its link, and leaves it on the page of the totals, beside the link of the transaction
before. So a log belongs to a file exactly when its first transaction follows the last one that the file holds, or when
the file holds one of the log's own transactions (a part of the log was moved already). SQLite does not look: it reads
any log of the right name into the file.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from tba.replay.pages import (
    LogFrame,
    begins_as_sqlite,
    committed_frames,
    count_valid_frames,
    is_torn,
    is_whole,
    read_page,
    read_totals,
    wal_frames,
)
from tba.replay.schema import KIND, PAGE_BYTES, TABLES_SQL, TOTALS_PAGE, VERSION

_DAMAGE_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}
_FORMAT_MESSAGE = "unsupported file format"  # of the schema, by a header whose bytes have changed: it has no code


def log_of(path: Path) -> Path:
    """Returns the write-ahead log of a journal."""
    return Path(f"{path}-wal")


def uri_to_read(path: Path, immutable: bool = False) -> str:
    """Returns the name under which SQLite opens a file to read it; immutable: without its log, and without a lock."""
    return f"file:{quote(str(path.absolute()))}?{'immutable=1' if immutable else 'mode=ro'}"


def find_damage(path: Path, with_log: bool = True) -> str | None:
    """Returns what is wrong with a journal's file, in a few words; None when nothing is.

    Another program's file is not damaged: opening it will refuse it. with_log: with its log, for which SQLite makes an
    index beside it.
    """
    frames = wal_frames(log_of(path)) if with_log else []
    if not path.exists() or not path.stat().st_size:
        return "it is empty, its log is not" if committed_frames(frames) else None
    if not begins_as_sqlite(path):
        return "its header is not a journal's"
    try:
        with closing(sqlite3.connect(uri_to_read(path, not with_log), uri=True, timeout=5.0)) as connection:
            return _find_damage_by_sqlite(connection, path, frames)
    except UnicodeDecodeError:  # of the schema, which is text
        return "its schema is not text"
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE_CODES or str(error) == _FORMAT_MESSAGE:
            return str(error)
        return None  # opening it will say what it is


def _find_damage_by_sqlite(connection: sqlite3.Connection, path: Path, frames: list[LogFrame]) -> str | None:
    kind, version = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if frames and is_torn(frames, count_valid_frames(path)):
        return "its log is damaged"
    if kind != KIND or version != VERSION:
        return None  # opening it will refuse it
    verdict = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])  # indexes too, at no more cost
    if verdict != "ok":
        return verdict.splitlines()[-1]
    if not _has_all_columns(connection):
        return "its schema is not a journal's"
    if connection.execute("SELECT count(*) FROM totals WHERE value IS NOT again").fetchone()[0]:
        return "its totals are not what was written"
    rows, total = connection.execute(
        "SELECT (SELECT count(*) FROM trajectories), (SELECT value FROM totals WHERE name = 'rows')"
    ).fetchone()
    return None if rows == total else f"it has {rows:,} rows, and {total:,} were put into it"


def _has_all_columns(connection: sqlite3.Connection) -> bool:
    """Returns whether a journal has every column of every table: SQLite does not check names."""
    with closing(sqlite3.connect(":memory:")) as example:
        example.executescript(TABLES_SQL)
        return _columns(example) <= _columns(connection)


def _columns(connection: sqlite3.Connection) -> set[tuple[bytes, bytes]]:
    connection.text_factory = bytes  # whatever they are
    query = "SELECT t.name, c.name FROM sqlite_master t, pragma_table_info(t.name) c WHERE t.type = 'table'"
    return set(connection.execute(query))


def log_belongs(path: Path) -> bool:
    """Returns whether the log beside a journal is its own. True where there is none, and where damage hides it."""
    frames = committed_frames(wal_frames(log_of(path)))
    if not frames or not path.exists() or path.stat().st_size < 2 * PAGE_BYTES:
        return True
    link = read_totals(read_page(path, (TOTALS_PAGE - 1) * PAGE_BYTES)).get("link")
    if not link:  # a program wrote it that drew none
        return _belongs_by_trial(path)
    if not is_whole(log_of(path), frames):
        return True  # its first pages are damaged: `find_damage` will say so
    page_totals = (read_totals(read_page(log_of(path), frame.start)) for frame in frames if frame.page == TOTALS_PAGE)
    totals = next(page_totals, {})
    return link in (totals.get("link_before"), totals.get("link")) or any(link == t.get("link") for t in page_totals)


def _belongs_by_trial(path: Path) -> bool:
    """Returns whether a copy of the file, with the log applied, is sound and has no fewer rows than without it."""
    before = _identity_and_rows(path, immutable=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_to(Path(folder), path)
        if find_damage(copy) is not None:
            return find_damage(path, with_log=False) is not None
        after = _identity_and_rows(copy, immutable=False)
    return before is None or after is None or (after[0] == before[0] and after[1] >= before[1])


def _identity_and_rows(path: Path, immutable: bool) -> tuple[int, int] | None:
    try:
        with closing(sqlite3.connect(uri_to_read(path, immutable), uri=True, timeout=5.0)) as connection:
            values = dict(connection.execute("SELECT name, value FROM totals"))
            return int(values["identity"]), int(values["rows"])
    except (sqlite3.DatabaseError, UnicodeDecodeError, KeyError, TypeError):
        return None


def copy_to(folder: Path, path: Path, with_log: bool = True) -> Path:
    """Copy a journal, with its log, into a folder; returns the copy."""
    copy = folder / path.name
    for source in (path, log_of(path)) if with_log else (path,):
        if source.exists():
            shutil.copyfile(source, folder / source.name)
    return copy
