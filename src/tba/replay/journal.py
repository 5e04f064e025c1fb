"""The journal: where searchers and trainer meet on disk. Many writers, one follower.

Invariant: what was acknowledged is on disk in full (synchronous = FULL) and is seen by the follower exactly once, in
the order of acknowledgement; what was not acknowledged left no trace. Exactly one connection checkpoints the
write-ahead log: that of the follower that holds the lock beside the file. (SQLite also does it for whoever closes the
file last, when nobody else has it open.) The follower holds no read transaction between calls.

Prompts are leased here by position (0, 1, 2, ...) and their outcomes told, evaluation jobs are claimed here, and
trajectories are scored under later references here (`scores`). Each owner's counts are kept here, in the transaction of
what they count.
"""

from __future__ import annotations

import fcntl
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeAlias, TypeVar

from tba.errors import DeadlineExceeded, UserError
from tba.replay import scores
from tba.replay.codec import Damaged, Stored, decode_prompt, decode_trajectory
from tba.replay.database import Database
from tba.replay.encoded import Encoded, Row, decoded, encoded
from tba.replay.filesystem import network_filesystem
from tba.replay.gone import Gone
from tba.replay.recovery import Recovery, look_over
from tba.replay.schema import JOURNAL, bodies_into, facts_into, keep_prompts, prompt_id
from tba.replay.scores import Score
from tba.types import Evaluation, Prompt, Trajectory, Version

log = logging.getLogger("tba.journal")
_LAST = 2**63 - 1  # no position is larger
_PATIENCE = 0.1  # seconds that housekeeping may keep the trainer
_AT_ONCE = 500  # parameters of one query, of which SQLite allows 999 where it is old
_PUT_AT_ONCE = 100  # rows of 8 parameters
_RETIRED_AT_ONCE = 20_000  # rows
T = TypeVar("T")
_Row: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """What was ever appended, and what retention has deleted of it; tokens are completion tokens."""

    rows: int
    tokens: int
    retired_rows: int
    retired_tokens: int


