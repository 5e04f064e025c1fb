"""Preference files: every usual form gives its pairs, and what is malformed is refused and counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.apps.preference.pairs import PreferencePair, folds, held_out_indices, read_pairs
from tba.errors import UserError

A, B = "a short answer", "another one"
MESSAGES = [{"role": "user", "content": "Why?"}]


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"prompt": "P", "chosen": A, "rejected": B}, ("P", A, B)),
        ({"instruction": "Do it", "input": "now", "chosen": A, "rejected": B}, ("Do it\n\nnow", A, B)),
        ({"prompt": "P ", "chosen": f"P {A}", "rejected": f"P {B}"}, ("P ", A, B)),
        (
            {"chosen": f"\n\nHuman: Why?\n\nAssistant: {A}", "rejected": f"\n\nHuman: Why?\n\nAssistant: {B}"},
            ("\n\nHuman: Why?\n\nAssistant:", A, B),
        ),
        (
            {
                "chosen": [*MESSAGES, {"role": "assistant", "content": A}],
                "rejected": [*MESSAGES, {"role": "assistant", "content": B}],
            },
            ("Why?", A, B),
        ),
        ({"info": {"post": "P"}, "summaries": [{"text": B}, {"text": A}], "choice": 1}, ("P", A, B)),
    ],
)
def test_every_usual_form_gives_its_pair(tmp_path: Path, line: dict[str, Any], expected: tuple[str, str, str]) -> None:
    (pair,), report = read_pairs(written(tmp_path / "pairs.jsonl", line))
    assert (pair.prompt, pair.chosen, pair.rejected) == expected
    assert (report.lines, report.pairs, report.refused.total()) == (1, 1, 0)


def test_scores_give_every_pair_that_differs_and_a_document_keeps_them_together(tmp_path: Path) -> None:
    scored = [{"text": text, "score": score} for text, score in (("a", 1), ("b", 0.5), ("c", 1))]
    line = {"document": "P", "doc_id": 7, "summaries": scored}
    pairs, _ = read_pairs(written(tmp_path / "pairs.jsonl", line))
    assert pairs == [PreferencePair("P", "a", "b", "7"), PreferencePair("P", "c", "b", "7")]


def test_what_is_malformed_is_refused_under_its_reason_and_the_rest_is_taken(tmp_path: Path) -> None:
    good = {"prompt": "P", "chosen": A, "rejected": B}
    bad = [
        ({"prompt": "P", "chosen": A}, "no field 'rejected'"),
        ({"prompt": "P", "chosen": A, "rejected": f" {A}\n"}, "two equal answers"),
        ({"prompt": "P", "chosen": A, "rejected": "  "}, "an empty answer"),
        ({"prompt": " ", "chosen": A, "rejected": B}, "an empty prompt"),
        ({"prompt": "P", "chosen": A, "rejected": 3}, "an answer is no text"),
        ({"chosen": A, "rejected": B}, "no prompt, and no dialogues that begin alike"),
        ({"post": "P", "summaries": [{"text": A}, {"text": B}]}, "answers without a choice or a number under 'score'"),
        (
            {"post": "P", "summaries": [{"text": A}, {"text": B}], "choice": 2},
            "a choice that is not between two answers",
        ),
        ([1, 2], "JSON, but no object"),
        ({"prompt": "P\ud800", "chosen": A, "rejected": B}, "half of a surrogate pair in a text"),
        ({"post": "P", "summaries": [{"text": A, "score": 1}]}, "fewer than two answers"),
        ({"post": "P", "summaries": [{"text": A, "score": 1}, {"text": B, "score": 1.0}]}, "answers with equal marks"),
    ]
    pairs, report = read_pairs(written(tmp_path / "pairs.jsonl", good, *(line for line, _ in bad), good))
    assert len(pairs) == 2
    assert report.refused == dict.fromkeys((reason for _, reason in bad), 1)
    assert report.examples["two equal answers"] == "line 3"
    with pytest.raises(UserError, match=r"has no pairs of answers \(no field 'rejected' \(1\)\)"):
        read_pairs(written(tmp_path / "none.jsonl", bad[0][0]))


def test_lines_with_numbers_of_their_own_but_one_prompt_stay_together(tmp_path: Path) -> None:
    lines = [{"id": n, "prompt": "P", "chosen": A, "rejected": f"{B} {n}"} for n in range(3)]
    other = {"id": 9, "prompt": "Q", "chosen": A, "rejected": B}
    pairs, _ = read_pairs(written(tmp_path / "pairs.jsonl", *lines, other))
    assert sorted(map(len, folds(pairs, 2))) == [1, 3]


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 10**400, True, None, "5"])
def test_a_mark_that_is_no_number_is_no_preference(tmp_path: Path, score: Any) -> None:
    bad = {"document": "P", "summaries": [{"text": A, "score": score}, {"text": B, "score": 0.5}]}
    good = {"prompt": "P", "chosen": A, "rejected": B}
    pairs, report = read_pairs(written(tmp_path / "pairs.jsonl", bad, good))
    assert len(pairs) == 1
    assert report.refused == {"answers without a choice or a number under 'score'": 1}


def test_a_gzipped_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"prompt": "P", "chosen": A, "rejected": B}).encode()))
    assert len(read_pairs(path)[0]) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["prompt", "post", "info", "chosen", "rejected", "summaries", "choice", "id", "input"])


@settings(deadline=None, max_examples=150)
@given(st.lists(st.dictionaries(FIELDS, JSON, max_size=5), min_size=1, max_size=4))
def test_no_line_raises_whatever_is_in_it(tmp_path_factory: pytest.TempPathFactory, lines: list[Any]) -> None:
    path = written(tmp_path_factory.mktemp("fuzz") / "pairs.jsonl", *lines)
    try:
        pairs, report = read_pairs(path)
    except UserError:
        return
    assert report.lines == len(lines)
    assert all(p.prompt.strip() and p.chosen.strip() and p.rejected.strip() for p in pairs)


def test_a_prompt_is_taken_off_both_answers_or_neither_and_nesting_has_an_end(tmp_path: Path) -> None:
    deep: Any = "P"
    for _ in range(400):
        deep = [deep]
    own = {"prompt": "Say hi", "chosen": "Say hi to all", "rejected": "No"}
    pairs, report = read_pairs(written(tmp_path / "pairs.jsonl", own, {**own, "prompt": deep}))
    assert pairs == [PreferencePair("Say hi", "Say hi to all", "No", "Say hi")]
    assert report.refused == {"no prompt, and no dialogues that begin alike": 1}


@given(st.lists(st.integers(0, 20), min_size=2), st.floats(0.01, 0.99))
def test_a_share_of_the_documents_is_held_out_whole(documents: list[int], held_out: float) -> None:
    pairs = [PreferencePair("p", "a", "b", str(d)) for d in documents]
    count = len(set(documents))
    if count < 2:
        return
    held = held_out_indices(pairs, held_out)
    names = {documents[i] for i in held}
    assert names.isdisjoint(d for i, d in enumerate(documents) if i not in set(held))
    assert len(names) == min(count - 1, max(1, round(held_out * count)))


@given(st.lists(st.integers(0, 20), min_size=2), st.integers(2, 5))
def test_folds_are_a_partition_by_document_of_nearly_equal_parts(documents: list[int], count: int) -> None:
    pairs = [PreferencePair("p", "a", "b", str(d)) for d in documents]
    if len(set(documents)) < count:
        with pytest.raises(UserError, match="a document for each"):
            folds(pairs, count)
        return
    parts = folds(pairs, count)
    assert sorted(place for part in parts for place in part) == list(range(len(pairs)))
    names = [{pairs[place].document for place in part} for part in parts]
    assert sum(map(len, names)) == len(set(documents))
    assert max(map(len, names)) - min(map(len, names)) <= 1
