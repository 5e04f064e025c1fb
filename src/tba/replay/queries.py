"""Reads a journal for people: counts, SQL queries, export.

Invariant: nothing is changed, even by a query that tries to (the connection is read-only, and may do nothing but
select), and every query has a deadline. A run may be going on meanwhile.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tba.errors import DeadlineExceeded, UserError
from tba.replay.checks import uri_to_read
from tba.replay.codec import Damaged, read_header
from tba.replay.follower import JournalFollower
from tba.replay.reading import JournalFile
from tba.types import Json, Trajectory

_ALLOWED_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_CHECK_INSTRUCTIONS = 20_000  # virtual machine instructions between two checks of the deadline
_EXPORT_ROWS = 512  # trajectories of an export
_MOST_VALUE_BYTES = 64 << 20  # bytes of the largest value that a person's query may make
_MOST_MEMORY_BYTES = 512 << 20  # bytes that SQLite may take for it
_MOST_ANSWER_CHARACTERS = 256 << 20  # characters of its answer
_MOST_RANGES = 10  # ranges that a table is divided into


@dataclass(frozen=True, slots=True)
class Share:
    """Counts some trajectories of a journal under one name."""

    name: str
    trajectories: int
    tokens: int
    reward: float | None  # mean; None where none is known


def count_rows(journal: Path) -> int | None:
    """Returns how many trajectories were ever put into a journal that others write; None where that cannot be read."""
    try:
        with closing(sqlite3.connect(uri_to_read(journal), uri=True, timeout=0.1)) as connection:
            ((rows,),) = connection.execute("SELECT value FROM totals WHERE name = 'rows'")
    except (sqlite3.Error, ValueError):
        return None
    return int(rows)


class JournalQueries(AbstractContextManager["JournalQueries"]):
    """Answers questions about a journal, by a read-only connection.

    uses: [places + 1], how often the trajectory of each place was trained on; fills the table `uses`.

    Of a damaged journal that nobody has open, a recovered copy is read. Raises `UserError` as `JournalFile` does.
    """

    def __init__(self, path: Path, uses: npt.NDArray[np.int32] | None = None, deadline_s: float = 60.0) -> None:
        self.deadline_s = deadline_s
        self._file = JournalFile(path)
        with JournalFollower(path, file=self._file) as follower:
            self.recoveries = follower.recoveries()
            self.totals = follower.totals()
        self._connection = sqlite3.connect(self._file.uri, uri=True)
        self._connection.create_function("facts", 1, _header_json, deterministic=True)
        self._connection.execute("CREATE TEMP TABLE uses (uid TEXT PRIMARY KEY, uses INTEGER NOT NULL)")
        if uses is not None:
            self._connection.executemany(
                "INSERT INTO uses SELECT uid, ? FROM trajectories WHERE seq = ?",
                ((int(uses[place]), int(place)) for place in np.flatnonzero(uses)),
            )
        self._connection.commit()
        self._connection.execute("PRAGMA query_only = ON")
        self._connection.set_authorizer(_authorize)

    def query(self, sql: str, *values: object) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
        """Returns the names of the columns, and the rows; values: what stands for each `?`.

        Raises `UserError` for what is no query, or is not allowed, and `DeadlineExceeded`, also while rows are fetched.
        """
        rows = self._iterate(sql, *values)
        return [str(name) for name in next(rows)], rows

    def answer(self, sql: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
        """Answers anybody's SQL as `query` does, with bounds on the memory and the length of the answer.

        The bound on memory stays in force for all of SQLite in this process.
        """
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_VALUE_BYTES)
        self._connection.set_authorizer(None)
        self._connection.execute(f"PRAGMA hard_heap_limit = {_MOST_MEMORY_BYTES}")
        self._connection.set_authorizer(_authorize)
        names, rows = self.query(sql)
        return names, _limit_answer(rows, _MOST_ANSWER_CHARACTERS)

    def by_version(self) -> list[Share]:
        """Returns shares by version, oldest weights first, in ranges of steps where there are many."""
        groups = self._fetch_all(
            "SELECT incarnation, step, count(*), sum(tokens), count(reward), coalesce(sum(reward), 0) "
            "FROM trajectories GROUP BY 1, 2 ORDER BY 1, 2"
        )
        size = -(-len(groups) // _MOST_RANGES) if groups else 1
        parts = []
        for incarnation in sorted({group[0] for group in groups}):
            groups_of_incarnation = [group for group in groups if group[0] == incarnation]
            parts += [groups_of_incarnation[i : i + size] for i in range(0, len(groups_of_incarnation), size)]
        return [_make_share(_version_range(part[0][:2], part[-1][:2]), [group[2:] for group in part]) for part in parts]

    def by_owner(self) -> list[Share]:
        """Returns a share for each owner (searcher or import) that put trajectories."""
        return self._shares("owner", "owner")

    def by_reward(self) -> list[Share]:
        """Returns a share for each reward, or for ranges of rewards where there are many."""
        ((distinct, lowest, highest),) = self._fetch_all(
            "SELECT count(DISTINCT reward), min(reward), max(reward) FROM trajectories"
        )
        if distinct <= _MOST_RANGES:
            return self._shares("printf('%.6g', reward)", "reward")
        width = (highest - lowest) / _MOST_RANGES
        part = f"min({_MOST_RANGES - 1}, CAST((reward - {lowest!r}) / {width!r} AS INTEGER))"
        shares = {share.name: share for share in self._shares(f"CAST({part} AS TEXT)", part)}
        names = {str(i): f"{lowest + i * width:.4g} to {lowest + (i + 1) * width:.4g}" for i in range(_MOST_RANGES)}
        return [Share(names[i], s.trajectories, s.tokens, s.reward) for i, s in shares.items()]

    def by_uses(self) -> list[Share]:
        """Returns shares by how often trajectories were trained on."""
        return self._shares(
            "CASE WHEN n IS NULL THEN 'never' WHEN n < 4 THEN n WHEN n < 8 THEN '4 to 7' ELSE '8 or more' END",
            "min(coalesce(n, 0), 8)",
            "(SELECT t.*, u.uses AS n FROM trajectories t LEFT JOIN uses u USING (uid))",
        )

    def _shares(self, name: str, order: str, source: str = "trajectories") -> list[Share]:
        label_rows = self._fetch_all(
            f"SELECT {name}, count(*), sum(tokens), count(reward), coalesce(sum(reward), 0) FROM {source} "  # noqa: S608 - our own names
            f"GROUP BY 1 ORDER BY min({order})"
        )
        return [_make_share(str(label), [row]) for label, *row in label_rows]

    def _fetch_all(self, sql: str) -> list[tuple[Any, ...]]:
        rows = self._iterate(sql)
        next(rows)
        return list(rows)

    def _iterate(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Yields the names of a query's columns, then its rows."""
        limit = time.monotonic() + self.deadline_s
        with self._explain_errors(limit):
            cursor = self._connection.execute(sql, values)
            if cursor.description is None:
                raise UserError(f"`{sql.strip()[:80]}` gives no rows: give one SELECT")
            yield tuple(column[0] for column in cursor.description)
            for row in cursor:
                yield row
                if time.monotonic() > limit:
                    raise self._timeout_error()

    @contextmanager
    def _explain_errors(self, limit: float) -> Iterator[None]:
        self._connection.set_progress_handler(lambda: time.monotonic() > limit, _CHECK_INSTRUCTIONS)
        try:
            yield
        except MemoryError as error:
            raise UserError(
                f"the query needs more than {_MOST_MEMORY_BYTES >> 20} MB of memory: select fewer or smaller values"
            ) from error
        except (sqlite3.Error, sqlite3.Warning) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                raise self._timeout_error() from error
            tables = "prompts, trajectories, bodies, uses, counters, totals, outcomes, evaluations, recoveries"
            raise UserError(f"the query cannot be answered ({error}): give one SELECT over {tables}") from error
        finally:
            with suppress(sqlite3.ProgrammingError):  # closed, with rows that nobody has fetched
                self._connection.set_progress_handler(None, 0)

    def _timeout_error(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the query took longer than {self.deadline_s:g} s and was ended: make it smaller, or give more --seconds"
        )

    def close(self) -> None:
        """Close the connection, and delete a copy."""
        self._connection.close()
        self._file.close()

    def __exit__(self, *failure: object) -> None:
        self.close()


