"""Instructions that a function can check: what fulfils each kind and what does not, ours and IFEval's."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.errors import UserError
from tba.rewards import ifeval, instructions
from tba.rewards.ifeval import IfEvalReward, fulfils, instruction_kinds, loose_forms
from tba.rewards.instructions import CHECKS, ShareFulfilled, is_fulfilled
from tba.types import Completion, Prompt, StopReason, Version

QUESTION = "Why do people like tea?"
FULFILLED: list[tuple[str, dict[str, Any], str, str]] = [  # kind, arguments, what fulfils it, what does not
    ("least_words", {"count": 3}, "It is warm.", "It is."),
    ("words_between", {"low": 3, "high": 4}, "It is warm.", "It is."),
    ("sentences", {"count": 2}, 'It costs 3.50 a cup. "Nice!"', "It is warm."),
    ("first_word", {"word": "Well"}, "Well, it is warm.", "Welling up."),
    ("parentheses", {}, "It is warm (mostly).", "It is warm :( )"),
    ("numbered_list", {"items": 2}, "1. Warm\n2. Cheap", "1. Warm\n2. Cheap\n3. Green"),
    ("hashtags", {"count": 1}, "Warm #tea", "Item #1 is warm"),
    ("figures", {"count": 1}, "Boil it for 3 minutes.", "Boil it for three minutes."),
    ("title_case", {}, "Tea Is the Best of Drinks", "Tea is Good"),
    ("capital_words", {"count": 1}, "It is VERY warm.", "I like it."),
    ("asks", {}, "Is it warm? Yes.", "It is warm."),
    ("no_letter", {"letter": "b"}, "It is warm.", "Boil it."),
    ("one_line", {}, "It is warm.\n", "It is\nwarm."),
    ("colon", {}, "Reason: warmth.", "It is 3:15 now."),
    ("name_twice", {"word": "tea"}, "Tea is tea.", "Tea in a teapot."),
    ("punctuation:no_comma", {}, "It is warm.", "Warm, and good."),
    ("startend:end_checker", {"end_phrase": "The end."}, "It is warm. the end.", "The end. Warm."),
    ("keywords:existence", {"keywords": ["warm", "water"]}, "Water gets WARM.", "It is warm."),
    ("keywords:forbidden_words", {"forbidden_words": ["is", "it"]}, "This cup!", "It was warm."),
    ("keywords:letter_frequency", {"letter": "m", "let_frequency": 2, "let_relation": "less than"}, "Warm", "Mum"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "Very warm", "It is warm."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "Warm.\n***\nCheap.", "Warm.\n\nCheap."),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2}, "It is. It was.", "It is."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* Warm\n* Cheap", "* Warm"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "It is *warm*.", "It is warm."),
    ("detectable_format:title", {}, "<<Tea>> It is warm.", "Tea: it is warm."),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}, "Dear [name]", "Dear name"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Warm.\nP.S. Cheap.", "Warm."),
    ("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 2}, "SO WARM.", "SO"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "arguments", "good", "bad"), FULFILLED, ids=[case[0] for case in FULFILLED])
def test_a_kind_is_fulfilled_by_one_answer_and_not_by_the_other(
    kind: str, arguments: dict[str, Any], good: str, bad: str
) -> None:
    instruction = {"kind": kind, "arguments": arguments}
    assert is_fulfilled(instruction, QUESTION, good)
    assert not is_fulfilled(instruction, QUESTION, bad)
    assert not is_fulfilled(instruction, QUESTION, " \n")


def test_every_kind_of_ours_is_among_these() -> None:
    assert CHECKS.keys() == {case[0] for case in FULFILLED if ":" not in case[0]}


@settings(max_examples=25)
@given(st.text(max_size=200))
def test_any_answer_gets_a_verdict(answer: str) -> None:
    for kind, arguments, _, _ in FULFILLED:
        assert is_fulfilled({"kind": kind, "arguments": arguments}, QUESTION, answer) in (True, False)


@pytest.mark.parametrize(
    "answer", ["[" * 100_000, '{"a":' * 50_000, "__import__('os').system('exit 1')", "{" + "1" * 5000]
)
def test_an_answer_on_which_a_check_breaks_does_not_fulfil_it(answer: str) -> None:
    """JSON that is nested too deeply raises `RecursionError` in IFEval's own check; code is a text like another."""
    assert not fulfils("detectable_format:json_format", {}, QUESTION, answer)


