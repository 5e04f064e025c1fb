"""Files of lines: each comes out once, whatever is in it."""

import csv
import gzip
import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tba.errors import UserError
from tba.tables import Refusal, conversation, read_table, splits_of, tool_schemas
from tba.tasks.problem_rows import read_rows

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.lists(st.one_of(st.binary(max_size=30), st.just(b'{"a": 1}'), st.just(b" "), st.just(b"[" * 30_000))))
def test_every_line_that_is_not_blank_comes_out_once_with_its_number(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"\n".join(lines))
    whole = b"\n".join(lines).split(b"\n")  # a line may hold line ends itself
    found = list(read_table(path))
    assert [number for number, _ in found] == [n for n, line in enumerate(whole, 1) if line.strip()]
    assert [number for number, entry in found if entry == {"a": 1}] == [
        n for n, line in enumerate(whole, 1) if line.strip() == b'{"a": 1}'
    ]


def test_what_is_no_object_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n[1]\n{"a": \n\xff\n' + b"1" * 5000 + b"\n")
    reasons = [entry.reason if isinstance(entry, Refusal) else entry for _, entry in read_table(path)]
    assert reasons == [{"a": 1}, "JSON, but no object", "not JSON", "not text in UTF-8", "not JSON"]


def test_a_line_longer_than_the_limit_is_refused_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"a": "x" * 300}) + '\n{"a": 1}\n')
    entries = [entry for _, entry in read_table(path, max_row_bytes=64)]
    assert entries == [Refusal("longer than 64 bytes"), {"a": 1}]


def test_a_file_that_ends_early_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b'{"a": %d}\n' % n for n in range(5000)))
    path = tmp_path / "lines.jsonl.gz"
    path.write_bytes(whole)
    assert len(list(read_table(path))) == 5000
    path.write_bytes(whole[: len(whole) // 2])
    entries = [entry for _, entry in read_table(path)]
    assert len(entries) > 100
    assert isinstance(entries[-1], Refusal)
    assert "any further" in entries[-1].reason
    assert entries[:-1] == [{"a": n} for n in range(len(entries) - 1)]


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        list(read_table(tmp_path / "none.jsonl"))


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_a_parquet_file_without_pyarrow_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails, as where it is not installed
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="needs the package pyarrow"):
        list(read_table(tmp_path / "rows.parquet"))


def test_rows_of_a_parquet_file_are_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    chat = [{"role": "user", "content": "1+1="}]
    rows = [{"prompt": "1+1=", "reward": 0.5, "messages": None}, {"prompt": None, "reward": None, "messages": chat}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert list(read_table(tmp_path / "rows.parquet")) == [(1, rows[0]), (2, rows[1])]
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="as Parquet"):
        list(read_table(tmp_path / "rows.parquet"))


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": 'a, "b"\nc', "answer": "3,5"}, {"prompt": "ü", "answer": ""}]


def written(path: Path) -> Path:
    """Writes the rows to a file in the format of its ending."""
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    text = io.StringIO(newline="")
    if kind in (".csv", ".tsv"):
        table = csv.DictWriter(text, ["prompt", "answer"], delimiter="," if kind == ".csv" else "\t")
        table.writeheader()
        table.writerows(ROWS)
    elif kind == ".json":
        json.dump(ROWS, text, indent=2)
    else:
        text.write("".join(json.dumps(row) + "\n" for row in ROWS))
    body = text.getvalue().encode("utf-8-sig" if kind == ".csv" else "utf-8")  # as spreadsheets write it
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "jsonl.gz", "json.gz", "csv.gz", "tsv.gz"])
def test_a_file_of_any_format_has_the_same_rows(tmp_path: Path, ending: str) -> None:
    empty = None if ending.startswith(("csv", "tsv")) else ""  # a cell without a text has no value
    rows = [{name: text or empty for name, text in row.items()} for row in ROWS]
    assert [row for _, row in read_table(written(tmp_path / f"rows.{ending}"))] == rows