def _limit_answer(rows: Iterator[tuple[Any, ...]], size: int) -> Iterator[tuple[Any, ...]]:
    """Yields rows for as long as they have at most `size` characters together."""
    remaining = size
    for row in rows:
        remaining -= sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if remaining < 0:
            raise UserError(
                f"the answer is longer than {size >> 20} MB and was ended: add a LIMIT, or use --export for everything"
            )
        yield row


def export_rows(path: Path, uses: npt.NDArray[np.int32]) -> Iterator[list[dict[str, Json]]]:
    """Yields all trajectories that can be read, oldest first, in chunks, in the form that `tba import` takes."""
    with JournalFile(path) as file, JournalFollower(path, file=file) as follower:
        while chunk := follower.drain_stored(_EXPORT_ROWS):
            yield [_export(t.trajectory, int(uses[t.place]) if t.place < len(uses) else 0) for t in chunk]


def _export(t: Trajectory, uses: int) -> dict[str, Json]:
    c = t.completion
    return {
        "prompt": t.prompt.text,
        "response": c.text,
        "reward": t.reward,
        "stop_reason": c.stop_reason.value,
        "uid": t.uid,
        "version": str(t.version),
        "source": str(t.provenance.get("searcher", t.provenance.get("source", ""))),
        "uses": uses,
        "task": t.prompt.task,
        "fields": dict(t.prompt.fields),
        "reward_parts": dict(t.reward_parts),
        "provenance": dict(t.provenance),
        "created": t.created,
        "reference": str(t.reference),
        "prompt_tokens": t.prompt.tokens.tolist(),
        "tokens": c.tokens.tolist(),
        "mask": None if c.mask is None else c.mask.tolist(),
        "begins": None if c.begins is None else c.begins.tolist(),
        "log_reference": t.log_reference.tolist() if t.has_reference else None,
        "log_behavior": None if c.log_behavior is None else c.log_behavior.tolist(),
    }


def _make_share(name: str, groups: Sequence[Sequence[Any]]) -> Share:
    """Returns a share of (trajectories, tokens, how many rewards are known, their sum)."""
    trajectories, tokens, reward_count, total = (sum(column) for column in zip(*groups, strict=True))
    return Share(name, trajectories, tokens, total / reward_count if reward_count else None)


def _version_range(start: tuple[int, int], end: tuple[int, int]) -> str:
    incarnation = start[0]
    if incarnation < 0:
        return "none"
    return f"{incarnation}.{start[1]}" if start == end else f"{incarnation}.{start[1]} to {incarnation}.{end[1]}"


def _header_json(body: object) -> str | None:
    """Returns the header of a body or a prompt, as JSON text; NULL for anything else."""
    try:
        return json.dumps(read_header(body)) if isinstance(body, bytes) else None
    except Damaged:
        return None


def _authorize(action: int, argument_1: str | None, argument_2: str | None, *context: str | None) -> int:
    if action in _ALLOWED_ACTIONS and argument_2 != "load_extension":
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY
