"""What is said of texts, without the chat template around each of them, and of numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tba
from tba.record.text import frame_of, hundredfold, percent, plural, strip_frame
from tba.types import Version

BEGINS, ENDS = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def test_prompts_are_shown_without_their_chat_template() -> None:
    questions = ["What is tea? Be short.", "What is salt? Be long.", "What is x < y?\nSay it."]
    frame = frame_of(BEGINS + question + ENDS for question in questions)
    assert frame == (BEGINS, ENDS)
    assert [strip_frame(frame, BEGINS + question + ENDS) for question in questions] == questions


def test_words_that_questions_share_are_no_frame() -> None:
    assert frame_of(["345+678=", "345+100=", "345+1="]) == ("", "")
    assert frame_of(["What is tea?", "What is salt?"]) == ("", "")
    assert frame_of([BEGINS, BEGINS]) == frame_of([]) == ("", "")


@given(st.sets(st.text("ab<>\n", max_size=6), min_size=2), st.text("ab<>\n", max_size=6))
def test_nothing_but_the_frame_is_left_out(texts: set[str], around: str) -> None:
    framed = [around + text + "\n" + around for text in texts]
    begins, ends = frame_of(framed)
    assert all(text.startswith(begins) and text.endswith(ends) for text in framed)
    assert all(strip_frame((begins, ends), text) in text for text in framed)


ROUNDED = {  # 100 times it, a half away from zero
    0.969375 - 0.362875: "60.7",
    0.6065: "60.7",
    -0.6065: "-60.7",
    0.3625: "36.3",
    0.96875: "96.9",
    0.1 + 0.2: "30.0",
    1.0: "100.0",
    0.0: "0.0",
}


def test_a_figure_is_rounded_as_the_decimal_that_it_stands_for() -> None:
    assert {share: hundredfold(share) for share in ROUNDED} == ROUNDED
    assert (hundredfold(0.6065, sign=True), percent(0.3625), percent(0.36255, 2)) == ("+60.7", "36.3 %", "36.26 %")
    assert (hundredfold(float("nan")), hundredfold(float("inf")), hundredfold(1e300)[:2]) == ("nan", "inf", "10")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_report_page_rounds_in_the_same_way() -> None:
    page = (Path(tba.__file__).parent / "record" / "page" / "report.js").read_text()
    rule = page[page.index("  const tenths") : page.index("  const percent")]
    program = f"{rule} console.log(JSON.stringify({json.dumps(list(ROUNDED))}.map(tenths)))"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == list(ROUNDED.values())


def test_a_version_and_a_number_of_cores_are_named_as_people_do() -> None:
    named = [Version(0, 50), Version(2, 50), Version(0, 50).average, Version.parse("none")]
    assert [version.in_words for version in named] == [
        *("step 50", "step 50 of incarnation 2", "the average at step 50", "none")
    ]
    assert [plural(n, "core") for n in (1, 2, "?")] == ["1 core", "2 cores", "? cores"]