def test_columns_of_half_the_precision_and_of_bytes_are_what_was_written(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {
        "answer": pyarrow.array([0.1, 1e-7, None, 2.0], pyarrow.float32()),
        "prompt": pyarrow.array([b"0.1?", "ü".encode(), None, b"\xff"], pyarrow.binary()),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    rows = [row for _, row in read_table(tmp_path / "rows.parquet")]
    assert [row["answer"] for row in rows] == [0.1, 1e-7, None, 2.0]
    assert [row["prompt"] for row in rows] == ["0.1?", "ü", None, "b'\\xff'"]


def test_floats_of_few_bits_are_what_was_written_however_deep_they_are(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    values = [{"ground_truth": 0.1, "style": "rule"}, None]
    for narrow in (pa.float32(), pa.float16()):
        kinds = {
            "plain": (narrow, [0.1, None]),
            "struct": (pa.struct([("ground_truth", narrow), ("style", pa.string())]), values),
            "list": (pa.list_(narrow), [[0.1, None, -2.5], None]),
            "large": (pa.large_list(narrow), [[0.1], []]),
            "fixed": (pa.list_(narrow, 2), [[0.1, 0.7], None]),
            "map": (pa.map_(pa.string(), narrow), [[("a", 0.1)], None]),
            "deep": (pa.list_(pa.struct([("x", pa.list_(narrow))])), [[{"x": [0.1, None]}], None]),
        }
        table = pa.table({name: pa.array(column, kind) for name, (kind, column) in kinds.items()})
        parquet.write_table(table, tmp_path / "rows.parquet")
        with pa.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as stream:
            stream.write_table(table)
        columns = {name: json.loads(json.dumps(column)) for name, (_, column) in kinds.items()}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        for name in ("rows.parquet", "rows.arrow"):
            assert [row for _, row in read_table(tmp_path / name)] == rows


def test_a_label_of_a_data_set_is_its_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["A", "B", "C"])
    features = {"answer": label, "several": datasets.Sequence(label), "in": {"answer": label}, "by": [{"of": label}]}
    rows = [{"answer": 1, "several": [0, 2], "in": {"answer": 2}, "by": [{"of": 0}]}] * 2
    data = datasets.Dataset.from_list([*rows, {"answer": -1}], features=datasets.Features(features))
    named = {"answer": "B", "several": ["A", "C"], "in": {"answer": "C"}, "by": [{"of": "A"}]}
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "rows.parquet")
    for path in (tmp_path / "saved", tmp_path / "rows.parquet"):
        *found, last = (row for _, row in read_table(path))
        assert found == [named, named]
        assert last["answer"] is None  # of the hidden labels of a competition
    import pyarrow
    from pyarrow import parquet

    for odd in (b"no JSON", b'{"info": 3}', b'{"info": {"features": {"answer": {"_type": "ClassLabel", "names": 3}}}}'):
        table = pyarrow.table({"answer": [1]}).replace_schema_metadata({b"huggingface": odd})
        parquet.write_table(table, tmp_path / "odd.parquet")
        assert list(read_table(tmp_path / "odd.parquet")) == [(1, {"answer": 1})]


def test_an_array_may_be_on_any_number_of_lines_and_its_items_are_checked_like_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for text in ('\n\n [{"a": 1}, 2]', '\ufeff[{"a": 1},\n2\n]\n'):
        path.write_text(text)
        assert list(read_table(path)) == [(1, {"a": 1}), (2, Refusal("JSON, but no object", "int"))]
    path.write_text('[{"a": 1}, ')
    assert [entry.reason for _, entry in read_table(path) if isinstance(entry, Refusal)] == ["not JSON"]


def test_a_row_of_csv_has_as_many_cells_as_the_first_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\n1+1=,2\n\n1+2=\n1,2,3\n")
    entries = [entry.detail if isinstance(entry, Refusal) else entry for _, entry in read_table(path)]
    assert entries == [{"prompt": "1+1=", "answer": "2"}, "1, not 2", "3, not 2"]
    path.write_bytes(b"prompt,answer\n1+1=,2\n\xff,3\n")
    assert [isinstance(entry, Refusal) for _, entry in read_table(path)][-1]
    path.write_text("prompt,prompt\n1,2\n")
    with pytest.raises(UserError, match="two columns named 'prompt'"):
        list(read_table(path))


COLUMNS = {"prompt": ["1+1=", "a;b"], "answer": ["2", "3"]}
SAME = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "a;b", "answer": "3"}]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_text_is_read_in_the_encoding_that_its_first_bytes_name(tmp_path: Path, encoding: str, packed: bool) -> None:
    texts = {
        "csv": "prompt,answer\r\n1+1=,2\r\na;b,3\r\n",
        "tsv": "prompt\tanswer\n1+1=\t2\na;b\t3\n",
        "jsonl": "".join(json.dumps(row) + "\n" for row in SAME),
        "json": json.dumps(SAME),
    }
    for ending, text in texts.items():
        path = tmp_path / (f"rows.{ending}.gz" if packed else f"rows.{ending}")
        path.write_bytes(gzip.compress(text.encode(encoding)) if packed else text.encode(encoding))
        assert list(read_table(path)) == list(enumerate(SAME, 1))


