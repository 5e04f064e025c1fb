"""Files of answers to import: JSON Lines (gzipped where the name ends in `.gz`) and Parquet, line by line.

Invariant: every line that is not blank is yielded exactly once, in order: as its object, or as what is wrong with it.
No content of a file raises or is held in memory as a whole; only a file that cannot be opened does raise.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from tba.errors import UserError
from tba.types import Json

LONGEST = 1 << 24  # bytes of a line: no answer is 16 MiB long, and a file may be anything
_ROWS = 1024  # of a Parquet file at a time


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a line is not imported: a reason that is counted, and its details."""

    reason: str
    detail: str = ""


Values: TypeAlias = Mapping[str, Json]


def read(path: Path, longest: int = LONGEST) -> Iterator[tuple[int, Values | Refusal]]:
    """Yields (number from 1, object or refusal) of every line. Raises `UserError` when the file cannot be opened."""
    return _parquet(path) if path.suffix == ".parquet" else _json_lines(path, longest)


def _json_lines(path: Path, longest: int) -> Iterator[tuple[int, Values | Refusal]]:
    try:
        opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): give a JSON Lines or Parquet file, or the folder of a run"
        ) from error
    with opened as file:
        for number in count(1):
            try:
                line = file.readline(longest)
                long = len(line) == longest and not line.endswith(b"\n")
                while long and (more := file.readline(longest)) and not more.endswith(b"\n"):
                    pass
            except (OSError, EOFError, zlib.error) as error:
                yield number, Refusal("the file cannot be read any further", str(error))
                return
            if not line:
                return
            if long:
                yield number, Refusal(f"longer than {longest} bytes")
            elif line.strip():
                yield number, _object(line)


def _object(line: bytes) -> Values | Refusal:
    try:
        values = json.loads(line.decode("utf-8-sig"))  # some editors put a mark of the encoding first
    except UnicodeDecodeError as error:
        return Refusal("not text in UTF-8", str(error))
    except (ValueError, RecursionError) as error:  # not JSON, or nested beyond reason
        return Refusal("not JSON", str(error))
    if not isinstance(values, dict):
        return Refusal("JSON, but no object", type(values).__name__)
    return values


def _parquet(path: Path) -> Iterator[tuple[int, Values | Refusal]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{path} is a Parquet file, which needs the package pyarrow: `pip install pyarrow`, or give JSON Lines"
        ) from error
    try:
        file: Any = parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be read as Parquet ({reason}): give a Parquet or JSON Lines file") from error
    with file as file:
        number = 0
        try:
            for batch in file.iter_batches(_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, json.loads(json.dumps(row, default=str))  # dates, decimals and bytes as text
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            yield number + 1, Refusal("the file cannot be read any further", str(error).partition("\n")[0])
