"""Files of rows from outside, each row an object: JSON Lines, one JSON document, CSV, Parquet, and folders that
`datasets` saved to disk; texts are gunzipped where the name ends in `.gz`, and may be in UTF-16 or UTF-32 if they begin
with its mark.

Invariant: every row that is not blank is yielded exactly once, in order: as its object, or as what is wrong with it.
No content of a file raises, and but for a JSON document none is held in memory as a whole; what does raise is a file
that cannot be opened, or whose columns or lists are not told apart by their names.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tba.errors import UserError
from tba.json_input import read_json
from tba.types import Json, Message, is_name, is_text, python_values

MAX_ROW_BYTES = 1 << 24  # bytes of a row: no answer is 16 MiB long, and a file may be anything
MAX_DOCUMENT_BYTES = 1 << 30  # bytes of a JSON document, which is parsed as a whole
KINDS = "a JSON Lines, JSON, CSV or Parquet file, or a folder that datasets saved"
_BATCH_ROWS = 1024  # of a Parquet file at a time; also the bytes of a text that decide whether it has a second row
_SEPARATORS = {".csv": ",;\t", ".tsv": "\t"}  # the first that makes columns of the first line
_BYTE_ORDER_MARKS = {  # at the beginning of a text, UTF-32's before those of UTF-16 with which they begin
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_LIST_NAMES = ("train", "test", "validation", "eval", "data", "rows", "examples", "instances")  # of rows, in a document
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", *_SEPARATORS)
DAMAGED = "cut off or damaged: the file cannot be read any further"
NOT_UTF8 = "not text in UTF-8"
STATE, _SPLITS = "state.json", "dataset_dict.json"  # in a folder of `save_to_disk`


@dataclass(frozen=True, slots=True)
class Refusal:
    """Says why a row is refused: a reason that is counted, and details."""

    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


Values: TypeAlias = Mapping[str, Json]
Rows: TypeAlias = Iterator[tuple[int, Values | Refusal]]
Conversion: TypeAlias = Callable[[Any], Any]


def read_table(path: Path, max_row_bytes: int = MAX_ROW_BYTES) -> Rows:
    """Yields (number from 1, object or refusal) of every row. Raises `UserError` when the file cannot be opened."""
    if path.is_dir() or path.suffix == ".arrow":
        return _arrow_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if _suffix(path) in _SEPARATORS:
        return _csv_rows(path, max_row_bytes)
    return _json_rows(path, max_row_bytes)


def is_file_of_rows(name: str) -> bool:
    """Returns whether a name is, by its ending, that of a file that `read` can read."""
    return _suffix(Path(name)) in _SUFFIXES


def splits_of(folder: Path) -> dict[str, Path]:
    """Returns the folders of the splits that `datasets` saved into one folder, by name; empty where it saved none."""
    if not (folder / _SPLITS).is_file():
        return {}
    names = read_json(folder / _SPLITS, "save the data set again", splits=list[str])["splits"]
    return {name: folder / name for name in names if is_name(name)}


def file_in(folder: Path, name: str) -> Path | None:
    """Returns the file in a folder whose name without its ending is `name` (`train`); None where there is none."""
    endings = [f"{suffix}{compression}" for compression in ("", ".gz") for suffix in _SUFFIXES]
    return next((path for ending in endings if (path := folder / f"{name}{ending}").is_file()), None)


def conversation(messages: Sequence[Json]) -> tuple[Message, ...] | Refusal:
    """Returns chat messages in the form that templates take. Text parts become one text, a missing content beside calls
    of tools an empty one, and a call's arguments an object where they are a text of JSON. Null fields count as missing,
    since columns give every message all fields that any has. Other fields (`name`, `tool_call_id`, ...) stay.
    """
    chat: list[Message] = []
    for message in messages:
        fields = _without_null(message) if isinstance(message, dict) else {}
        content = _message_text(fields.get("content", "" if fields.get("tool_calls") else None))
        calls = fields.get("tool_calls", [])
        if not isinstance(fields.get("role"), str) or content is None or not isinstance(calls, list):
            return Refusal("a message that is not of a role with a text", f"{message!r:.200}")
        if not is_text(content):
            return Refusal("a message that is not valid text", "half of a surrogate pair")
        parsed_calls = {"tool_calls": [_parse_call(call) for call in calls]} if calls else {}
        chat.append({**fields, "content": content} | parsed_calls)
    return tuple(chat)


def parse_json_text(value: Json) -> Json:
    """Returns the object or list that a text of JSON holds, as published columns do; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def parse_chat_text(value: Json) -> Json:
    """Returns the chat that a text of JSON holds, because a cell of CSV holds no list; any other value as it is."""
    parsed_value = parse_json_text(value)
    return parsed_value if _is_chat(parsed_value) else value