def test_a_text_whose_encoding_is_not_known_is_said_to_be_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for text in ("prompt,answer\nü,2\n".encode("latin-1"), "prompt,answer\n1,2\n".encode("utf-16-le")):
        path.write_bytes(text)
        assert [entry.reason for _, entry in read_table(path) if isinstance(entry, Refusal)] == ["not text in UTF-8"]
        with pytest.raises(UserError, match=r"^row 1 of .*rows.csv is not text in UTF-8 \(.*\): save it in UTF-8$"):
            read_rows(path)
    path.write_bytes("prompt,answer\n1,2\n".encode("utf-16")[:-1])  # half of a character at the end
    assert [row for _, row in read_table(path) if isinstance(row, dict)] == []
    assert "any further" in str([row for _, row in read_table(path)][-1])


@pytest.mark.parametrize("first", ["", "sep=S\n"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_cells_may_be_separated_as_in_other_countries(tmp_path: Path, separator: str, first: str) -> None:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, ["prompt", "answer"], delimiter=separator)
    table.writeheader()
    table.writerows(SAME)
    (tmp_path / "rows.csv").write_text(first.replace("S", separator) + text.getvalue())
    assert [row for _, row in read_table(tmp_path / "rows.csv")] == SAME
    (tmp_path / "one.csv").write_text("prompt\n1+1=\n2;3\n")  # one column has no separator
    assert [row for _, row in read_table(tmp_path / "one.csv")] == [{"prompt": "1+1="}, {"prompt": "2;3"}]


CHAT = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}


WITH_TOOLS = {"question": "1+1=", "tools": [{"type": "function"}]}
PAIR = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}  # TRL's


