"""Labelled texts: what is taken of a file, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tba.apps.red_team.labelled import LabelledFields, read_labelled
from tba.errors import UserError


def test_csv_files_with_and_without_a_heading_and_json_lines_say_the_same(tmp_path: Path) -> None:
    rows = [("one, with a comma", 1), ("two\nlines", 0), ("one, with a comma", 0), ("three", 2)]
    bare, headed, lines = tmp_path / "bare.csv.gz", tmp_path / "headed.csv", tmp_path / "lines.jsonl"
    written = "".join(f'"{text}",{label}\n' for text, label in rows)
    bare.write_bytes(gzip.compress(written.encode()))
    headed.write_text("tweet,class\n" + written)
    lines.write_text("".join(json.dumps({"text": t, "label": n}) + "\n" for t, n in rows) + "nonsense\n")
    for path, fields, refused in (
        (bare, LabelledFields("0", "1"), {"a text that was there before": 1}),
        (headed, LabelledFields("tweet", "class"), {"a text that was there before": 1}),
        (lines, LabelledFields(), {"a text that was there before": 1, "not JSON": 1}),
    ):
        found = read_labelled(path, fields)
        assert found.texts == ["one, with a comma", "two\nlines", "three"]
        assert found.toxic == [True, False, False]
        assert dict(found.refused) == refused
    assert read_labelled(headed, LabelledFields("tweet", "class", ("0", "2"))).toxic == [False, True, True]


def test_csv_of_a_european_spreadsheet_is_read_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes("text;label\r\nschön, so;1\r\nkühl;0\r\n".encode("utf-16"))
    labelled = read_labelled(tmp_path / "rows.csv", LabelledFields())
    assert (labelled.texts, labelled.toxic) == (["schön, so", "kühl"], [True, False])


def test_truth_values_and_words_are_labels_whatever_their_case(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    labels = [True, False, "Toxic", "fine", 1, 0, None]
    path.write_text("".join(json.dumps({"text": str(n), "label": x}) + "\n" for n, x in enumerate(labels)))
    found = read_labelled(path, LabelledFields())
    assert found.toxic == [True, False, True, False, True, False]
    assert dict(found.refused) == {"no label": 1}


def test_a_file_without_labelled_texts_is_refused_with_its_reasons(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"no labelled text \(no text \(1\)\): name its fields"):
        read_labelled(path, LabelledFields())
    with pytest.raises(UserError, match="cannot be read"):
        read_labelled(tmp_path / "none.csv", LabelledFields())