def _is_chat(value: Json) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def tool_schemas(value: Json) -> tuple[Json, ...] | Refusal:
    """Returns the schemas of the tools that may be called, given as a list, a text of JSON, or None for no tools."""
    value = parse_json_text(value)
    if not isinstance(value, list | None) or not all(isinstance(tool, dict) for tool in value or ()):
        return Refusal("tools that are no list of schemas", f"{value!r:.200}")
    return tuple(_without_null(tool) for tool in value or ())


def _message_text(content: Json) -> str | None:
    """Returns a message's text, which may be written in parts; None where some part is not text."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None


def _parse_call(call: Json) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _without_null(value: Json) -> Json:
    if isinstance(value, dict):
        return {name: _without_null(field_value) for name, field_value in value.items() if field_value is not None}
    return [_without_null(field_value) for field_value in value] if isinstance(value, list) else value


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


class _Utf8Reader(io.RawIOBase):
    """Reads a text of another encoding as UTF-8."""

    def __init__(self, file: io.BufferedReader | gzip.GzipFile, encoding: str) -> None:
        self._file, self._block = file, b""
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._block:
            block = self._file.read(1 << 16)
            try:
                self._block = self._decoder.decode(block, final=not block).encode("utf-8", "surrogatepass")
            except UnicodeError as error:
                raise OSError(str(error)) from error
            if not block:
                break
        size = min(len(buffer), len(self._block))
        buffer[:size], self._block = self._block[:size], self._block[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_text(path: Path) -> io.BufferedReader | gzip.GzipFile:
    """Opens a file for reading its text as bytes of UTF-8. Raises `UserError` when it cannot be opened."""
    file = _open_bytes(path)
    try:
        first_bytes = file.peek(4)
    except (OSError, EOFError, zlib.error):
        return file  # reading it will raise the same error, which is reported there
    encoding = next((encoding for mark, encoding in _BYTE_ORDER_MARKS.items() if first_bytes.startswith(mark)), None)
    return file if encoding is None else io.BufferedReader(_Utf8Reader(file, encoding))


def _open_bytes(path: Path) -> io.BufferedReader | gzip.GzipFile:
    try:
        return gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give {KINDS}") from error


def _json_rows(path: Path, max_row_bytes: int) -> Rows:
    items = _document_rows(path, max_row_bytes)
    if items is not None:
        yield from enumerate(items, 1)
        return
    with _open_text(path) as file:
        yield from _line_rows(file, max_row_bytes)


def _document_rows(path: Path, max_row_bytes: int) -> list[Values | Refusal] | None:
    """Returns the rows of a file that is one JSON document; None where it is not, or its lines are its rows."""
    with _open_text(path) as file:
        try:
            line = b""
            for line in iter(lambda: file.readline(max_row_bytes), b""):
                if line := line.removeprefix(b"\xef\xbb\xbf").strip():
                    break
            is_object = line[:1] == b"{" and _suffix(path) == ".json"
            if line[:1] != b"[" and not is_object:
                return None
            if is_object and isinstance(_parse_object(line), dict) and file.read(_BATCH_ROWS).strip():
                return None
            document = json.loads((line + file.read(MAX_DOCUMENT_BYTES)).decode())
        except (OSError, EOFError, zlib.error, ValueError, RecursionError):
            return None  # `_line_rows` reports the error
    if isinstance(document, dict):
        document = _rows_of_object(path, document)
    return [as_object(item) for item in document] if any(isinstance(item, dict) for item in document) else None


def _rows_of_object(path: Path, document: Values) -> list[Json]:
    """Returns the rows of a JSON object: its one list of rows (`{"train": [...]}`), the rows of its columns (lists, or
    objects numbered as pandas does), or the object itself. Raises `UserError` for several lists of rows.
    """
    lists: dict[str, list[Json]] = {name: document[name] for name in _LIST_NAMES if _is_rows(document.get(name))}
    if len(lists) > 1:
        raise UserError(
            f"{path} has several lists of rows ({', '.join(lists)}): give a file of each, as train.json and test.json "
            "in a folder"
        )
    if lists:
        (rows,) = lists.values()
        return rows
    columns = list(document.values())
    if columns and all(isinstance(column, dict) and all(map(str.isdecimal, column)) for column in columns):
        columns = [list(column.values()) for column in columns if column.keys() == columns[0].keys()]
    is_table = all(isinstance(c, list) and not _is_chat(c) and len(c) == len(columns[0]) for c in columns)
    if not columns or not is_table or len(columns) < len(document):
        return [document]
    return [dict(zip(document, row, strict=True)) for row in zip(*columns, strict=True)]


def _is_rows(value: Json) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _line_rows(file: io.BufferedReader | gzip.GzipFile, max_row_bytes: int) -> Rows:
    for number in count(1):
        try:
            line = file.readline(max_row_bytes)
            is_too_long = len(line) == max_row_bytes and not line.endswith(b"\n")
            while is_too_long and (continuation := file.readline(max_row_bytes)) and not continuation.endswith(b"\n"):
                pass
        except (OSError, EOFError, zlib.error) as error:
            yield number, Refusal(DAMAGED, str(error))
            return
        if not line:
            return
        if is_too_long:
            yield number, Refusal(f"longer than {max_row_bytes} bytes")
        elif line.strip():
            yield number, _parse_object(line)


def _parse_object(line: bytes) -> Values | Refusal:
    try:
        return as_object(json.loads(line.decode("utf-8-sig")))  # some editors put a mark of the encoding first
    except UnicodeDecodeError as error:
        return Refusal(NOT_UTF8, str(error))
    except (ValueError, RecursionError) as error:  # not JSON, or nested beyond reason
        return Refusal("not JSON", str(error))


def as_object(values: Json) -> Values | Refusal:
    """Returns a JSON object, or the refusal of another value."""
    return values if isinstance(values, dict) else Refusal("JSON, but no object", type(values).__name__)


def _csv_rows(path: Path, max_row_bytes: int) -> Rows:
    """Yields the rows of CSV or TSV, as texts by the names in the first row."""
    with closing(cells(path, max_row_bytes)) as lines:
        number, header = 0, list[str]()
        while True:
            try:
                line = next(lines, None)
            except UnicodeDecodeError as error:
                yield number + 1, Refusal(NOT_UTF8, str(error))
                return
            except (csv.Error, ValueError, OSError, EOFError, zlib.error) as error:
                yield number + 1, Refusal(DAMAGED, str(error))
                return
            if line is None:
                return
            if not line:
                continue
            if not header:
                header = line
                if duplicates := {name for name in header if header.count(name) > 1}:
                    raise UserError(f"{path} has two columns named {min(duplicates)!r}: give each a name of its own")
                if any("\0" in name for name in header):
                    yield 1, Refusal(NOT_UTF8, "but perhaps in UTF-16 without its mark")
                    return
                continue
            number += 1
            if len(line) == len(header):
                yield number, {name: cell or None for name, cell in zip(header, line, strict=True)}
            else:
                yield (
                    number,
                    Refusal("of another number of cells than the first row", f"{len(line)}, not {len(header)}"),
                )


def cells(path: Path, max_row_bytes: int = MAX_ROW_BYTES, errors: str = "strict") -> Generator[list[str]]:
    """Yields the cells of each line of CSV or TSV. The separator is a tab in TSV. In CSV it is what a first line of its
    own names (`sep=;`), else the first of comma, semicolon and tab that makes several cells of the first line. Raises
    what reading and decoding (with `errors`, see `open`) raise.
    """
    csv.field_size_limit(max_row_bytes)
    with _open_text(path) as file, io.TextIOWrapper(file, "utf-8-sig", errors, newline="") as text:
        separators = _SEPARATORS[_suffix(path)]
        header = next((line for line in text if line.strip()), "")
        if separator_line := re.fullmatch(r'"?sep=(.)"?\s*', header):
            separators, header = separator_line[1], ""
        columns = {separator: len(next(csv.reader([header], delimiter=separator), [])) for separator in separators}
        separator = next((separator for separator, count in columns.items() if count > 1), separators[0])
        yield from csv.reader(chain([header], text), delimiter=separator)


def _parquet_rows(path: Path) -> Rows:
    pyarrow, parquet = _pyarrow(path)
    try:
        file: Any = parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be read as Parquet ({reason}): give {KINDS}") from error
    with file as file:
        yield from read_batches(file.iter_batches(_BATCH_ROWS), file.schema_arrow)


def _arrow_rows(path: Path) -> Rows:
    """Yields the rows of an Arrow file, or of all those in a folder that `datasets` saved."""
    files = _arrow_files(path) if path.is_dir() else [path]
    pyarrow, _ = _pyarrow(path)
    number = 0
    for file in files:
        try:
            with pyarrow.memory_map(str(file)) as mapped_file, pyarrow.ipc.open_stream(mapped_file) as batches:
                for _, row in read_batches(batches, batches.schema):
                    number += 1
                    yield number, row
        except (OSError, pyarrow.ArrowException) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"{file} cannot be read as Arrow ({reason}): give {KINDS}") from error


def _arrow_files(folder: Path) -> list[Path]:
    if splits := splits_of(folder):
        raise UserError(f"{folder} has several splits: give the folder of one ({', '.join(map(str, splits.values()))})")
    if not (folder / STATE).is_file():
        raise UserError(f"{folder} is a folder, but not one that datasets saved (no {STATE}): give {KINDS}")
    files = read_json(folder / STATE, "save the data set again", _data_files=list[dict[str, str]])["_data_files"]
    return [folder / name for file in files if is_name(name := file.get("filename", ""))]


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{path} is in the format of Parquet or Arrow, which needs the package pyarrow: `pip install pyarrow`, or "
            "give JSON Lines"
        ) from error
    return pyarrow, parquet


def _as_text(value: object) -> str:
    """Returns a date or a decimal as text, and bytes as the text that they are in UTF-8."""
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        return str(value)


def read_batches(batches: Iterable[Any], schema: Any) -> Rows:
    """Yields (number from 1, object or refusal) of every row of Arrow tables of one schema."""
    import pyarrow

    convert, number = _conversion(pyarrow.struct(list(schema)), _features(schema)), 0
    try:
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield number, json.loads(json.dumps(row if convert is None else convert(row), default=_as_text))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        yield number + 1, Refusal(DAMAGED, str(error).partition("\n")[0])


def _features(schema: Any) -> Json:
    """Returns the types that `datasets` recorded for a table's columns; None where it recorded none."""
    try:
        return json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None


