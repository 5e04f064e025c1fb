"""Opens journals. The first process to do so checks it; a damaged one is set aside, and its rows go into a new file.

    journal.sqlite-in-use        locked: shared by all who may write it, exclusively by a command that copies it
    journal.sqlite-open          locked: shared by all who have it open, exclusively by the one that checks it
    journal.sqlite.other-1-wal   a log that lay beside the journal and is not its own (`checks`)
    journal.sqlite-acknowledged/ how many rows each owner had seen at its last `put` (`missing_rows`)
    journal.sqlite-suspect       a process met damage while using it: it is recovered, whatever the check finds
    journal.sqlite.damaged-1     what was set aside (with its -wal), as it was; nothing is ever deleted
    journal.sqlite.recovering    the new file while it is made; `.recovered` once it is whole
    journal.sqlite.pages         a copy of the damaged one, in which its pages are read (`pages`)

Invariant: a file is replaced only while nobody else has it open, and only by one that is whole on the disk; if the
process is killed at any moment, the next one to open the journal finishes what was begun. Every trajectory whose own
pages are whole is brought over, with its checksum compared; the numbers of the others are kept, without a body, so that
they are counted and never taken for data. Counts (`counters`) that cannot be read are computed again from the
trajectories.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from tba.errors import DeadlineExceeded, UserError
from tba.replay.checks import find_damage, log_belongs, log_of, uri_to_read
from tba.replay.codec import Damaged, prompt_id, trajectory_header
from tba.replay.database import Database, FileLock, in_use_mark, network_filesystem, suspect_mark
from tba.replay.pages import HEADER_BYTES, UNREADABLE, read_table_rows
from tba.replay.schema import KIND, LOST_TABLE, STAGED_TABLE, has_table, keep_prompts, record_lost, set_totals

log = logging.getLogger("tba.journal")
_DEADLINE_SECONDS = 1800.0  # seconds that checking and recovering a large file may take
_POLL_SECONDS = 0.02
_COPIED_TABLES = ("leases", "outcomes", "jobs", "evaluations", "counters", "unscored", "scores", "recoveries")
_LEAST_BYTES = 32  # that the facts of a trajectory take up
_MOST_CUT_OFF_ROWS = 10_000_000  # trajectories whose loss a file tells that could not hold them: each gets a row


@dataclass(frozen=True, slots=True)
class Recovery:
    """Records a recovery: a damaged file was set aside, and its rows went into a new one."""

    time: float  # seconds since the epoch
    damaged: str  # the name that the file has now; empty where there is none
    why: str
    rows: int  # trajectories in the new file, with their bodies
    lost_rows: int
    lost_tokens: int

    def __str__(self) -> str:
        if not self.damaged:
            return f"the journal {self.why}: {self.lost_rows} trajectories are missing, {self.rows} are there"
        return (
            f"the journal was damaged ({self.why}); it was set aside as {self.damaged}: "
            f"{self.rows} trajectories were recovered, {self.lost_rows} could not be read"
        )


def open_journal(
    path: Path, deadline_s: float = 30.0, on_wait: Callable[[], object] = lambda: None, create: bool = True
) -> Database:
    """Returns the journal, checked, with its tables; `create`: also where there was no file.

    Raises `UserError` on a network filesystem, and as `Database` does.
    """
    kind = network_filesystem(Path(path).absolute().parent)
    if kind is not None:
        raise UserError(
            f"the journal {path} would be on a network filesystem ({kind}), where SQLite loses data: "
            f"give a folder on a local disk with --run.journal-dir"
        )
    locks = lock_and_check(path)
    try:
        return Database(path, deadline_s, locks, on_wait, create)
    except BaseException:
        locks.close()
        raise


def lock_and_check(path: Path, deadline_s: float = _DEADLINE_SECONDS) -> ExitStack:
    """Returns the locks that every process holds that may write the journal. The first checks the file, the others wait
    until it has.

    Raises `DeadlineExceeded` when that takes too long, `UserError` for a file that is no journal.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    limit = time.monotonic() + deadline_s
    with ExitStack() as locks:
        in_use = locks.enter_context(closing(FileLock(in_use_mark(path))))
        opened = locks.enter_context(closing(FileLock(Path(f"{path}-open"))))
        _lock_shared(in_use, limit, f"another command to copy the journal {path}")
        if opened.take(fcntl.LOCK_EX):
            _check_or_recover(path)
        _lock_shared(opened, limit, f"another process to check the journal {path}")
        return locks.pop_all()


def _lock_shared(lock: FileLock, limit: float, event: str) -> None:
    start = time.monotonic()
    while not lock.take(fcntl.LOCK_SH):
        if time.monotonic() >= limit:
            raise DeadlineExceeded(f"waited {time.monotonic() - start:.0f} s for {event}")
        time.sleep(_POLL_SECONDS)