def test_an_unknown_kind_is_one_sentence() -> None:
    with pytest.raises(UserError, match="there is no instruction 'rhyme'"):
        is_fulfilled({"kind": "rhyme", "arguments": {}}, QUESTION, "a")
    with pytest.raises(UserError, match="IFEval has no kind of instruction 'count:rhymes'"):
        is_fulfilled({"kind": "count:rhymes", "arguments": {}}, QUESTION, "a")
    for kind, arguments in (
        ("punctuation:no_comma", {"many": 1}),
        ("detectable_format:title", {"many": 1}),
        ("detectable_content:postscript", {"postscript_marker": "P.S.("}),
    ):
        with pytest.raises(UserError, match="does not take"):
            is_fulfilled({"kind": kind, "arguments": arguments}, QUESTION, "a")


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "if_verifiable.ifeval.instructions_registry", None)
    ifeval._kinds.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'tba-rl\[instruct\]'"):
        instruction_kinds()


def judged(
    reward: ShareFulfilled | IfEvalReward, fields: dict[str, Any], answer: str
) -> tuple[float, dict[str, float]]:
    prompt = Prompt("instruct", np.ones(1, np.int32), QUESTION, {"question": QUESTION, **fields})
    completion = Completion(np.ones(1, np.int32), answer, StopReason.EOS, (Version(), Version()))
    (found,) = reward.judge([(prompt, completion)])
    return found.reward, dict(found.parts)


def test_the_reward_is_the_share_of_the_instructions_and_its_parts_say_which() -> None:
    asked = [
        {"kind": "asks", "arguments": {}},
        {"kind": "colon", "arguments": {}},
        {"kind": "one_line", "arguments": {}},
    ]
    found, parts = judged(ShareFulfilled(), {"instructions": asked}, "Why: it is warm.")
    assert found == pytest.approx(2 / 3)
    assert parts == {"asks": 0.0, "colon": 1.0, "one_line": 1.0}


def test_ifeval_is_strict_for_a_whole_answer_and_loose_for_its_middle() -> None:
    """Without its first line the answer has no comma, so that it is right in the loose reading alone."""
    fields = {"instruction_id_list": ["punctuation:no_comma", "detectable_format:title"], "kwargs": [{}, {}]}
    found, parts = judged(IfEvalReward(), fields, "Sure, here it is:\n<<Tea>> It is warm.")
    assert (found, parts) == (0.0, {"strict": 0.5, "loose": 1.0, "prompt_loose": 1.0})
    assert judged(IfEvalReward(), fields, "<<Tea>> It is warm.") == (
        1.0,
        {"strict": 1.0, "loose": 1.0, "prompt_loose": 1.0},
    )


def test_loose_forms_are_those_of_the_package() -> None:
    from if_verifiable.common import get_loose_transformations

    for answer in ("one line", "*a*\nb\n\nc**", "", "\n\n"):
        assert sorted(loose_forms(answer)) == sorted(get_loose_transformations(answer))


FORMS = st.lists(st.sampled_from([*"[]*-<>\n\t apsPS.x", "p.s.", "P. P. S", "<<", ">>", "\n* a", "\n- b", "\r"]))
OF_THE_PACKAGE = [
    ("detectable_content:number_placeholders", {"num_placeholders": 2}),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}),
    ("detectable_content:postscript", {"postscript_marker": "PS"}),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}),
    ("detectable_format:title", {}),
]


@settings(max_examples=500)
@given(FORMS.map("".join))
def test_the_checks_of_ours_that_are_faster_find_what_those_of_the_package_find(answer: str) -> None:
    for kind, arguments in OF_THE_PACKAGE:
        theirs = ifeval._kinds()[kind](kind)
        theirs.build_description(**arguments)
        assert fulfils(kind, arguments, QUESTION, answer) == (bool(answer.strip()) and theirs.check_following(answer))


@given(st.lists(st.sampled_from([*"\n\t .)1a", "12. ", "\n 3) b", "1\n", "\r"])).map("".join))
def test_a_numbered_list_is_the_numbers_that_begin_a_line_before_a_text(answer: str) -> None:
    items = re.findall(r"^\s*(\d{1,3})[.)]\s+\S", answer, re.MULTILINE)  # the same in quadratic time
    assert instructions._ITEM.findall(answer) == items


def test_all_of_ifevals_kinds_are_known() -> None:
    """The 25 kinds that its 541 prompts have, of which some want files of nltk that nobody downloads here."""
    assert len(instruction_kinds()) == 25
