"""Files of lines: each comes out once, whatever is in it."""

import gzip
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tba.errors import UserError
from tba.intake.files import Refusal, read

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.lists(st.one_of(st.binary(max_size=30), st.just(b'{"a": 1}'), st.just(b" "), st.just(b"[" * 30_000))))
def test_every_line_that_is_not_blank_comes_out_once_with_its_number(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"\n".join(lines))
    whole = b"\n".join(lines).split(b"\n")  # a line may hold line ends itself
    found = list(read(path))
    assert [number for number, _ in found] == [n for n, line in enumerate(whole, 1) if line.strip()]
    assert [number for number, entry in found if entry == {"a": 1}] == [
        n for n, line in enumerate(whole, 1) if line.strip() == b'{"a": 1}'
    ]


def test_what_is_no_object_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n[1]\n{"a": \n\xff\n' + b"1" * 5000 + b"\n")
    reasons = [entry.reason if isinstance(entry, Refusal) else entry for _, entry in read(path)]
    assert reasons == [{"a": 1}, "JSON, but no object", "not JSON", "not text in UTF-8", "not JSON"]


def test_a_line_longer_than_the_limit_is_refused_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"a": "x" * 300}) + '\n{"a": 1}\n')
    entries = [entry for _, entry in read(path, longest=64)]
    assert entries == [Refusal("longer than 64 bytes"), {"a": 1}]


def test_a_file_that_ends_early_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b'{"a": %d}\n' % n for n in range(5000)))
    path = tmp_path / "lines.jsonl.gz"
    path.write_bytes(whole)
    assert len(list(read(path))) == 5000
    path.write_bytes(whole[: len(whole) // 2])
    entries = [entry for _, entry in read(path)]
    assert len(entries) > 100
    assert isinstance(entries[-1], Refusal)
    assert "any further" in entries[-1].reason
    assert entries[:-1] == [{"a": n} for n in range(len(entries) - 1)]


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        list(read(tmp_path / "none.jsonl"))


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_a_parquet_file_without_pyarrow_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails, as where it is not installed
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="needs the package pyarrow"):
        list(read(tmp_path / "rows.parquet"))


def test_rows_of_a_parquet_file_are_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    chat = [{"role": "user", "content": "1+1="}]
    rows = [{"prompt": "1+1=", "reward": 0.5, "messages": None}, {"prompt": None, "reward": None, "messages": chat}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert list(read(tmp_path / "rows.parquet")) == [(1, rows[0]), (2, rows[1])]
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="as Parquet"):
        list(read(tmp_path / "rows.parquet"))