def _conversion(kind: Any, feature: Json) -> Conversion | None:
    """Returns the function that restores a value of an Arrow type as it was written. A float of 16 or 32 bits becomes
    the shortest decimal that rounds to it (0.1, not 0.10000000149), the number of a label its name (by `feature`, the
    type in `datasets`). None where values need no change.
    """
    from pyarrow import types

    if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and types.is_integer(kind):
        names = feature.get("names")
        return partial(_label_name, names) if isinstance(names, list) else None
    if types.is_float32(kind) or types.is_float16(kind):
        return partial(_shortest_decimal, np.float32 if types.is_float32(kind) else np.float16)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _conversion(kind.value_type, feature)
    if types.is_struct(kind):
        conversions = {field.name: _conversion(field.type, _inner_feature(feature, field.name)) for field in kind}
        return partial(_convert_object, conversions) if any(conversions.values()) else None
    if types.is_map(kind):
        pair = _conversion(kind.key_type, None), _conversion(kind.item_type, None)
        return partial(_convert_list, partial(_convert_pair, pair)) if any(pair) else None
    if hasattr(kind, "value_type"):  # a list of any kind
        item = _conversion(kind.value_type, _inner_feature(feature))
        return None if item is None else partial(_convert_list, item)
    return _conversion(kind.storage_type, feature) if hasattr(kind, "storage_type") else None


