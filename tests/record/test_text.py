"""What is said of texts: without the chat template around each of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tba.record.text import frame_of, within

BEGINS, ENDS = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def test_prompts_are_shown_without_their_chat_template() -> None:
    questions = ["What is tea? Be short.", "What is salt? Be long.", "What is x < y?\nSay it."]
    frame = frame_of(BEGINS + question + ENDS for question in questions)
    assert frame == (BEGINS, ENDS)
    assert [within(frame, BEGINS + question + ENDS) for question in questions] == questions


def test_words_that_questions_share_are_no_frame() -> None:
    assert frame_of(["345+678=", "345+100=", "345+1="]) == ("", "")
    assert frame_of(["What is tea?", "What is salt?"]) == ("", "")
    assert frame_of([BEGINS, BEGINS]) == frame_of([]) == ("", "")


@given(st.sets(st.text("ab<>\n", max_size=6), min_size=2), st.text("ab<>\n", max_size=6))
def test_nothing_but_the_frame_is_left_out(texts: set[str], around: str) -> None:
    framed = [around + text + "\n" + around for text in texts]
    begins, ends = frame_of(framed)
    assert all(text.startswith(begins) and text.endswith(ends) for text in framed)
    assert all(within((begins, ends), text) in text for text in framed)
