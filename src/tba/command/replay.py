"""`tba replay RUN`: counts, queries (SQL) or exports the trajectories in a run's journal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from tba.command.options import ReplayOptions
from tba.errors import UserError
from tba.record.jsonl import as_json, atomic_replacement
from tba.record.show import table_of
from tba.record.terminal import LossyOutput, terminal
from tba.record.text import printable, short_number, size
from tba.replay.codec import unpack_uses
from tba.replay.queries import JournalQueries, Share, export_rows
from tba.runtime.checkpointing import describe_missing_rows, held_by_journal
from tba.runtime.run_directory import RunDirectory
from tba.training.checkpoint import newest_sound_checkpoint
from tba.types import Json

_JSON_COLUMNS = ("fields", "reward_parts", "provenance")  # text in Parquet: their shape is the task's own


def show_replay(path: Path, options: ReplayOptions) -> int:
    """Prints, queries or exports the trajectories in a run's journal (`tba replay RUN`)."""
    run = RunDirectory.open(path)
    journal = run.journal_to_read()
    uses, recorded_counts = uses_of(run), held_by_journal(run)  # before the journal, to which a run in progress adds
    if options.export is not None:
        if options.sql is not None:
            raise UserError("give --sql or --export, not both: an export has all trajectories")
        row_count = _export(journal, options.export, uses)
        print(f"{row_count} trajectories in {options.export}")  # noqa: T201 - the command's answer
        return 0
    with JournalQueries(journal, uses, options.seconds) as reader:
        if options.sql is None:
            loss_note = describe_missing_rows(reader.totals, recorded_counts, _journal_marks(run))
            _print_counts(terminal(), path, journal, reader, loss_note)
        else:
            _print_rows(*reader.answer(options.sql))
    return 0


def _journal_marks(run: RunDirectory) -> Sequence[Sequence[int]]:
    """Returns the marks that a run has given its journal; none where its recipe.json cannot be read."""
    try:
        return run.marks
    except UserError:
        return [[]]


def uses_of(run: RunDirectory) -> npt.NDArray[np.int32]:
    """Returns [places + 1] how often each trajectory was trained on, as of the newest checkpoint; empty without one."""
    return fates_of(run).clip(min=0)


def fates_of(run: RunDirectory) -> npt.NDArray[np.int32]:
    """Returns uses by trajectory; a negative number says how one left replay without any use (`replay.buffer.LEFT`)."""
    checkpoint, _ = newest_sound_checkpoint(run.checkpoints, verify=False)
    if checkpoint is None:
        return np.zeros(0, dtype=np.int32)
    try:
        return unpack_uses(checkpoint.state["replay"]["uses"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{checkpoint.path} does not say what was trained on ({error}): remove it") from error


def _print_rows(names: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> None:
    """Print columns separated by tabs, for other programs to read."""
    out = LossyOutput()
    for row in (names, *rows):
        out.write("\t".join(map(_cell, row)) + "\n")


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return printable(str(value), longest=sys.maxsize, newlines=False)


def _print_counts(console: Console, path: Path, journal: Path, reader: JournalQueries, loss_note: str | None) -> None:
    totals = reader.totals
    console.print(
        f"{path}: {totals.rows:,} trajectories, {short_number(totals.tokens)} tokens, {size(journal.stat().st_size)}",
        highlight=False,
    )
    if loss_note is not None:
        console.print(loss_note, style="yellow", highlight=False)
    if totals.retired_rows:
        console.print(f"{totals.retired_rows:,} of them were deleted from disk (--replay.keep-gb)", highlight=False)
    for recovery in reader.recoveries:
        console.print(str(recovery), style="yellow", highlight=False)
    for title, shares in (
        ("version", reader.by_version()),
        ("searcher", reader.by_owner()),
        ("reward", reader.by_reward()),
        ("trained on", reader.by_uses()),
    ):
        console.print()
        console.print(_table(title, shares))


def _table(title: str, shares: Sequence[Share]) -> Table:
    table = table_of(title, "trajectories", "tokens", "mean reward")
    for share in shares:
        reward = "-" if share.reward is None else f"{share.reward:.4g}"
        table.add_row(printable(share.name, 40) or "-", f"{share.trajectories:,}", f"{share.tokens:,}", reward)
    return table


def _export(journal: Path, file: Path, uses: npt.NDArray[np.int32]) -> int:
    """Write all trajectories to the file; returns how many."""
    if not journal.is_file():
        raise UserError(f"there is no journal at {journal}: give the folder of a run that has one")
    if file.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"--export is {file}: give a name that ends in .jsonl or .parquet")
    row_count, writer = 0, _json_lines_writer if file.suffix == ".jsonl" else _parquet_writer
    try:
        with atomic_replacement(file) as temporary_path, writer(temporary_path) as write:
            for chunk in export_rows(journal, uses):
                write(chunk)
                row_count += len(chunk)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}): give another place") from error
    return row_count


@contextmanager
def _json_lines_writer(path: Path) -> Iterator[Any]:
    file: IO[bytes]
    with path.open("wb") as file:

        def write(chunk: Sequence[Mapping[str, Json]]) -> None:
            for values in chunk:
                text = json.dumps(as_json(values), ensure_ascii=False, allow_nan=False)
                file.write(text.encode("utf-8", "backslashreplace") + b"\n")

        yield write


@contextmanager
def _parquet_writer(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            "a .parquet file needs the package pyarrow: `pip install pyarrow`, or give a name that ends in .jsonl"
        ) from error
    texts = ("prompt", "response", "stop_reason", "uid", "version", "source", "task", "reference", *_JSON_COLUMNS)
    columns = {name: pyarrow.string() for name in texts} | {"uses": pyarrow.int64()}
    columns |= {name: pyarrow.float64() for name in ("reward", "created")}
    columns |= {name: pyarrow.list_(pyarrow.int32()) for name in ("prompt_tokens", "tokens", "begins")}
    columns["mask"] = pyarrow.list_(pyarrow.bool_())
    columns |= {name: pyarrow.list_(pyarrow.float32()) for name in ("log_reference", "log_behavior")}
    schema = pyarrow.schema(list(columns.items()))
    with parquet.ParquetWriter(path, schema) as writer:

        def write(chunk: Sequence[Mapping[str, Json]]) -> None:
            rows = [{**row, **{name: json.dumps(as_json(row[name])) for name in _JSON_COLUMNS}} for row in chunk]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))

        yield write