def _check_or_recover(path: Path) -> None:
    recovered = recovered_name(path)
    for part in (".recovering", ".recovering-wal", ".recovering-shm", ".recovering-journal", ".pages"):
        Path(f"{path}{part}").unlink(missing_ok=True)
    if recovered.exists():
        _replace(path, recovered, free_name(path))
        suspect_mark(path).unlink(missing_ok=True)
        return
    log_name = "" if log_belongs(path) else _set_log_aside(path)
    suspicion = "SQLite met damage while it was in use" if suspect_mark(path).exists() else None
    if reason := find_damage(path) or suspicion:
        new_path = free_name(path)
        recovery = _recover(path, Path(f"{path}.recovering"), reason, new_path.name)
        os.replace(f"{path}.recovering", recovered)
        _replace(path, recovered, new_path)
        log.warning("%s: %s", path, recovery)
    suspect_mark(path).unlink(missing_ok=True)
    if log_name:
        reason = f"had a log beside it that is not its own, which was set aside as {log_name}"
        log.warning("the journal %s %s", path, reason)
        with Database(path) as database, database.transaction() as connection:
            (rows,) = connection.execute("SELECT count(*) FROM bodies").fetchone()
            record_recovery(connection, time.time(), "", reason, rows, 0, 0)


def _set_log_aside(path: Path) -> str:
    """Rename a log, so that SQLite does not read it into the journal; returns its new name."""
    new_path = log_of(free_name(path, "other"))
    os.rename(log_of(path), new_path)
    Path(f"{path}-shm").unlink(missing_ok=True)
    return new_path.name


