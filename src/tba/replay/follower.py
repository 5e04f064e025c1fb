"""Following the journal: what the searchers have put, in order, for the trainer's replay buffer.

Invariant: everything acknowledged is given exactly once to each reader, in the order of acknowledgement. Exactly one
connection checkpoints the write-ahead log and deletes what retention lets go: that of the follower that holds the lock
file next to the journal. (SQLite also checkpoints when the last connection to the file is closed.) No read transaction
is held between calls.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tba.errors import DeadlineExceeded, UserError
from tba.replay.codec import Damaged, MissingCounts, StoredTrajectory, check_body, decode_logs, decode_prompt, prompt_id
from tba.replay.database import Database, FileLock
from tba.replay.reading import JournalFile
from tba.replay.recovery import Recovery, open_journal
from tba.replay.schema import LOST_TABLE, add_to_totals, has_table, record_lost, set_totals
from tba.types import Evaluation, Prompt, Score, Trajectory, Version

log = logging.getLogger("tba.journal")
_MOST_POSITION = 2**63 - 1  # no position is larger
_PATIENCE_SECONDS = 0.1  # seconds that housekeeping may delay the trainer
_RETIRED_ROWS = 20_000  # rows
_LOCK_SECONDS = 0.05  # seconds between two attempts at the lock
_Row: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts what was ever appended, and what retention has deleted of it; tokens are completion tokens."""

    rows: int
    tokens: int
    retired_rows: int
    retired_tokens: int
    positions: int  # of prompts that were handed out by `lease`
    identity: int  # the file's random identifier; 0 where damage has destroyed it
    mark: int = 0  # that of the incarnation that wrote last; 0 where damage has destroyed it, or nobody set it


