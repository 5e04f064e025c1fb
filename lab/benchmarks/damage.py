"""What can be recovered from a damaged journal: by tba's recovery, by plain SQL around the damage, by the sqlite3
shell.

    python lab/benchmarks/damage.py [--rows 4000] [--damages 201] [--per-prompt 100] [--seed 0] [--folder DIR]
                                [--shell PATH]

A journal of --rows trajectories (128 tokens, as in `journal.py`; with --per-prompt 24 each round has a prompt of its
own), written in rounds of 24 while a follower moves the log into the file, is damaged --damages times: 1 to 64 bits
flipped anywhere, a page or half of one torn (overwritten by zeros, by noise, or by its content when the journal had
half of its rows), or the file cut anywhere. Half of the damages are done to a closed journal, half to one whose writer
was killed, so that its end is in the log. Then the closed one is cut off at given shares of its bytes, for the recovery
alone.

recovery  `tba.replay.recovery`, as used by the process that opens a damaged journal
sql       SELECT by ranges of row ids from both ends up to the damage, then row by row; with the file's own first page
          and with that of an empty journal, for the trees begin on the same pages in all of them
shell     `.recover` of the sqlite3 shell, with the rows that it cannot assign to a table. Debian's shell was built
          without it

A trajectory is kept when its own checksum agrees and its prompt is there.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from journal import BATCH, PER_PROMPT, trajectories

from tba.errors import UserError
from tba.replay.codec import Damaged, prompt_id, trajectory_header
from tba.replay.database import suspect_mark
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter

PAGE = 8192
KINDS = ("bits", "torn", "cut")
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
_Row = tuple[Any, ...]
_UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)


def make(folder: Path, rows: int, per_prompt: int) -> dict[str, dict[str, bytes]]:
    """The journal as it was at half of its rows, closed, and with its writer killed: contents by part ("", "-wal")."""
    path, states = folder / "made.sqlite", {}
    with JournalFollower(path, wal_bytes=1 << 20) as follower, JournalWriter(path, "searcher-0") as writer:
        batch = []
        for i, t in enumerate(trajectories(rows, -(-rows // per_prompt))):
            batch.append(t)
            if len(batch) == BATCH or i == rows - 1:
                writer.put(batch, counters={"generated_trajectories": len(batch)})
                follower.drain_stored()
                batch = []
            if i == rows // 2:
                follower.checkpoint()
                states["half"] = _parts(path)
        states["killed"] = _parts(path)
    states["closed"] = _parts(path)
    path.unlink()
    return states


def damage(state: dict[str, bytes], half: bytes, kind: str, rng: np.random.Generator) -> dict[str, bytes]:
    """One damage to the file or to its log, whichever a random place is in."""
    sizes = {part: len(data) for part, data in state.items()}
    at = int(rng.integers(sum(sizes.values())))
    part = "" if at < sizes[""] else "-wal"
    at -= 0 if part == "" else sizes[""]
    data = bytearray(state[part])
    if kind == "bits":
        for place in rng.integers(8 * len(data), size=int(rng.integers(1, 65))).tolist():
            data[place // 8] ^= 1 << place % 8
    elif kind == "cut":
        del data[at:]
    else:
        size = PAGE // int(rng.integers(1, 3))
        at -= at % size
        size = min(size, len(data) - at)
        old = half[at : at + size] if part == "" else b""
        how = int(rng.integers(3))
        data[at : at + size] = bytes(size) if how == 0 else rng.bytes(size) if how == 1 else old.ljust(size, b"\0")
    return {**state, part: bytes(data)}


def cut_at(closed: bytes, share: float) -> int:
    """How many trajectories the recovery keeps of a file of which this share is left."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        path.write_bytes(closed[: int(share * len(closed))])
        return len(by_recovery(path))


def by_recovery(path: Path) -> set[str]:
    """Through the front door."""
    suspect_mark(path).touch()  # recovered whatever a first look finds: all readers are asked for all they can read
    try:
        with JournalFollower(path) as follower:
            return {stored.uid for stored in follower.drain_stored()}
    except UserError:
        return set()