def _inner_feature(feature: Json, name: str | None = None) -> Json:
    """Returns the type in `datasets` of an object's field, or without a name of a list's items; None where unknown."""
    is_list = isinstance(feature, dict) and isinstance(feature.get("_type"), str) and "feature" in feature
    if name is None:
        if isinstance(feature, list):
            return feature[0] if feature else None
        return feature["feature"] if is_list else feature  # a list of objects may be an object of lists
    fields = feature["feature"] if is_list else feature
    return fields.get(name) if isinstance(fields, dict) else None


def _label_name(names: Sequence[Json], number: int | None) -> Json:
    """Returns the name of a label; -1 stands for none."""
    if number is None or number < 0:
        return None
    return names[number] if number < len(names) else number


def _shortest_decimal(kind: Callable[[float], np.floating[Any]], value: float | None) -> float | None:
    return None if value is None else python_values(kind(value))


def _convert_list(convert: Conversion, items: Sequence[Any] | None) -> list[Any] | None:
    return None if items is None else [convert(item) for item in items]


def _convert_pair(conversions: tuple[Conversion | None, ...], pair: tuple[Any, ...]) -> list[Any]:
    return [value if convert is None else convert(value) for convert, value in zip(conversions, pair, strict=True)]


def _convert_object(conversions: Mapping[str, Conversion | None], values: Mapping[str, Any] | None) -> Json:
    if values is None:
        return None
    return {name: value if (convert := conversions[name]) is None else convert(value) for name, value in values.items()}
