"""The writer of the journal, the file through which searchers send trajectories to the trainer. Any number may write.

Invariant: what was acknowledged is on disk in full (synchronous = FULL) and is seen by the follower (`follower.py`)
exactly once, in the order of acknowledgement; what was not acknowledged left no trace.

Prompts are leased here by position (0, 1, 2, ...) and their outcomes recorded, evaluation jobs are claimed here, and
trajectories are scored under later references here. Each owner's counts are kept here, in the transaction of
what they count.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from tba.replay.codec import (
    Damaged,
    EncodedTrajectories,
    TrajectoryRow,
    decode_prompt,
    decode_trajectory,
    encode_logs,
    encode_trajectories,
)
from tba.replay.database import acknowledged_folder
from tba.replay.recovery import open_journal
from tba.replay.schema import AMOUNTS_QUERY, ROWS_QUERY, STAGED_TABLE, add_to_totals, has_table, keep_prompts
from tba.types import LEFT_OUT, Evaluation, Outcome, Score, Trajectory, Version

_QUERY_PARAMETERS = 500  # parameters of one query, of which old versions of SQLite allow 999
_PUT_ROWS = 100  # rows of 8 parameters
_INSERT_FACTS = "INSERT INTO trajectories (uid, owner, prompt, tokens, incarnation, step, reward, created) VALUES "


class JournalWriter(AbstractContextManager["JournalWriter"]):
    """Writes to the journal: the `Journal` on its own disk. Any number may, in any process; threads may share one.

    `owner` names who writes: its counts are kept under this name. Raises `UserError` on a network filesystem,
    `DeadlineExceeded` when other writers keep the file locked for `deadline_s` seconds; `on_wait` is called now and
    then while they do. create: make the file where there is none; a part of a run does not, since the run has made it.
    """

    def __init__(
        self,
        path: Path,
        owner: str,
        deadline_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        on_wait: Callable[[], object] = lambda: None,
        create: bool = True,
    ) -> None:
        self.owner = owner
        self._clock = clock
        self._has_scored = False
        self._database = open_journal(path, deadline_s, on_wait, create)
        self._acknowledged_file = -1  # the open file that says how many rows there were at the last `put`

    def put(
        self,
        trajectories: Sequence[Trajectory] | EncodedTrajectories,
        leases: Sequence[int] = (),
        counters: Mapping[str, int] | None = None,
        outcomes: Sequence[Outcome] = (),
        staged: Sequence[Trajectory] | EncodedTrajectories = (),
        positions: Sequence[int] = (),
        samples: int = 0,
    ) -> None:
        """Append the trajectories (possibly encoded already, on another machine), give the leases back as done, and add
        the counters and the outcomes of what was leased, in one transaction.

        staged: graded answers to prompts whose other answers are not graded yet. A later `put` with the same names
        takes them over, and `resume` puts those that nobody has taken over. positions: the leased position of each of
        these. samples: answers that a group has.

        A repeated call changes nothing: a uid that is there already is ignored, and when all of them are, so are the
        counters and outcomes. Raises `ValueError` for arrays that do not fit their completion.
        """
        rows, staged_rows = encode_trajectories(trajectories), encode_trajectories(staged)
        with self._database.transaction() as connection:
            keep_prompts(connection, [*rows.prompts.items(), *staged_rows.prompts.items()])
            tokens = self._append_all(connection, rows.rows)
            connection.executemany(
                "DELETE FROM leases WHERE position = ? AND owner = ?", [(position, self.owner) for position in leases]
            )
            new_count = len(tokens) + self._stage(connection, staged_rows.rows, positions, samples)
            if has_table(connection, "staged"):
                connection.executemany("DELETE FROM staged WHERE uid = ?", [(row.uid,) for row in rows.rows])
            if new_count or not (rows.rows or staged_rows.rows):
                self._count(connection, counters or {})
                connection.executemany("INSERT INTO outcomes (position, successes, failures) VALUES (?,?,?)", outcomes)
            totals = connection.execute(AMOUNTS_QUERY).fetchone()
        self._write_acknowledged(*totals)

    def _write_acknowledged(self, rows: int, tokens: int) -> None:
        """Write beside the journal how much was put into it, so that a loss is known even where the journal is gone."""
        try:
            if self._acknowledged_file < 0:
                path = acknowledged_folder(self._database.path) / quote(self.owner, safe="")
                path.parent.mkdir(exist_ok=True)
                self._acknowledged_file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.pwrite(self._acknowledged_file, b"%20d %20d\n" % (rows, tokens), 0)
        except OSError:  # a full disk: what was put is on it
            return

    def _stage(
        self, connection: sqlite3.Connection, rows: Sequence[TrajectoryRow], positions: Sequence[int], samples: int
    ) -> int:
        """Store graded answers of incomplete groups; returns how many were new."""
        if not rows:
            return 0
        connection.execute(STAGED_TABLE)
        new_count = 0
        for row, position in zip(rows, positions, strict=True):
            if connection.execute("SELECT 1 FROM trajectories WHERE uid = ?", (row.uid,)).fetchone() is None:
                new_count += connection.execute(
                    "INSERT OR IGNORE INTO staged VALUES (?, ?, ?, ?, ?, ?)",
                    (row.uid, self.owner, position, samples, row.prompt, row.body),
                ).rowcount
        return new_count

    def known(self, uids: Sequence[str]) -> set[str]:
        """Returns those of `uids` that were ever put, also the ones that retention has deleted since."""
        stored_uids: set[str] = set()
        for start in range(0, len(uids), _QUERY_PARAMETERS):
            queried_uids = uids[start : start + _QUERY_PARAMETERS]
            marks = ",".join("?" * len(queried_uids))
            query = f"SELECT uid FROM trajectories WHERE uid IN ({marks})"  # noqa: S608 - question marks
            stored_uids.update(uid for (uid,) in self._database.rows(query, *queried_uids))
        return stored_uids

    def rows(self) -> int:
        """Returns how many trajectories were ever appended, by all writers."""
        ((rows,),) = self._database.rows(ROWS_QUERY)
        return int(rows)

    def lease(self, count: int, seconds: float) -> list[int]:
        """Returns `count` prompt positions for the next `seconds`: first those whose lease ran out, then new ones.

        A position that is leased and has not run out is never handed out again.
        """
        with self._database.transaction() as connection:
            now = self._now(connection, "leases")
            expired_rows = connection.execute(
                "SELECT position FROM leases WHERE issued + seconds <= ? ORDER BY position LIMIT ?", (now, count)
            ).fetchall()
            positions = [row[0] for row in expired_rows]
            (next_position,) = connection.execute("SELECT value FROM totals WHERE name = 'positions'").fetchone()
            new_count = count - len(positions)
            positions.extend(range(next_position, next_position + new_count))
            add_to_totals(connection, {"positions": new_count})
            connection.executemany(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", [(p, self.owner, now, seconds) for p in positions]
            )
        return positions

    def lease_first(self, order: Iterable[int], count: int, seconds: float) -> list[int]:
        """Returns the first `count` positions in `order` that nobody holds, for the next `seconds`; fewer when all are
        held.

        Positions may be leased again once given back: they are the prompts' own. Not to be mixed with `lease`.
        """
        with self._database.transaction() as connection:
            now = self._now(connection, "leases")
            live_leases = connection.execute("SELECT position FROM leases WHERE issued + seconds > ?", (now,))
            leased_positions = {position for (position,) in live_leases}
            positions = list(islice((p for p in order if p not in leased_positions), count))
            connection.executemany(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", [(p, self.owner, now, seconds) for p in positions]
            )
        return positions

    def outcomes(self, after: int) -> list[tuple[int, int, float, float]]:
        """Returns (number, position, successes, failures) of all outcomes numbered above `after`, in the order of
        putting.
        """
        return self._database.rows(
            "SELECT seq, position, successes, failures FROM outcomes WHERE seq > ? ORDER BY seq", after
        )

    def unscored(self, reference: Version, count: int, seconds: float) -> list[Trajectory]:
        """Returns up to `count` trajectories whose score under `reference` is requested, newest first, for the next
        `seconds`.

        One that is handed out and has not run out is not handed out again.
        """
        if not self._database.rows("SELECT 1 FROM unscored WHERE reference = ? LIMIT 1", str(reference)):
            return []  # nearly always, and without the write lock
        with self._database.transaction() as connection:
            # The clock of `issued` restarts only with the machine, and then so does this process: adjusting the
            # (possibly many) rows once is enough.
            now = self._clock() if self._has_scored else self._now(connection, "unscored")
            self._has_scored = True
            rows = connection.execute(
                "SELECT prompt, seq, bodies.body FROM unscored JOIN bodies USING (seq) "
                "WHERE reference = ? AND issued + seconds <= ? ORDER BY seq DESC LIMIT ?",
                (str(reference), now, count),
            ).fetchall()
            connection.executemany(
                "UPDATE unscored SET owner = ?, issued = ?, seconds = ? WHERE seq = ?",
                [(self.owner, now, seconds, seq) for _, seq, _ in rows],
            )
        bodies = {i: self._database.rows("SELECT body FROM prompts WHERE id = ?", i) for i in {row[0] for row in rows}}
        prompts = {i: decode_prompt(body) for i, ((body,),) in bodies.items()}
        return [decode_trajectory(body, prompts[prompt]) for prompt, _, body in rows]

    def put_scores(self, scored: Sequence[Score], counters: Mapping[str, int] | None = None) -> None:
        """Write the scores, whose requests are thereby done, and add the counters, in one transaction.

        A repeated call changes nothing: a score that is there already is ignored; when all are, so are the counters.
        """
        with self._database.transaction() as connection:
            new_count = 0
            for score in scored:
                new_count += connection.execute(
                    "INSERT OR IGNORE INTO scores (uid, reference, body) VALUES (?, ?, ?)",
                    (score.uid, str(score.reference), encode_logs(score.log_reference)),
                ).rowcount
                connection.execute(
                    "DELETE FROM unscored WHERE reference = ? AND seq = (SELECT seq FROM trajectories WHERE uid = ?)",
                    (str(score.reference), score.uid),
                )
            if new_count and counters:
                self._count(connection, counters)

    def count(self, **increments: int) -> None:
        """Add to this owner's counts."""
        with self._database.transaction() as connection:
            self._count(connection, increments)

    def claim(self, job: str, seconds: float) -> bool:
        """Returns True for exactly one claimant, which then has the job until it is done or `seconds` are over."""
        with self._database.transaction() as connection:
            now = self._now(connection, "jobs", "AND job = ?2", job)  # only this one of all jobs that were ever done
            cursor = connection.execute(
                "INSERT INTO jobs VALUES (?1, ?2, ?3, ?4, 0) ON CONFLICT (job) DO UPDATE "
                "SET owner = ?2, issued = ?3, seconds = ?4 WHERE NOT done AND issued + seconds <= ?3",
                (job, self.owner, now, seconds),
            )
            return cursor.rowcount == 1

    def finish(self, job: str, evaluations: Sequence[Evaluation]) -> None:
        """Record that the job is done, with its results.

        Those of a job that another claimant has finished are ignored.
        """
        with self._database.transaction() as connection:
            cursor = connection.execute(
                "INSERT INTO jobs VALUES (?1, ?2, ?3, 0, 1) ON CONFLICT (job) DO UPDATE "
                "SET owner = ?2, done = 1 WHERE NOT done",
                (job, self.owner, self._clock()),
            )
            if cursor.rowcount == 1:
                connection.executemany(
                    "INSERT INTO evaluations (job, version, wall_seconds, metric, value, n, seconds, tokens) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    [
                        (job, str(e.version), e.wall_seconds, e.metric, e.value, e.n, e.seconds, e.tokens)
                        for e in evaluations
                    ],
                )

    def resume(self) -> None:
        """Expire the leases of an earlier process under this owner's name: of prompts, jobs and trajectories to score.
        Put the answers that it has staged, and count those that were being graded as in flight.

        A group that is put so is marked as having left something out: what it lacks took longest to grade.
        """
        with self._database.transaction() as connection:
            connection.execute("UPDATE leases SET seconds = 0 WHERE owner = ?", (self.owner,))
            connection.execute("UPDATE jobs SET seconds = 0 WHERE owner = ? AND NOT done", (self.owner,))
            connection.execute("UPDATE unscored SET seconds = 0 WHERE owner = ?", (self.owner,))
            self._put_staged(connection)
            for unit in ("trajectories", "tokens"):
                self._move_grading_to_in_flight(connection, unit)

    def _put_staged(self, connection: sqlite3.Connection) -> None:
        """Append the answers that this owner has staged; each is marked with the number that its group lacks."""
        if not has_table(connection, "staged"):
            return
        groups: dict[int, list[Trajectory]] = {}
        samples: dict[int, int] = {}
        query = (
            "SELECT position, samples, prompts.body, staged.body FROM staged JOIN prompts ON prompts.id = prompt "
            "WHERE owner = ? ORDER BY staged.rowid"
        )
        for position, count, prompt, body in connection.execute(query, (self.owner,)).fetchall():
            with suppress(Damaged):
                groups.setdefault(position, []).append(decode_trajectory(body, decode_prompt(prompt)))
                samples[position] = count
        marked = [
            replace(t, provenance={**t.provenance, LEFT_OUT: max(0, samples[position] - len(group)) / len(group)})
            for position, group in groups.items()
            for t in group
        ]
        self._append_all(connection, encode_trajectories(marked).rows)
        connection.execute("DELETE FROM staged WHERE owner = ?", (self.owner,))

    def _move_grading_to_in_flight(self, connection: sqlite3.Connection, unit: str) -> None:
        """Count as in flight what an earlier process of this name was grading."""
        grading = connection.execute(
            "SELECT value FROM counters WHERE owner = ? AND name = ?", (self.owner, f"grading_{unit}")
        ).fetchone()
        if grading is not None and grading[0]:
            self._count(connection, {f"in_flight_{unit}": grading[0], f"grading_{unit}": -grading[0]})

    def _append_all(self, connection: sqlite3.Connection, rows: Sequence[TrajectoryRow]) -> list[int]:
        """Append rows, and add those that were new to the totals; returns the tokens of each that was."""
        parts = [rows[i : i + _PUT_ROWS] for i in range(0, len(rows), _PUT_ROWS)]
        tokens = [row.tokens for part in parts for row in self._append(connection, part)]
        add_to_totals(connection, {"rows": len(tokens), "tokens": sum(tokens)})
        return tokens

    def _append(self, connection: sqlite3.Connection, rows: Sequence[TrajectoryRow]) -> Sequence[TrajectoryRow]:
        """Append rows; returns the new ones. Uids outlive bodies, so a repeat is recognised after retention.

        All in one statement, which is twice as fast as one by one, unless some of them are there already.
        """
        facts: list[object] = []
        for uid, prompt, tokens, incarnation, step, reward, created, _ in rows:
            facts += (uid, self.owner, prompt, tokens, incarnation, step, reward, created)
        try:
            last_seq = connection.execute(_INSERT_FACTS + ",".join(["(?,?,?,?,?,?,?,?)"] * len(rows)), facts).lastrowid
        except sqlite3.IntegrityError as error:  # not OR IGNORE, which would use up a number
            if error.sqlite_errorcode != sqlite3.SQLITE_CONSTRAINT_UNIQUE:
                raise
            return [] if len(rows) == 1 else [new_row for row in rows for new_row in self._append(connection, [row])]
        assert last_seq is not None
        bodies: list[object] = []
        for seq, row in enumerate(rows, start=last_seq - len(rows) + 1):
            bodies += (seq, row.prompt, row.tokens, row.body)
        marks = ",".join(["(?,?,?,?)"] * len(rows))
        connection.execute(f"INSERT INTO bodies VALUES {marks}", bodies)  # noqa: S608 - question marks
        return rows

    def _count(self, connection: sqlite3.Connection, increments: Mapping[str, int]) -> None:
        connection.executemany(
            "INSERT INTO counters VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
            [(self.owner, name, int(increment)) for name, increment in increments.items()],
        )

    def _now(self, connection: sqlite3.Connection, table: str, condition: str = "", *parameters: str) -> float:
        """Returns the time, by a monotonic clock that all processes of a machine share.

        It restarts with the machine: what seems to have been issued in the future counts as issued now, and runs out
        after its own length at the latest.
        """
        now = self._clock()
        connection.execute(f"UPDATE {table} SET issued = ?1 WHERE issued > ?1 {condition}", (now, *parameters))  # noqa: S608 - our own names
        return now

    def close(self) -> None:
        """Close the journal; leases that were not given back run out."""
        self._database.close()
        if self._acknowledged_file >= 0:
            os.close(self._acknowledged_file)
            self._acknowledged_file = -1

    def __exit__(self, *failure: object) -> None:
        self.close()