def by_sql(path: Path) -> set[str]:
    """With the file's own first page, and with that of an empty journal; what gives more."""
    rows = _sql(path)
    empty = path.with_name("empty.sqlite")
    JournalFollower(empty).close()
    first_page = bytearray(empty.read_bytes()[:PAGE])
    first_page[28:32] = (path.stat().st_size // PAGE).to_bytes(4, "big")  # how many pages there are
    with path.open("r+b") as file:
        file.write(first_page)
    return max(rows, _sql(path), key=len)


def _sql(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection, suppress(*_UNREADABLE):
        connection.execute("PRAGMA writable_schema = ON")  # a file that was cut off is read as far as it goes
        prompts = [
            *_around(connection, "prompts", "id", "id, body"),
            *_around(connection, "prompt_copies", "place", "id, body"),
        ]
        return _kept(_around(connection, "bodies", "seq", "prompt, body"), ((i, body) for _, i, body in prompts))
    return set()


def _around(connection: sqlite3.Connection, table: str, key: str, columns: str) -> list[_Row]:
    """Rows of a table: from both ends up to the damage and from behind it on, then each number in between alone."""
    rows_by_key: dict[int, _Row] = {}
    select = f"SELECT {key}, {columns} FROM {table}"
    for compare, order, step in ((">", "ASC", 1), ("<", "DESC", -1)):
        at, width = (-(2**63) if step > 0 else 2**63 - 1), 1
        while width < 1 << 62:  # beyond what cannot be read, in ever larger steps
            before = len(rows_by_key)
            try:
                for row in connection.execute(f"{select} WHERE {key} {compare} ? ORDER BY {key} {order}", (at,)):
                    rows_by_key[row[0]], at = row, row[0]
                break
            except _UNREADABLE:
                width = 1 if len(rows_by_key) > before else 2 * width
                at += step * width
                if not -(2**63) <= at < 2**63:
                    break
    most = min(max(rows_by_key, default=0) + 10_000, 10_000_000) if key == "seq" else 0
    for number in range(1, most):
        if number not in rows_by_key:
            with suppress(*_UNREADABLE):
                for row in connection.execute(f"{select} WHERE {key} = ?", (number,)):
                    rows_by_key[number] = row
    return list(rows_by_key.values())


def by_shell(path: Path, shell: str) -> set[str]:
    """`.recover` into another file."""
    new = path.with_name("shell.sqlite")
    with subprocess.Popen([shell, path, ".recover"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        subprocess.run([shell, new], stdin=process.stdout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    bodies: list[_Row] = []
    prompts: list[_Row] = []
    with closing(sqlite3.connect(new)) as connection:
        for query, rows in (
            ("SELECT seq, prompt, body FROM bodies", bodies),
            ("SELECT id, body FROM prompts", prompts),
            ("SELECT id, body FROM prompt_copies", prompts),
            ("SELECT id, c1, c3 FROM lost_and_found WHERE nfield = 4", bodies),
            ("SELECT id, c1 FROM lost_and_found WHERE nfield = 2", prompts),
            ("SELECT c1, c2 FROM lost_and_found WHERE nfield = 3", prompts),
        ):
            with suppress(*_UNREADABLE):
                rows.extend(connection.execute(query))
    return _kept(bodies, prompts)


def _kept(bodies: Iterable[_Row], prompts: Iterable[_Row]) -> set[str]:
    known_prompts = {i for i, body in prompts if isinstance(body, bytes) and prompt_id(body) == i}
    return set(_intact((body for _, prompt, body in bodies if prompt in known_prompts)))


def _intact(bodies: Iterable[object]) -> Iterator[str]:
    for body in bodies:
        if isinstance(body, bytes):
            with suppress(Damaged):
                yield trajectory_header(body)["uid"]


def _parts(path: Path) -> dict[str, bytes]:
    return {part: file.read_bytes() for part in ("", "-wal") if (file := Path(f"{path}{part}")).exists()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--damages", type=int, default=201)
    parser.add_argument("--per-prompt", type=int, default=PER_PROMPT, help="trajectories to a prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--shell", default="sqlite3", help="an sqlite3 shell built with SQLITE_ENABLE_DBPAGE_VTAB")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # each recovery would say what it found
    readers: dict[str, Callable[[Path], set[str]]] = {"recovery": by_recovery, "sql": by_sql}
    if shutil.which(options.shell):
        readers["shell"] = partial(by_shell, shell=options.shell)
    rng = np.random.default_rng(options.seed)
    counts: dict[tuple[str, str], list[int]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        states = make(Path(name), options.rows, options.per_prompt)
        for n in range(options.damages):
            kind, state = KINDS[n % 3], ("closed", "killed")[n // 3 % 2]
            damaged = damage(states[state], states["half"][""], kind, rng)
            for reader, read in readers.items():
                with tempfile.TemporaryDirectory(dir=name) as folder:
                    path = Path(folder) / "journal.sqlite"
                    for part, data in damaged.items():
                        Path(f"{path}{part}").write_bytes(data)
                    began = time.perf_counter()
                    counts[reader, kind].append(len(read(path)))
                    seconds[reader] += time.perf_counter() - began
        shares = {share: cut_at(states["closed"][""], share) / options.rows for share in SHARES}
    print(f"{options.damages} damages to a journal of {options.rows:,} trajectories: kept in the mean and at least")
    for reader in readers:
        for kind in (*KINDS, "all"):
            kinds = KINDS if kind == "all" else (kind,)
            rows_read, recovered = (np.concatenate([counts[r, k] for k in kinds]) for r in (reader, "recovery"))
            share = np.where(recovered > 0, rows_read / np.maximum(recovered, 1), 1.0)
            print(
                f"  {reader:8} {kind:5} {rows_read.mean():8.1f}  least {rows_read.min():5}  "
                f"{100 * rows_read.sum() / recovered.sum():6.2f} % of recovery's; worst {100 * share.min():6.2f} %, "
                f"below 95 % in {(share < 0.95).sum()} of {len(rows_read)}"
            )
        print(f"  {reader:8} {seconds[reader] / options.damages:.2f} s each")
    print("cut off at a share of the file, so much is kept:", ", ".join(f"{s:.0%} {k:.1%}" for s, k in shares.items()))


if __name__ == "__main__":
    main()