class JournalWriter:
    """A writing end. Any number of them, in any process; one may be shared by the threads of a process.

    `owner` names who writes: its counts are kept under this name. Raises `UserError` on a network filesystem,
    `DeadlineExceeded` when other writers keep the file locked for `deadline_s` seconds; `waiting` is called now and
    then while they do.
    """

    def __init__(
        self,
        path: Path,
        owner: str,
        deadline_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        waiting: Callable[[], object] = lambda: None,
    ) -> None:
        self.owner = owner
        self._clock = clock
        self._database = _open(path, deadline_s, waiting)

    def put(
        self,
        trajectories: Sequence[Trajectory],
        leases: Sequence[int] = (),
        counters: Mapping[str, int] | None = None,
        outcomes: Sequence[tuple[int, float, float]] = (),
    ) -> None:
        """One transaction: append the trajectories, give the leases back as done, add the counters and the outcomes
        (position, successes, failures) of what was leased.

        A repeated call changes nothing: a uid that is there already is ignored, and when all of them are, so are the
        counters and outcomes. Raises `ValueError` for arrays that do not fit their completion.
        """
        self.put_encoded(encoded(trajectories), leases, counters, outcomes)

    def put_encoded(
        self,
        given: Encoded,
        leases: Sequence[int] = (),
        counters: Mapping[str, int] | None = None,
        outcomes: Sequence[tuple[int, float, float]] = (),
    ) -> None:
        """The same of what was encoded elsewhere."""
        rows = given.rows
        with self._database.transaction() as connection:
            keep_prompts(connection, given.prompts.items())
            parts = [rows[i : i + _PUT_AT_ONCE] for i in range(0, len(rows), _PUT_AT_ONCE)]
            tokens = [row.tokens for part in parts for row in self._append(connection, part)]
            connection.executemany(
                "DELETE FROM leases WHERE position = ? AND owner = ?", [(position, self.owner) for position in leases]
            )
            _add(connection, {"rows": len(tokens), "tokens": sum(tokens)})
            if tokens or not rows:
                self._count(connection, counters or {})
                connection.executemany(
                    "INSERT INTO outcomes (position, successes, failures) VALUES (?, ?, ?)", outcomes
                )

    def known(self, uids: Sequence[str]) -> set[str]:
        """Which of these were ever put, also those that retention has deleted since."""
        found: set[str] = set()
        for first in range(0, len(uids), _AT_ONCE):
            some = uids[first : first + _AT_ONCE]
            marks = ",".join("?" * len(some))
            query = f"SELECT uid FROM trajectories WHERE uid IN ({marks})"  # noqa: S608 - question marks
            found.update(uid for (uid,) in self._database.rows(query, *some))
        return found

    def rows(self) -> int:
        """How many trajectories were ever appended, by anybody."""
        ((rows,),) = self._database.rows("SELECT value FROM totals WHERE name = 'rows'")
        return int(rows)

    def lease(self, count: int, seconds: float) -> list[int]:
        """`count` prompt positions for the next `seconds`: first those whose lease ran out, then new ones.

        A position that is leased and has not run out is never handed out again.
        """
        with self._database.transaction() as connection:
            now = self._now(connection, "leases")
            expired = connection.execute(
                "SELECT position FROM leases WHERE issued + seconds <= ? ORDER BY position LIMIT ?", (now, count)
            ).fetchall()
            positions = [row[0] for row in expired]
            (next_new,) = connection.execute("SELECT value FROM totals WHERE name = 'positions'").fetchone()
            new = count - len(positions)
            positions.extend(range(next_new, next_new + new))
            _add(connection, {"positions": new})
            connection.executemany(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", [(p, self.owner, now, seconds) for p in positions]
            )
        return positions

    def lease_first(self, order: Iterable[int], count: int, seconds: float) -> list[int]:
        """The first `count` positions in `order` that nobody holds, for the next `seconds`; fewer when all are held.

        Positions may be leased again once given back: they are the prompts' own. Not to be mixed with `lease`.
        """
        with self._database.transaction() as connection:
            now = self._now(connection, "leases")
            live = connection.execute("SELECT position FROM leases WHERE issued + seconds > ?", (now,))
            held = {position for (position,) in live}
            positions = list(islice((p for p in order if p not in held), count))
            connection.executemany(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", [(p, self.owner, now, seconds) for p in positions]
            )
        return positions

    def outcomes(self, after: int) -> list[tuple[int, int, float, float]]:
        """(number, position, successes, failures) of all outcomes numbered above `after`, in the order of putting."""
        return self._database.rows(
            "SELECT seq, position, successes, failures FROM outcomes WHERE seq > ? ORDER BY seq", after
        )

    def unscored(self, reference: Version, count: int, seconds: float) -> list[Trajectory]:
        """Up to `count` trajectories whose score under `reference` is asked for, newest first, for the next `seconds`.

        One that is handed out and has not run out is not handed out again.
        """
        return decoded(self.unscored_encoded(reference, count, seconds))

    def unscored_encoded(self, reference: Version, count: int, seconds: float) -> Encoded:
        """The same, to be decoded elsewhere."""
        if not self._database.rows(scores.UNSCORED, str(reference)):
            return Encoded({}, ())  # nearly always, and without the write lock
        with self._database.transaction() as connection:
            now = self._now(connection, "unscored")
            rows = scores.lease(connection, reference, count, self.owner, now, seconds)
        ids = {prompt for prompt, _, _ in rows}
        prompts = {i: self._database.rows("SELECT body FROM prompts WHERE id = ?", i)[0][0] for i in ids}
        return Encoded(prompts, [Row.of_body(prompt, body) for prompt, _, body in rows])

    def put_scores(self, scored: Sequence[Score], counters: Mapping[str, int] | None = None) -> None:
        """One transaction: the scores, which are then not asked for any longer, and the counters.

        A repeated call changes nothing: a score that is there already is ignored; when all are, so are the counters.
        """
        with self._database.transaction() as connection:
            if scores.put(connection, scored) and counters:
                self._count(connection, counters)

    def count(self, **increments: int) -> None:
        """Add to this owner's counts."""
        with self._database.transaction() as connection:
            self._count(connection, increments)

    def claim(self, job: str, seconds: float) -> bool:
        """True for exactly one claimant, whose the job then is until it is done or `seconds` are over."""
        with self._database.transaction() as connection:
            now = self._now(connection, "jobs")
            claimed = connection.execute(
                "INSERT INTO jobs VALUES (?1, ?2, ?3, ?4, 0) ON CONFLICT (job) DO UPDATE "
                "SET owner = ?2, issued = ?3, seconds = ?4 WHERE NOT done AND issued + seconds <= ?3",
                (job, self.owner, now, seconds),
            )
            return claimed.rowcount == 1

    def finish(self, job: str, evaluations: Sequence[Evaluation]) -> None:
        """The job is done, with its results; those of a job that somebody else has finished are ignored."""
        with self._database.transaction() as connection:
            finished = connection.execute(
                "INSERT INTO jobs VALUES (?1, ?2, ?3, 0, 1) ON CONFLICT (job) DO UPDATE "
                "SET owner = ?2, done = 1 WHERE NOT done",
                (job, self.owner, self._clock()),
            )
            if finished.rowcount == 1:
                connection.executemany(
                    "INSERT INTO evaluations (job, version, wall_seconds, metric, value, n, seconds, tokens) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    [
                        (job, str(e.version), e.wall_seconds, e.metric, e.value, e.n, e.seconds, e.tokens)
                        for e in evaluations
                    ],
                )

    def resume(self) -> None:
        """Whoever had this owner's name before is dead: what it held (prompts, unfinished jobs, what it was to score)
        runs out now.
        """
        with self._database.transaction() as connection:
            connection.execute("UPDATE leases SET seconds = 0 WHERE owner = ?", (self.owner,))
            connection.execute("UPDATE jobs SET seconds = 0 WHERE owner = ? AND NOT done", (self.owner,))
            connection.execute("UPDATE unscored SET seconds = 0 WHERE owner = ?", (self.owner,))

    def _append(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> Sequence[Row]:
        """Those that were new. Uids outlive bodies, so a repeat is known after retention.

        All in one statement, which is twice as fast as one by one, unless some of them are there already.
        """
        facts: list[object] = []
        for uid, prompt, tokens, incarnation, step, reward, created, _ in rows:
            facts += (uid, self.owner, prompt, tokens, incarnation, step, reward, created)
        try:
            last = connection.execute(facts_into(len(rows)), facts).lastrowid
        except sqlite3.IntegrityError as error:  # not OR IGNORE, which would use up a number
            if error.sqlite_errorcode != sqlite3.SQLITE_CONSTRAINT_UNIQUE:
                raise
            return [] if len(rows) == 1 else [new for row in rows for new in self._append(connection, [row])]
        assert last is not None
        bodies: list[object] = []
        for seq, row in enumerate(rows, start=last - len(rows) + 1):
            bodies += (seq, row.prompt, row.tokens, row.body)
        connection.execute(bodies_into(len(rows)), bodies)
        return rows

    def _count(self, connection: sqlite3.Connection, increments: Mapping[str, int]) -> None:
        connection.executemany(
            "INSERT INTO counters VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
            [(self.owner, name, int(increment)) for name, increment in increments.items()],
        )

    def _now(self, connection: sqlite3.Connection, table: str) -> float:
        """The time, by a clock that all processes of a machine share and nobody sets. It begins again when the machine
        does: what seems to have been issued in the future counts as issued now, and runs out after its own length at
        the latest.
        """
        now = self._clock()
        connection.execute(f"UPDATE {table} SET issued = ?1 WHERE issued > ?1", (now,))  # noqa: S608 - our own names
        return now

    def close(self) -> None:
        """No more writing; leases that were not given back run out."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JournalFollower:
    """The reading end: a `TrajectorySource` that remembers its `position` and `score_position` (settable, to resume).

    keep_bytes: while the file holds more, the oldest bodies that have been drained are deleted, and counted (None: all
    are kept). Deleting and checkpointing are done by one follower only, the first that is open; any other just reads.
    wal_bytes: the write-ahead log is truncated when it is larger than this.
    waiting: called now and then while others keep the file locked.
    """

    def __init__(
        self,
        path: Path,
        position: int = 0,
        keep_bytes: int | None = None,
        wal_bytes: int = 16 << 20,
        deadline_s: float = 30.0,
        waiting: Callable[[], object] = lambda: None,
    ) -> None:
        self.position = position
        self.score_position = 0
        self._keep_bytes = keep_bytes
        self._wal_bytes = wal_bytes
        self._database = _open(path, deadline_s, waiting)
        self._lock_path = Path(f"{path}-follower")
        self._lock: IO[str] | None = None
        self._prompts: dict[int, Prompt] = {}
        self._evaluation = 0
        self._gone = Gone()

    def drain(self, limit: int | None = None, until: int | None = None) -> list[Trajectory]:
        """What is new since the last call, oldest first, at most `limit` of it, up to position `until`. Never waits.

        What has been retired or cannot be read is passed over: `take_gone` tells how much that was.
        """
        return self._drained(decode_trajectory, limit, until)

    def drain_stored(self, limit: int | None = None, until: int | None = None) -> list[Stored]:
        """The same as bytes, at less than half the cost."""
        return self._drained(lambda body, prompt: Stored.read(prompt, body), limit, until)

    def _drained(self, read: Callable[[bytes, Prompt], T], limit: int | None, until: int | None) -> list[T]:
        found: list[T] = []
        while not found and (rows := self._bodies(limit, until)):
            for seq, prompt, body in rows:
                try:
                    found.append(read(body, self._prompt(prompt)))
                except Damaged as error:
                    self._gone += self._give_up(seq, str(error))
        return found

    def take_gone(self) -> Gone:
        """What was passed over since last asked."""
        gone, self._gone = self._gone, Gone()
        return gone

    def _bodies(self, limit: int | None, until: int | None) -> list[_Row]:
        """(seq, prompt, body) of what is next, and the position after it."""
        ((last,),) = self._database.rows(
            "SELECT coalesce(max(seq), 0) FROM trajectories WHERE seq <= ?", _LAST if until is None else until
        )
        if last <= self.position:
            return []
        rows: list[_Row] = self._database.rows(
            "SELECT seq, prompt, body FROM bodies WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?",
            *(self.position, last, -1 if limit is None else limit),
        )
        end = rows[-1][0] if len(rows) == limit else last
        ((known,),) = self._database.rows(
            "SELECT count(*) FROM trajectories WHERE seq > ? AND seq <= ?", self.position, end
        )
        if known != len(rows):
            self._gone += self._without_body(self.position, end)
        self.position = end
        self._retire()
        self._truncate()
        return rows

    def _without_body(self, after: int, until: int) -> Gone:
        found = self._database.rows(
            "SELECT seq <= (SELECT value FROM totals WHERE name = 'retired_until'), count(*), sum(tokens) "
            "FROM trajectories WHERE seq > ? AND seq <= ? AND NOT EXISTS (SELECT 1 FROM bodies b "
            "WHERE b.seq = trajectories.seq) GROUP BY 1",
            *(after, until),
        )
        amounts = {bool(retired): (rows, tokens) for retired, rows, tokens in found}
        return Gone(*amounts.get(True, (0, 0)), *amounts.get(False, (0, 0)))

    def _give_up(self, seq: int, why: str) -> Gone:
        """A body that is not what was written is deleted; its facts stay."""
        ((tokens,),) = self._database.rows("SELECT tokens FROM trajectories WHERE seq = ?", seq)
        log.warning("trajectory %d of %s is damaged and left out (%s)", seq, self._database.path, why)
        if self._holds_lock():
            with self._database.transaction() as connection:
                connection.execute("DELETE FROM bodies WHERE seq = ?", (seq,))
        return Gone(damaged_trajectories=1, damaged_tokens=tokens)

    def ask(self, reference: Version, uids: Sequence[str]) -> None:
        """Have searchers score these trajectories under `reference`; what was asked under another is forgotten."""
        with self._database.transaction() as connection:
            scores.ask(connection, reference, uids)

    def drain_scores(self, limit: int | None = None, until: int | None = None) -> list[Score]:
        """The scores that are new since the last call, in the order given, as `drain` gives trajectories."""
        rows: list[_Row] = self._database.rows(
            scores.SCORES, self.score_position, _LAST if until is None else until, -1 if limit is None else limit
        )
        if rows:
            self.score_position = rows[-1][0]
            self._truncate()
        return [Score.of_row(*row) for _, *row in rows]

    def undrained(self) -> dict[str, int]:
        """{"trajectories", "tokens"} after the position."""
        ((rows, tokens),) = self._database.rows(
            "SELECT count(*), coalesce(sum(tokens), 0) FROM trajectories "
            "WHERE seq > max(?, (SELECT value FROM totals WHERE name = 'retired_until'))",
            self.position,
        )
        return {"trajectories": rows, "tokens": tokens}

    def leases(self) -> tuple[int, list[int]]:
        """The first position that was never handed out by `lease`, and all that are handed out and not given back."""
        ((first,),) = self._database.rows("SELECT value FROM totals WHERE name = 'positions'")
        return first, [p for (p,) in self._database.rows("SELECT position FROM leases ORDER BY position")]

    def totals(self) -> Totals:
        """What was ever appended and deleted."""
        values = dict(
            self._database.rows("SELECT name, value FROM totals WHERE name NOT IN ('positions', 'retired_until')")
        )
        return Totals(**values)

    def recoveries(self) -> list[Recovery]:
        """Each time that a damaged file was set aside, the first first."""
        rows: list[_Row] = self._database.rows(
            "SELECT time, damaged, why, rows, lost_rows, lost_tokens FROM recoveries ORDER BY place"
        )
        return [Recovery(*row) for row in rows]

    def counters(self) -> dict[str, dict[str, int]]:
        """Each owner's counts."""
        counters: dict[str, dict[str, int]] = {}
        for owner, name, value in self._database.rows("SELECT owner, name, value FROM counters"):
            counters.setdefault(owner, {})[name] = value
        return counters

    def evaluations(self) -> list[Evaluation]:
        """Those recorded since last asked, oldest first."""
        rows: list[_Row] = self._database.rows(
            "SELECT seq, version, wall_seconds, metric, value, n, seconds, tokens FROM evaluations "
            "WHERE seq > ? ORDER BY seq",
            self._evaluation,
        )
        if rows:
            self._evaluation = rows[-1][0]
        return [Evaluation(Version.parse(version), *rest) for _, version, *rest in rows]

    def job_done(self, job: str) -> bool:
        """Whether the evaluation job has been finished."""
        return bool(self._database.rows("SELECT 1 FROM jobs WHERE job = ? AND done", job))

    def jobs_done(self) -> set[str]:
        """The evaluation jobs that have been finished."""
        return {job for (job,) in self._database.rows("SELECT job FROM jobs WHERE done")}

    @property
    def wal_size(self) -> int:
        """Bytes of the write-ahead log on disk."""
        return self._database.wal_size

    def checkpoint(self) -> bool:
        """Move the log into the file and truncate it; False when somebody was in the way (it is tried again later)."""
        if not self._holds_lock():
            return False
        with self._database.patience(_PATIENCE):
            return self._database.checkpoint()

    def _truncate(self) -> None:
        if self.wal_size > self._wal_bytes:
            self.checkpoint()

    def _retire(self) -> None:
        """Delete the oldest drained bodies while the file holds too much, an eighth at a time: each time costs a disk
        flush. Their facts stay, so that whoever takes in again what was written knows that they are gone.
        """
        if self._keep_bytes is None or not self._holds_lock():
            return
        (((pages,),), ((free,),), ((size,),)) = (
            self._database.rows(f"PRAGMA {name}") for name in ("page_count", "freelist_count", "page_size")
        )
        excess = (pages - free) * size - self._keep_bytes
        if excess <= 0:
            return
        last, freed = 0, 0
        for seq, body in self._database.rows(
            "SELECT seq, length(body) FROM bodies WHERE seq <= ? ORDER BY seq LIMIT ?", self.position, _RETIRED_AT_ONCE
        ):
            last, freed = seq, freed + body
            if freed >= excess + self._keep_bytes // 8:
                break
        if last:
            self._delete_bodies(last)

    def _delete_bodies(self, last: int) -> None:
        with (
            suppress(DeadlineExceeded),  # tried again at the next drain
            self._database.patience(_PATIENCE),
            self._database.transaction() as connection,
        ):
            rows, tokens = connection.execute(
                "SELECT count(*), coalesce(sum(tokens), 0) FROM bodies WHERE seq <= ?", (last,)
            ).fetchone()
            connection.execute("DELETE FROM bodies WHERE seq <= ?", (last,))
            _add(connection, {"retired_rows": rows, "retired_tokens": tokens})
            connection.execute("UPDATE totals SET value = max(value, ?) WHERE name = 'retired_until'", (last,))

    def _prompt(self, content_id: int) -> Prompt:
        """One object for each prompt, however many trajectories it has. Raises `Damaged` when it cannot be read."""
        prompt = self._prompts.get(content_id)
        if prompt is None:
            bodies = self._database.rows("SELECT body FROM prompts WHERE id = ?", content_id)
            if not bodies or prompt_id(body := bodies[0][0]) != content_id:
                raise Damaged("its prompt is missing or not what was written")
            if len(self._prompts) >= 1 << 16:
                self._prompts.clear()
            prompt = self._prompts[content_id] = decode_prompt(body)
        return prompt

    def _holds_lock(self) -> bool:
        if self._lock is None:
            lock = self._lock_path.open("a")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._lock = lock
        return True

    def close(self) -> None:
        """Truncates the log if nobody is in the way, and closes. Rows stay."""
        try:
            self.checkpoint()  # may fail, on a full disk
        finally:
            self._database.close()
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(path: Path, deadline_s: float, waiting: Callable[[], object]) -> Database:
    kind = network_filesystem(Path(path).absolute().parent)
    if kind is not None:
        raise UserError(
            f"the journal {path} would lie on a network filesystem ({kind}), where SQLite loses data: "
            f"give a folder on a local disk with --run.journal-dir"
        )
    lock = look_over(path)
    try:
        return Database(path, JOURNAL, deadline_s, lock, waiting)
    except BaseException:
        lock.close()
        raise


def _add(connection: sqlite3.Connection, increments: Mapping[str, int]) -> None:
    connection.executemany(
        "UPDATE totals SET value = value + ? WHERE name = ?", [(by, name) for name, by in increments.items()]
    )