def _replace(path: Path, recovered: Path, aside: Path) -> None:
    """Put the new file in the damaged one's place, which gets its second name first: its data always have a name."""
    if path.exists():
        os.link(path, aside)
    wal = Path(f"{path}-wal")
    if wal.exists():  # before the new file takes the name: SQLite would read the old log into it
        os.rename(wal, f"{aside}-wal")
    Path(f"{path}-shm").unlink(missing_ok=True)
    os.replace(recovered, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _recover(path: Path, new_path: Path, reason: str, aside_name: str) -> Recovery:
    """Write a new file of all that can be read in `path`.

    Raises `UserError` when nothing shows it to be a journal, unless it is too short to be anything.
    """
    with Database(new_path) as database:
        with database.transaction() as connection:
            facts = _copy_tables(path, connection)
            _copy_rows(path, connection, facts)
            (body_count,) = connection.execute("SELECT count(*) FROM bodies").fetchone()
            if not body_count and not facts.is_journal and (not path.exists() or path.stat().st_size >= HEADER_BYTES):
                raise UserError(f"{path} is not a SQLite file, and contains nothing of a journal: choose another place")
            recovery = Recovery(time.time(), aside_name, reason, body_count, *_reconcile(connection, facts))
            record_recovery(connection, *astuple(recovery))
        database.checkpoint()
    for part in ("-wal", "-shm"):
        Path(f"{new_path}{part}").unlink(missing_ok=True)  # empty: its content has been moved into the file
    return recovery


def record_recovery(connection: sqlite3.Connection, *facts: object) -> None:
    """Insert the facts of a `Recovery`, in their order."""
    connection.execute(
        "INSERT INTO recoveries (time, damaged, why, rows, lost_rows, lost_tokens) VALUES (?, ?, ?, ?, ?, ?)", facts
    )


@dataclass
class _FileFacts:
    """Collects what a damaged file says about itself."""

    most_in_file: int  # trajectories that a file of its size can have
    most_in_log: int
    is_journal: bool = False
    totals: dict[str, int] = field(default_factory=dict)
    counted_rows: int | None = None  # trajectories that the counts are of; None where some counts could not be read

    def accept_totals(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Replace the totals by rows of (name, value, again), if all of these are possible."""
        numbers = {name: value for name, value, again in rows if isinstance(value, int) and value == again}
        totals = self.totals | {name: numbers[name] for name in _TOTALS if name in numbers}
        most = self.most_in_file + self.most_in_log + _MOST_CUT_OFF_ROWS
        if min(totals.values(), default=0) >= 0 and totals.get("retired_until", 0) <= totals.get("rows", -1) <= most:
            self.totals, self.is_journal = totals, True

    @property
    def last_place(self) -> int:
        """Returns the largest number that a trajectory can have: the totals may be older than the log."""
        return self.totals.get("rows", self.most_in_file) + self.most_in_log


def _copy_tables(path: Path, connection: sqlite3.Connection) -> _FileFacts:
    """Copy the small tables, each as far as it can be read."""
    most_rows = [p.stat().st_size // _LEAST_BYTES if p.exists() else 0 for p in (path, Path(f"{path}-wal"))]
    facts = _FileFacts(most_rows[0], most_rows[1])
    with (
        suppress(*UNREADABLE, OSError),
        closing(sqlite3.connect(uri_to_read(path), uri=True, timeout=5.0, isolation_level=None)) as old_connection,
    ):
        old_connection.execute("PRAGMA writable_schema = ON")  # with it SQLite reads as far as a truncated file goes
        facts.is_journal = old_connection.execute("PRAGMA application_id").fetchone()[0] == KIND
        complete_tables = {table for table in _COPIED_TABLES if _copy_table(old_connection, connection, table)}
        with suppress(*UNREADABLE):
            for table, statement in (("staged", STAGED_TABLE), ("lost", LOST_TABLE)):
                if has_table(old_connection, table):
                    connection.execute(statement)
                    _copy_table(old_connection, connection, table)
        with suppress(*UNREADABLE):
            facts.accept_totals(old_connection.execute("SELECT name, value, again FROM totals"))
            facts.counted_rows = facts.totals.get("rows") if "counters" in complete_tables else None
    return facts


def _copy_table(old_connection: sqlite3.Connection, new_connection: sqlite3.Connection, table: str) -> bool:
    """Copy a table; returns whether all of it could be read."""
    try:
        columns = [row[1] for row in new_connection.execute(f"PRAGMA table_info({table})")]
        marks = ",".join("?" * len(columns))
        for row in old_connection.execute(f"SELECT {','.join(columns)} FROM {table}"):  # noqa: S608 - our own names
            with suppress(sqlite3.IntegrityError):  # a damaged value in a column that must not be empty
                new_connection.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", row)  # noqa: S608
    except UNREADABLE:
        return False
    return True


def _copy_rows(path: Path, connection: sqlite3.Connection, facts: _FileFacts) -> None:
    """Copy prompts, bodies and facts, page by page, and read the totals; bodies whose prompt is lost are dropped."""
    total_rows = []
    connection.execute("CREATE TEMP TABLE facts (seq INTEGER PRIMARY KEY, uid, owner, prompt, tokens, i, s, r, c)")
    copy = Path(f"{path}.pages")
    for rowid, columns in read_table_rows(path, copy):
        match columns:
            case (None, bytes(body), *_) if prompt_id(body) == rowid:
                keep_prompts(connection, [(rowid, body)])
            case (None, int(digest), bytes(body), *_) if prompt_id(body) == digest:
                keep_prompts(connection, [(digest, body)])
            case (None, int(prompt), int(tokens), bytes(body), *_):
                if _is_whole(body, tokens):
                    connection.execute(_INSERT_BODY, (rowid, prompt, tokens, body))
            case (None, str(), str(), int(), int(tokens), int(), int(), _, _) if 0 <= tokens < 1 << 40:
                connection.execute(_INSERT_FACTS, (rowid, *columns[1:]))
            case (str(), int(), int(), None, *_):
                total_rows.append(columns[:3])
            case _:
                pass
    copy.unlink()
    facts.accept_totals(total_rows)
    retired_until = facts.totals.get("retired_until", 0)
    places = retired_until, facts.last_place  # outside of them bodies were deleted, or their number is damaged
    connection.execute("DELETE FROM bodies WHERE seq <= ? OR seq > ?", places)
    connection.execute("DELETE FROM facts WHERE seq <= 0 OR seq > ?", (facts.last_place,))
    connection.execute("DELETE FROM bodies WHERE NOT EXISTS (SELECT 1 FROM prompts p WHERE p.id = prompt)")


_TOTALS = ("rows", "tokens", "positions", "retired_rows", "retired_tokens", "retired_until", "identity", "mark")
_INSERT_BODY = "INSERT OR IGNORE INTO bodies VALUES (?, ?, ?, ?)"
_INSERT_FACTS = "INSERT OR IGNORE INTO facts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


def _is_whole(body: bytes, tokens: int) -> bool:
    try:
        return bool(trajectory_header(body)["length"] == tokens)
    except Damaged:
        return False


def _reconcile(connection: sqlite3.Connection, facts: _FileFacts) -> tuple[int, int]:
    """Make facts, totals and counts agree with the bodies; returns (trajectories, tokens) that are lost."""
    totals = facts.totals
    retired_until = totals.get("retired_until", 0)
    connection.create_function("uid_in", 1, lambda body: trajectory_header(body)["uid"])
    owners = dict(connection.execute("SELECT seq, owner FROM facts"))
    connection.execute("DELETE FROM bodies WHERE uid_in(body) <> (SELECT uid FROM facts f WHERE f.seq = bodies.seq)")
    for seq, prompt, tokens, body in connection.execute("SELECT seq, prompt, tokens, body FROM bodies"):
        header = trajectory_header(body)
        owner = owners.get(seq) or str(header["provenance"].get("searcher", ""))
        row = (seq, header["uid"], owner, prompt, tokens, *header["versions"][:2], header["reward"], header["created"])
        connection.execute("INSERT OR IGNORE INTO trajectories VALUES (?,?,?,?,?,?,?,?,?)", row)
    connection.execute("DELETE FROM bodies WHERE seq NOT IN (SELECT seq FROM trajectories)")
    connection.execute("INSERT OR IGNORE INTO trajectories SELECT * FROM facts")
    _add_missing_places(connection, totals)
    (rows, tokens), (retired_rows, retired_tokens) = (
        connection.execute(f"{_AMOUNT_QUERY} {condition}", (retired_until,)).fetchone()
        for condition in ("seq > 0 OR ?", "seq <= ?")
    )
    totals = dict.fromkeys(_TOTALS, 0) | {"retired_rows": retired_rows, "retired_tokens": retired_tokens} | totals
    set_totals(connection, totals | {"rows": max(rows, totals["rows"]), "tokens": max(tokens, totals["tokens"])})
    lost_places = [(seq,) for seq in record_lost(connection)]
    lost_tokens = sum(
        connection.execute("SELECT tokens FROM trajectories WHERE seq = ?", seq).fetchone()[0] for seq in lost_places
    )
    if facts.counted_rows is None:  # counts without the rows they count would be of no use
        _recompute_counters(connection)
    elif rows > facts.counted_rows:  # of transactions that SQLite itself could not read
        count_puts(connection, facts.counted_rows)
    return len(lost_places), lost_tokens


_AMOUNT_QUERY = "SELECT count(*), coalesce(sum(tokens), 0) FROM trajectories WHERE"


def _add_missing_places(connection: sqlite3.Connection, totals: dict[str, int]) -> None:
    """Add rows for the trajectories that are lost, according to the totals."""
    retired_until = totals.get("retired_until", 0)
    (last_place, tokens) = connection.execute("SELECT coalesce(max(seq), 0), sum(tokens) FROM trajectories").fetchone()
    last_place = max(last_place, totals.get("rows", 0))
    rows = connection.execute("SELECT seq FROM trajectories WHERE seq > ?", (retired_until,))
    present_places = {seq for (seq,) in rows}
    missing_places = [seq for seq in range(retired_until + 1, last_place + 1) if seq not in present_places]
    missing_tokens = max(0, totals.get("tokens", 0) - totals.get("retired_tokens", 0) - (tokens or 0))
    add_lost_rows(connection, missing_places, missing_tokens)


def add_lost_rows(connection: sqlite3.Connection, places: Iterable[int], tokens: int) -> None:
    """Insert rows without a body for lost trajectories, so that they keep their places; the first gets the tokens."""
    connection.executemany(
        "INSERT INTO trajectories VALUES (?, ?, '', 0, ?, 0, 0, NULL, NULL)",
        ((seq, f"lost-{seq}", 0 if n else tokens) for n, seq in enumerate(places)),
    )


def _recompute_counters(connection: sqlite3.Connection) -> None:
    """Compute the generated and imported counts of each owner anew: what it put, rejected or left unfinished."""
    for unit in ("trajectories", "tokens"):
        names = (f"generated_{unit}", f"imported_{unit}", f"rejected_{unit}", f"in_flight_{unit}")
        connection.execute("DELETE FROM counters WHERE name IN (?, ?)", names[:2])
        connection.execute(
            "INSERT INTO counters SELECT owner, ?1, sum(value) FROM counters WHERE name IN (?3, ?4) GROUP BY owner",
            names,
        )
    count_puts(connection, 0)


def count_puts(connection: sqlite3.Connection, after: int) -> None:
    """Add the trajectories after a place to the counts of the owners that put them."""
    for unit, amount in (("trajectories", "count(*)"), ("tokens", "sum(tokens)")):
        connection.execute(
            f"INSERT INTO counters SELECT owner, CASE WHEN incarnation < 0 THEN ?1 ELSE ?2 END, {amount} "  # noqa: S608
            "FROM trajectories WHERE seq > ?3 GROUP BY owner, incarnation < 0 "
            "ON CONFLICT DO UPDATE SET value = value + excluded.value",
            (f"imported_{unit}", f"generated_{unit}", after),
        )


def recovered_name(path: Path) -> Path:
    """Returns the name that a new file has once it is complete, until it takes the journal's place."""
    return Path(f"{path}.recovered")


def free_name(path: Path, kind: str = "damaged") -> Path:
    """Returns an unused name next to a file."""
    n = 1
    while (name := path.with_name(f"{path.name}.{kind}-{n}")).exists() or Path(f"{name}-wal").exists():
        n += 1
    return name
