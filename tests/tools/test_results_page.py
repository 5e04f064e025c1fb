"""The tables of `docs/results.md` are those of the csv files, and what is typed says where it is from."""

import re
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def text(tool: ModuleType) -> str:
    found: str = tool.PAGE.read_text(encoding="utf-8")
    return found


def test_every_table_of_a_csv_file_is_on_the_page_as_the_file_gives_it(tool: ModuleType, text: str) -> None:
    assert tool.differing(text) == [], "run `python tools/results_page.py`"
    assert tool.printed(text) == text


def test_every_csv_file_is_in_a_table(tool: ModuleType) -> None:
    tool.study.cache_clear()
    for name in tool.TABLES:
        tool.table(name)
    assert tool.study.cache_info().currsize == len(list((tool.PAGE.parent / "results").glob("*.csv")))


def test_every_other_table_says_that_it_is_typed_and_of_what(tool: ModuleType, text: str) -> None:
    typed = tool.BLOCK.sub("", text)
    tables = re.findall(r"^(.*)\n\n(\|.*)\n\|---", typed, flags=re.MULTILINE)
    assert len(tables) == len(re.findall(r"^\|---", typed, flags=re.MULTILINE)) == 12
    assert [head for said, head in tables if not re.match(r"By hand, from .*:$", said)] == []


def test_a_digit_that_is_not_in_the_csv_file_is_found_and_put_right(tool: ModuleType, text: str) -> None:
    wrong = text.replace("94.4 ± 0.5 | 93.8 | 12.0", "94.5 ± 0.5 | 93.8 | 12.0")
    assert wrong != text
    assert tool.differing(wrong) == ["staleness"]
    assert tool.printed(wrong) == text
    without = text.replace("<!-- table noise -->", "<!-- table nois -->")
    assert tool.differing(without) == ["noise", "nois"]


def test_a_table_gives_the_worst_seed_and_the_largest_fall(tool: ModuleType) -> None:
    runs = [
        {"pass@1/sampled": a, "fall": f, "kl": k}
        for a, f, k in [("0.9", "0", "1"), ("0.8", "0.125", ""), ("0.7", "0.01", "2")]
    ]
    assert tool.brief(runs) == "80.0 ± 10.0 (70.0; 12.5)"
    assert tool.spread(runs, "kl") == "1.5 ± 0.7 (2 of 3)"
    assert tool.against(runs, runs).startswith("+0.0 [-22.7, +22.7]")