@pytest.mark.parametrize(
    ("document", "rows"),
    [
        ({"train": SAME}, SAME),
        ({"version": "1.1", "data": SAME}, SAME),
        (COLUMNS, SAME),
        ({name: dict(zip("01", column, strict=True)) for name, column in COLUMNS.items()}, SAME),  # by pandas
        (SAME[0], SAME[:1]),
        (CHAT, [CHAT]),
        (PAIR, [PAIR]),
        (
            {"question": "1+1=", "tools": [{"type": "function"}]},
            [{"question": "1+1=", "tools": [{"type": "function"}]}],
        ),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_document_is_its_list_of_rows_its_columns_or_one_row(
    tmp_path: Path, document: dict[str, object], rows: list[object], indent: int | None
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(document, indent=indent))
    assert list(read_table(tmp_path / "rows.json")) == list(enumerate(rows, 1))


def test_several_lists_of_rows_in_one_document_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({"train": SAME, "test": SAME}))
    with pytest.raises(UserError, match=r"several lists of rows \(train, test\): give a file of each, as train.json"):
        list(read_table(tmp_path / "rows.json"))


def test_lines_in_a_file_with_the_name_of_a_document_are_rows_even_where_they_are_columns(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text((json.dumps(COLUMNS) + "\n") * 2)
    assert [row for _, row in read_table(tmp_path / "rows.json")] == [COLUMNS, COLUMNS]
    (tmp_path / "rows.jsonl").write_text(json.dumps(COLUMNS))
    assert [row for _, row in read_table(tmp_path / "rows.jsonl")] == [COLUMNS]


def test_a_folder_that_datasets_saved_has_the_rows_that_were_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    chat = [{"role": "user", "content": "1+1=", "name": None}, {"role": "assistant", "content": "2", "name": "bot"}]
    rows = [{"prompt": chat, "n": n, "info": {"index": n}} for n in range(3)]
    train, test = datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows[:1])
    train.save_to_disk(tmp_path / "one", num_shards=2)
    assert list(read_table(tmp_path / "one")) == list(enumerate(rows, 1))
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")
    assert splits_of(tmp_path / "both") == {name: tmp_path / "both" / name for name in ("train", "test")}
    assert list(read_table(tmp_path / "both" / "test")) == [(1, rows[0])]
    with pytest.raises(UserError, match=r"has several splits: give the folder of one \(.*both/train, "):
        list(read_table(tmp_path / "both"))
    with pytest.raises(UserError, match=r"not one that datasets saved \(no state.json\)"):
        list(read_table(tmp_path))
    (tmp_path / "one" / "state.json").write_text('{"_data_files": [{"filename": "../both/train/x.arrow"}]}')
    assert list(read_table(tmp_path / "one")) == []  # a name that leads out of the folder is none


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


def test_a_message_keeps_its_calls_its_name_and_whatever_else_it_has() -> None:
    said = [
        {"role": "user", "content": "1+2?", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None},
        {"role": "tool", "content": "3", "tool_call_id": "1", "tool_calls": None},
    ]
    assert conversation(said) == (
        {"role": "user", "content": "1+2?", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    )


def test_arguments_are_an_object_whether_a_file_has_them_as_one_or_as_its_text() -> None:
    """As text they are OpenAI's; templates write them as JSON once more."""
    as_text = {"function": {"name": "add", "arguments": '{"a": null, "b": 2}'}}
    (message,) = conversation([{"role": "assistant", "content": "", "tool_calls": [as_text]}])
    assert message["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": None, "b": 2}}}]
    odd = {"function": {"name": "add", "arguments": "1 and 2"}}
    assert conversation([{"role": "assistant", "content": "", "tool_calls": [odd]}]) == (
        {"role": "assistant", "content": "", "tool_calls": [odd]},
    )


def test_parts_of_text_are_one_text_and_other_parts_are_refused() -> None:
    text, image = {"type": "text", "text": "What is "}, {"type": "image", "image": "x.png"}
    parts = [text, {"type": "text", "text": "this?", "cache_control": None}]
    assert conversation([{"role": "user", "content": parts}]) == ({"role": "user", "content": "What is this?"},)
    assert isinstance(conversation([{"role": "user", "content": [text, image]}]), Refusal)


def test_schemas_lose_the_fields_that_a_column_gave_them_from_others() -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": {"type": "int"}, "y": None}, "enum": None}}}
    assert tool_schemas([tool]) == ({"function": {"name": "f", "parameters": {"properties": {"x": {"type": "int"}}}}},)
    assert tool_schemas(None) == ()
    assert isinstance(tool_schemas(["f"]), Refusal)