class JournalFollower(AbstractContextManager["JournalFollower"]):
    """A `TrajectorySource` that remembers its `position` and `score_position` (settable, to resume).

    keep_bytes: while the file holds more, the oldest bodies that have been drained are deleted, up to `needed_from`
    (settable; None: any), and counted (None: all are kept). Only one follower deletes and checkpoints, the first that
    is open; any other just reads. wal_bytes: the write-ahead log is truncated when it is larger than this. on_wait:
    called now and then while others keep the file locked. create: make the file where there is none. file: the file to
    read in the place of `path`, without changing anything.
    """

    def __init__(
        self,
        path: Path,
        position: int = 0,
        keep_bytes: int | None = None,
        wal_bytes: int = 16 << 20,
        deadline_s: float = 30.0,
        on_wait: Callable[[], object] = lambda: None,
        create: bool = True,
        on_damaged: Callable[[str], object] = lambda message: None,
        file: JournalFile | None = None,
    ) -> None:
        self.position = position
        self.score_position = 0
        self.needed_from: int | None = None
        self._keep_bytes = keep_bytes
        self._wal_bytes = wal_bytes
        if file is None:
            self._database = open_journal(path, deadline_s, on_wait, create)
        else:
            self._database = Database(path, deadline_s, on_wait=on_wait, create=False, uri=file.uri)
        self._lock = FileLock(Path(f"{path}-follower")) if file is None else None
        self._prompts_by_digest: dict[int, Prompt] = {}
        self._last_evaluation = 0
        self._missing_counts = MissingCounts()
        self._on_damaged = on_damaged  # called once with each trajectory that is found to be damaged

    def drain(self, limit: int | None = None, until: int | None = None) -> list[Trajectory]:
        """Returns what is new since the last call, oldest first, at most `limit` of it, up to position `until`. Never
        waits.

        What was deleted by retention or cannot be read is passed over, and counted (`take_missing_counts`).
        """
        return [stored.trajectory for stored in self.drain_stored(limit, until)]

    def drain_stored(self, limit: int | None = None, until: int | None = None) -> list[StoredTrajectory]:
        """Returns the trajectories that `drain` would, as bytes, at half the cost."""
        stored: list[StoredTrajectory] = []
        while not stored and (rows := self._next_bodies(limit, until)):
            for seq, uid, prompt, body in rows:
                try:
                    stored.append(StoredTrajectory.read(self._read_prompt(prompt), body, uid)._replace(place=seq))
                except Damaged as error:
                    self._missing_counts += self._drop_body(seq, str(error))
        return stored

    def body(self, place: int) -> bytes:
        """Returns the body at a place that was drained before. Raises `Damaged` when it cannot be read any more."""
        bodies = self._database.rows("SELECT body, uid FROM bodies JOIN trajectories USING (seq) WHERE seq = ?", place)
        if not bodies:
            raise Damaged(f"trajectory {place} is not in {self._database.path} any more")
        try:
            return check_body(*bodies[0])
        except Damaged as error:
            self._drop_body(place, str(error))
            raise

    def take_missing_counts(self) -> MissingCounts:
        """Returns the counts of trajectories that were passed over since the last call."""
        counts, self._missing_counts = self._missing_counts, MissingCounts()
        return counts

    def _next_bodies(self, limit: int | None, until: int | None) -> list[_Row]:
        """Returns (seq, uid, prompt, body) of the next rows, and advances the position past them."""
        self._database.require_file()
        ((last_position,),) = self._database.rows(
            "SELECT coalesce(max(seq), 0) FROM trajectories WHERE seq <= ?", _MOST_POSITION if until is None else until
        )
        if last_position <= self.position:
            return []
        rows: list[_Row] = self._database.rows(
            "SELECT seq, uid, b.prompt, body FROM bodies b JOIN trajectories USING (seq) WHERE seq > ? AND seq <= ? "
            "ORDER BY seq LIMIT ?",
            *(self.position, last_position, -1 if limit is None else limit),
        )
        end_position = rows[-1][0] if len(rows) == limit else last_position
        ((row_count,),) = self._database.rows(
            "SELECT count(*) FROM trajectories WHERE seq > ? AND seq <= ?", self.position, end_position
        )
        if row_count != len(rows):
            missing_counts = self._count_missing(self.position, end_position)
            if missing_counts.damaged_trajectories and self._holds_lock():
                self._report_lost_bodies()
            self._missing_counts += missing_counts
        self.position = end_position
        self._retire_bodies()
        self._truncate_log()
        return rows

    def _count_missing(self, after: int, until: int) -> MissingCounts:
        rows_and_tokens = self._database.rows(
            "SELECT seq <= (SELECT value FROM totals WHERE name = 'retired_until'), count(*), sum(tokens) "
            "FROM trajectories WHERE seq > ? AND seq <= ? AND NOT EXISTS (SELECT 1 FROM bodies b "
            "WHERE b.seq = trajectories.seq) GROUP BY 1",
            *(after, until),
        )
        by_retired = {bool(retired): (rows, tokens) for retired, rows, tokens in rows_and_tokens}
        return MissingCounts(*by_retired.get(True, (0, 0)), *by_retired.get(False, (0, 0)))

    def _drop_body(self, seq: int, reason: str) -> MissingCounts:
        """Delete a body that is not what was written, and keep its facts; returns its counts."""
        ((tokens,),) = self._database.rows("SELECT tokens FROM trajectories WHERE seq = ?", seq)
        self._report(f"trajectory {seq} of {self._database.path} is damaged and left out ({reason})")
        if self._holds_lock():
            with self._database.transaction() as connection:
                connection.execute("DELETE FROM bodies WHERE seq = ?", (seq,))
                connection.execute(LOST_TABLE)
                connection.execute("INSERT OR IGNORE INTO lost VALUES (?)", (seq,))
        return MissingCounts(damaged_trajectories=1, damaged_tokens=tokens)

    def _report_lost_bodies(self) -> None:
        """Report trajectories that have lost their content without a record of it: by SQL, or another program."""
        with self._database.transaction() as connection:
            had_record = has_table(connection, "lost")
            lost_places = record_lost(connection)
            recovery = connection.execute("SELECT 1 FROM recoveries WHERE lost_rows > 0").fetchone()
        # an earlier program that recovered the file reported them, and kept no record
        for seq in () if recovery and not had_record else lost_places:
            self._report(f"trajectory {seq} of {self._database.path} has lost its content and is left out")

    def _report(self, message: str) -> None:
        log.warning("%s", message)
        if self._holds_lock():
            self._on_damaged(message)

    def ask(self, reference: Version, uids: Sequence[str]) -> None:
        """Request that searchers score these trajectories under `reference`, unless they have; requests for another
        reference are dropped.
        """
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM unscored WHERE reference != ?", (str(reference),))
            connection.executemany(
                "INSERT OR IGNORE INTO unscored SELECT seq, ?1, '', 0, 0 FROM trajectories WHERE uid = ?2 "
                "AND NOT EXISTS (SELECT 1 FROM scores WHERE uid = ?2 AND reference = ?1)",
                [(str(reference), uid) for uid in uids],
            )

    def drain_scores(self, limit: int | None = None, until: int | None = None) -> list[Score]:
        """Returns the scores that are new since the last call, in the order given, as `drain` gives trajectories."""
        rows: list[_Row] = self._database.rows(
            "SELECT place, uid, reference, body FROM scores WHERE place > ? AND place <= ? ORDER BY place LIMIT ?",
            *(self.score_position, _MOST_POSITION if until is None else until, -1 if limit is None else limit),
        )
        if rows:
            self.score_position = rows[-1][0]
            self._truncate_log()
        return [Score(uid, Version.parse(reference), decode_logs(body)) for _, uid, reference, body in rows]

    def undrained(self) -> dict[str, int]:
        """Returns how many trajectories, and tokens, come after the position."""
        ((rows, tokens),) = self._database.rows(
            "SELECT count(*), coalesce(sum(tokens), 0) FROM trajectories "
            "WHERE seq > max(?, (SELECT value FROM totals WHERE name = 'retired_until'))",
            self.position,
        )
        return {"trajectories": rows, "tokens": tokens}

    def leases(self) -> list[int]:
        """Returns the prompt positions that are leased and not given back."""
        return [p for (p,) in self._database.rows("SELECT position FROM leases ORDER BY position")]

    def totals(self) -> Totals:
        """Returns the totals of all that was ever appended and deleted."""
        self._database.require_file()
        values = dict(self._database.rows("SELECT name, value FROM totals"))
        return Totals(**{name: values[name] for name in Totals.__slots__ if name in values})

    def recoveries(self) -> list[Recovery]:
        """Returns the recoveries of the journal from damage, oldest first."""
        rows: list[_Row] = self._database.rows(
            "SELECT time, damaged, why, rows, lost_rows, lost_tokens FROM recoveries ORDER BY place"
        )
        return [Recovery(*row) for row in rows]

    def counters(self) -> dict[str, dict[str, int]]:
        """Returns the counts of each owner, by name."""
        counters: dict[str, dict[str, int]] = {}
        for owner, name, value in self._database.rows("SELECT owner, name, value FROM counters"):
            counters.setdefault(owner, {})[name] = value
        return counters

    def evaluations(self) -> list[Evaluation]:
        """Returns the evaluations recorded since the last call, oldest first."""
        rows: list[_Row] = self._database.rows(
            "SELECT seq, version, wall_seconds, metric, value, n, seconds, tokens FROM evaluations "
            "WHERE seq > ? ORDER BY seq",
            self._last_evaluation,
        )
        if rows:
            self._last_evaluation = rows[-1][0]
        return [Evaluation(Version.parse(version), *fields) for _, version, *fields in rows]

    def job_done(self, job: str) -> bool:
        """Returns whether the evaluation job has been finished."""
        return bool(self._database.rows("SELECT 1 FROM jobs WHERE job = ? AND done", job))

    @property
    def wal_size(self) -> int:
        """Returns the bytes of the write-ahead log on disk."""
        return self._database.wal_size

    def checkpoint(self) -> bool:
        """Move the log into the file and truncate it; returns False when another process prevented that (it is retried
        later).
        """
        if not self._holds_lock():
            return False
        with self._database.patience(_PATIENCE_SECONDS):
            return self._database.checkpoint()

    def _truncate_log(self) -> None:
        if self.wal_size > self._wal_bytes:
            self.checkpoint()

    def _retire_bodies(self) -> None:
        """Delete the oldest drained bodies while the file holds too much, an eighth at a time, as each time costs a
        disk flush.

        Their facts stay, so that a reader that starts from the beginning can count them.
        """
        if self._keep_bytes is None or not self._holds_lock():
            return
        (((pages,),), ((free_pages,),), ((size,),)) = (
            self._database.rows(f"PRAGMA {name}") for name in ("page_count", "freelist_count", "page_size")
        )
        excess = (pages - free_pages) * size - self._keep_bytes
        if excess <= 0:
            return
        last_place, freed_bytes = 0, 0
        last_position = self.position if self.needed_from is None else min(self.position, self.needed_from - 1)
        for seq, body in self._database.rows(
            "SELECT seq, length(body) FROM bodies WHERE seq <= ? ORDER BY seq LIMIT ?", last_position, _RETIRED_ROWS
        ):
            last_place, freed_bytes = seq, freed_bytes + body
            if freed_bytes >= excess + self._keep_bytes // 8:
                break
        if last_place:
            self._delete_bodies(last_place)

    def _delete_bodies(self, last_place: int) -> None:
        with (
            suppress(DeadlineExceeded),  # retried at the next drain
            self._database.patience(_PATIENCE_SECONDS),
            self._database.transaction() as connection,
        ):
            rows, tokens = connection.execute(
                "SELECT count(*), coalesce(sum(tokens), 0) FROM bodies WHERE seq <= ?", (last_place,)
            ).fetchone()
            connection.execute("DELETE FROM bodies WHERE seq <= ?", (last_place,))
            add_to_totals(connection, {"retired_rows": rows, "retired_tokens": tokens})
            set_totals(connection, {"retired_until": last_place})

    def _read_prompt(self, digest: int) -> Prompt:
        """Returns one object for each prompt, however many trajectories it has. Raises `Damaged` when it cannot be
        read.
        """
        prompt = self._prompts_by_digest.get(digest)
        if prompt is None:
            bodies = self._database.rows("SELECT body FROM prompts WHERE id = ?", digest)
            if not bodies or prompt_id(body := bodies[0][0]) != digest:
                raise Damaged("its prompt is missing or damaged")
            if len(self._prompts_by_digest) >= 1 << 16:
                self._prompts_by_digest.clear()
            prompt = self._prompts_by_digest[digest] = decode_prompt(body)
        return prompt

    def lead(self, seconds: float) -> None:
        """Become the one follower that checkpoints and deletes. Raises `UserError` when another is it for `seconds`."""
        deadline = time.monotonic() + seconds
        while not self._holds_lock():
            if time.monotonic() > deadline:
                raise UserError(
                    f"another trainer uses {self._database.path}: let it end, or end it, before this run is continued"
                )
            time.sleep(_LOCK_SECONDS)

    def _holds_lock(self) -> bool:
        return self._lock is not None and self._lock.take(fcntl.LOCK_EX)

    def close(self) -> None:
        """Truncate the log if no other process prevents it, and close. Rows stay."""
        try:
            self.checkpoint()  # may fail, on a full disk
        finally:
            self._database.close()
            if self._lock is not None:
                self._lock.close()

    def __exit__(self, *failure: object) -> None:
        self.close()
