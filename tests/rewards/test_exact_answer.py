"""Marking one answer: what counts as giving it, and that any text gets a verdict."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.errors import UserError
from tba.rewards.exact_answer import ExactAnswer, grade
from tba.rewards.number_text import MAX_DIGITS, numbers, quantity, to_plain_text
from tba.types import Completion, Prompt, StopReason, Version

RIGHT = [
    ("\\boxed{-\\left(\\frac{1}{2}\\right)}", "-1/2"),
    ("The answer is $-\\mathbf{3}$.", "-3"),
    ("The profit is -**$20**.", "-20"),
    ("- **3**", "3"),  # an item of a list
    ("\\boxed{-(3)}", "-3"),
    ("\\boxed{3 - (5) = -2}", "-2"),
    ("\\boxed{10²}", "100"),
    ("\\boxed{5 cm²}", "5"),
    ("#### 10⁻³", "0.001"),
    ("\\boxed{f(2)=6}", "6"),
    ("\\boxed{a_5 = 32}", "32"),
    ("#### 3 apples + 4 apples = 7 apples", "7"),
    ("#### 72 (with x = 3)", "72"),
    ("#### 72 apples where x = 3", "72"),
    ("\\boxed{\\frac{3}{-4}}", "-0.75"),
    ("\\boxed{\\frac{-1}{-2}}", "0.5"),
    ("\\boxed{5 N \\cdot m}", "5"),
    ("**5**", "5"),
    ("The answer is 72.", "72"),
    ("72", "72"),
    ("72...", "72"),
    ("72!", "72"),
    ("So 48 + 24 = 72", "72"),
    ("She has 12 apples", "12"),
    ("12apples", "12"),
    ("It is 5 km/h.", "5"),
    ("5 km", "5km"),
    ("1,234", "1234"),
    ("1234", "1,234"),
    ("1,000,000", "1000000"),
    ("5 000", "5000"),
    ("5000", "5 000"),
    ("It has 1 234 050.5 of them", "1234050.5"),
    ("-5 000 km", "-5000"),
    ("2 5 000", "5000"),
    ("12 345", "345"),
    ("#### 12 345", "12"),
    ("1e3", "1000.0"),
    ("1000", "1e3"),
    ("**5**", "5"),
    ("#### **1e3**", "1000"),
    ("5.0", "**5**"),
    ("5 cm", "5 cm"),
    ("5", "5 cm"),
    ("5 centimetres", "5 cm"),
    ("\\boxed{5\\text{ cm}^2}", "5 square centimeters"),
    ("5 sq. ft", "5 ft^2"),
    ("60 mph", "60 miles per hour"),
    ("60 km/h", "60 kilometers per hour"),
    ("5 in total", "5 cm"),
    ("5 joules", "5 J"),
    ("20 °C", "20 degrees Celsius"),
    ("90 degrees in all", "90 degrees"),
    ("at 3 pm", "3 p.m."),
    ("\\$5", "5 dollars"),
    ("\\$5", "5 dollars per hour"),
    ("\\$5", "$5"),
    ("-\\$5", "-5 dollars"),
    ("€5", "5"),
    ("5 red apples", "5 apples"),
    ("50 percent", "50%"),
    ("1,234,567.50", "1234567.5"),
    ("1 000 000 with no-break spaces: 1\u00a0000\u00a0000", "1000000"),
    ("5'000", "5000"),
    ("1_000", "1000"),
    ("$5.00", "5"),
    ("$1,234.50.", "1234.5"),
    ("US$5", "5"),
    ("€ 7", "7"),
    ("Rs.500", "500"),
    ("5", "$5.00"),
    ("50%", "50"),
    ("50 percent", "50%"),
    ("50\\%", "50"),
    ("15.0", "15"),
    ("15", "15.0"),
    ("15.00 dollars", "15"),
    ("3.14159", "3.14159"),
    ("0.1", "0.10"),
    (".5", "0.5"),
    ("x=.5", "1/2"),
    ("007", "7"),
    ("+7", "7"),
    ("-5", "-5"),
    ("\u22125", "-5"),
    ("the answer is \u22125.", "-5"),
    ("\u20135", "-5"),
    ("- 5", "-5"),
    ("x = - 5", "-5"),
    ("answer: - 5", "-5"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("-$1,234.50", "-1234.5"),
    ("(-5)", "-5"),
    ("**-5**", "-5"),
    ("5 -3", "-3"),
    ("10-5", "5"),
    ("pages 3\u20135", "5"),
    ("1/2", "0.5"),
    ("3 / 4", "0.75"),
    ("-1/3", "-1/3"),
    ("1 1/2", "1.5"),
    ("1\u00bd cups", "1.5"),
    ("in 2024 48/2", "24"),
    ("-\\frac{1}{2}", "-1/2"),
    ("\\dfrac12", "0.5"),
    ("1\\frac{1}{2}", "1.5"),
    ("1e3", "1000"),
    ("1.5E-3", "0.0015"),
    ("3 \\times 10^{5}", "300000"),
    ("3 x 10^5", "300000"),
    ("10^6", "1000000"),
    ("1{,}234", "1234"),
    ("10\\,000", "10000"),
    ("5\\text{ cm}^2", "5"),
    ("12 cm^2", "12"),
    ("90^\\circ", "90"),
    ("She paid 72 on 2024-01-15", "72"),
    ("She paid 72 on 1/15/2024", "72"),
    ("72 with version 1.2.3", "72"),
    ("72 as in figure B2", "72"),
    ("\u7b54\u6848\u662f72", "72"),
    ("**72**", "72"),
    ("$72$", "72"),
    ("1,2,3", "3"),
    ("\\boxed{72}", "72"),
    ("\\boxed{72} and 3 checks", "72"),
    ("\\boxed{3}, no: \\boxed{72}", "72"),
    ("\\boxed{\\text{72 apples}}", "72"),
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("\\boxed{x = 72}", "72"),
    ("\\boxed{{72}}", "72"),
    ("\\boxed{\\boxed{72}}", "72"),
    ("so \\boxed{72", "72"),
    ("\\boxed{} 72", "72"),
    ("#### 72", "72"),
    ("####72", "72"),
    ("#### 1,200", "1200"),
    ("#### $5.00", "5"),
    ("#### 72 apples\nThere were 5 pears.", "72"),
    ("#### 6 * 12 = 72", "72"),
    ("#### 72 (with x = 3)", "72"),
    ("#### 3\nno\n#### 72", "72"),
    ("#### \\boxed{72}", "72"),
    ("\\boxed{5}\n#### 72", "72"),
    ("#### 5\n\\boxed{72}", "72"),
    ("#### Step 1: take 5\nso it is 72", "72"),
    ("#### 2. Add them up\n60 + 12 = 72", "72"),
    ("72\n####", "72"),
    ("Paris", "paris"),
    ("The answer is **Paris**.", "Paris"),
    ("\\boxed{\\text{Paris}}", "Paris"),
    ("#### Paris\nor 3", "paris"),
    ("#### Step 1: think\nIt is Paris", "Paris"),
    ("x+1", "x + 1"),
    ("the option (B)", "(B)"),
    ("at 3:30", "3:30"),
]

WRONG = [
    ("\\boxed{-\\left(\\frac{1}{2}\\right)}", "1/2"),
    ("The answer is $-\\mathbf{3}$.", "3"),
    ("\\boxed{-(3)}", "3"),
    ("\\boxed{5 \\times 6}", "5"),
    ("#### 5*6", "5"),
    ("\\boxed{3 \\cdot 2^5}", "3"),
    ("\\boxed{10²}", "10"),
    ("It isn\u2019t 5", "5"),
    ("The answer is B, it isn\u2019t A", "A"),
    ("The statement isn\u2019t true", "true"),
    ("\\boxed{12,345,6}", "12"),
    ("\\boxed{1,2345}", "1"),
    ("\\boxed{log(5)}", "5"),
    ("\\boxed{5_{8}}", "5"),
    ("\\boxed{5 \\neq 6}", "5"),
    ("#### 3 apples + 4 apples = 7 apples", "3"),
    ("\\boxed{x=5, y=6}", "6"),
    ("", "72"),
    ("I do not know.", "72"),
    ("seventy-three", "72"),
    ("seventy-two or three", "72"),
    ("720", "72"),
    ("7.2", "72"),
    ("72.5", "72"),
    ("5 cm", "5 inches"),
    ("#### 5 inches", "5 cm"),
    ("5 cm", "5 cm^2"),
    ("5 km", "5 km/h"),
    ("5 cents", "5 dollars"),
    ("5 volts", "5 ohms"),
    ("5 V", "5 W"),
    ("5 J", "5 N"),
    ("5 nm", "5 mm"),
    ("5 acres", "5 hectares"),
    ("20 degrees Celsius", "20 degrees Fahrenheit"),
    ("20 °C", "20 °F"),
    ("\\boxed{20^\\circ\\text{C}}", "20 degrees Fahrenheit"),
    ("at 3 p.m.", "3 a.m."),
    ("at 3 PM", "3 a.m."),
    ("\\$5", "5 cents"),
    ("€5", "5 dollars"),
    ("50 mm", "5 cm"),
    ("6 feet 3 inches", "6 feet 2 inches"),
    ("12 345", "12345"),
    ("5 000", "5"),
    ("5 000", "0"),
    ("5 0000", "50000"),
    ("2e3", "1e3"),
    ("**5**", "55"),
    ("-72", "72"),
    ("72 or 73", "72"),
    ("\\boxed{5}, not 72", "72"),
    ("#### 5\nthat is 72", "72"),
    ("#### 72\nthat is 5", "5"),
    ("12, so \\boxed{2\\sqrt{3}}", "12"),
    ("\\boxed{\\sqrt{2}}", "2"),
    ("\\boxed{few}, of 2", "2"),
    ("2^10", "2"),
    ("2^10", "10"),
    ("B2", "2"),
    ("1.2.3", "3"),
    ("0.3333", "1/3"),
    ("0.1", "0.1000000000000000000001"),
    ("16777217", "16777216"),
    ("1/0", "0"),
    ("1e999999999", "1"),
    ("9" * (MAX_DIGITS + 1), "9" * (MAX_DIGITS + 1) + ".0"),
    ("2", "\\sqrt{2}"),
    ("2", "2x"),
    ("12", "12 - x"),
    ("x+1", "2x+1"),
    ("2x+1", "x+1"),
    ("not Paris but London", "Paris"),
    ("Parisian", "Paris"),
    ("anything", ""),
    ("...", "?"),
]


def test_a_response_that_gives_the_answer_is_right_and_one_that_does_not_is_wrong() -> None:
    assert [case for case in RIGHT if not grade(*case)] == []
    assert [case for case in WRONG if grade(*case)] == []


STRICT_RIGHT = [
    ("#### 72", "72"),
    ("####72.", "72"),
    ("text\n#### 1,200\nmore 5", "1200"),
    ("#### $72.00", "72"),
    ("#### -5", "-5"),
    ("#### - 5", "-5"),
    ("####\n72", "72"),
    ("#### The answer is 72", "72"),
    ("#### \\boxed{72}", "72"),
    ("#### 3\n#### 72", "72"),
    ("#### Paris.", "paris"),
]
STRICT_WRONG = [
    ("#### 72\n#### 3", "72"),
    ("The answer is 72", "72"),
    ("\\boxed{72}", "72"),
    ("72 ####", "72"),
    ("####", "72"),
    ("#### none\n72", "72"),
    ("### 72", "72"),
    ("It is Paris", "paris"),
    ("", "72"),
]


def test_strict_reads_only_what_follows_the_last_mark() -> None:
    assert [case for case in STRICT_RIGHT if not grade(*case, strict=True)] == []
    assert [case for case in STRICT_WRONG if grade(*case, strict=True)] == []


def formatted(value: int) -> st.SearchStrategy[str]:
    """An integer as people write it."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    spelled = st.sampled_from([str(size), f"{size:,}", f"{size}.0", f"{size:,}.00", f"00{size}", f"{size}."])
    signed = st.sampled_from([sign, "\u2212"] if sign else ["", "+"])
    number = st.builds(lambda s, d: f"{s}{d}", signed, spelled)
    dressed = st.sampled_from(
        ["{}", "${}", "{}%", "{} apples", "**{}**", "({})", "${}$", "\\boxed{{{}}}", "#### {}", "= {}\n", "is {}, yes"]
    )
    before = st.sampled_from(["", "So ", "3 + 4 = 7 and then ", "1. First\n2. Then ", "on 2024-01-15: "])
    return st.builds(lambda b, d, n: b + d.format(n), before, dressed, number)


@given(value=st.integers(), draw=st.data())
def test_any_integer_in_any_writing_equals_itself_and_not_its_successor(value: int, draw: st.DataObject) -> None:
    response = draw.draw(formatted(value))
    assert grade(response, str(value))
    assert grade(response, f"{value:,}")
    assert not grade(response, str(value + 1))


@given(value=st.decimals(allow_nan=False, allow_infinity=False, places=4))
def test_a_decimal_is_read_exactly(value: object) -> None:
    read = quantity(to_plain_text(f"{value}"))
    assert read is not None
    assert read.value == Fraction(str(value))


@given(top=st.integers(-999, 999), bottom=st.integers(1, 999))
def test_a_fraction_equals_its_own_value_in_both_notations(top: int, bottom: int) -> None:
    sign = "-" if top < 0 else ""
    assert grade(f"\\boxed{{{sign}\\frac{{{abs(top)}}}{{{bottom}}}}}", f"{top}/{bottom}")
    assert list(numbers(f"{top}/{bottom}")) == [Fraction(top, bottom)]


@given(response=st.text(), answer=st.text(), strict=st.booleans())
def test_any_two_texts_get_a_verdict(response: str, answer: str, strict: bool) -> None:
    assert grade(response, answer, strict) in (True, False)


MACROS = ["\\boxed{", "\\boxed{}", "\\boxed{ ", "\\frac{", "\\frac{1}", "#### "]
PAIRS = ["1,", ",111", "1/", "1.", "1 ", "1 1/", "10^", "1e", "- ", "= - ", "=\t", "-$", "x*", "1x10^"]
PARTS = [*"019,.-+/^ex*#$%{}=\n√a", *MACROS]


@given(pieces=st.lists(st.sampled_from(PARTS)))
def test_any_text_made_of_number_parts_gets_a_verdict(pieces: list[str]) -> None:
    text = "".join(pieces)
    for strict in (False, True):
        assert grade(text, "5", strict) in (True, False)
        assert grade("5", text, strict) in (True, False)


@pytest.mark.parametrize(
    "part",
    [*"1-$^{}#\\ a\n_'", *PAIRS, *MACROS],
)
def test_hostile_text_takes_linear_time(part: str) -> None:
    text = part * (100_000 // len(part))  # a quadratic scan would need far longer
    for response, answer in (("5", text), (text + "5", "5")):
        for strict in (False, True):
            assert grade(response, answer, strict) in (True, False)


def completion(text: str) -> Completion:
    return Completion(np.array([1], dtype=np.int32), text, StopReason.EOS, (Version(), Version()))


def prompt(**fields: object) -> Prompt:
    return Prompt("sums", np.array([1, 2], dtype=np.int32), "1+1=", fields)


def test_the_reward_is_1_for_a_right_answer_and_0_for_a_wrong_one_in_order() -> None:
    answered = [(prompt(answer="72"), completion("so 72")), (prompt(answer=72), completion("so 71"))]
    assert [j.reward for j in ExactAnswer().judge(answered)] == [1.0, 0.0]
    assert [j.reward for j in ExactAnswer(strict=True).judge(answered)] == [0.0, 0.0]


@pytest.mark.parametrize("fields", [{}, {"answer": None}, {"answer": " "}, {"answer": True}, {"answer": ["1"]}])
def test_a_prompt_without_an_answer_is_named(fields: dict[str, object]) -> None:
    asked = prompt(**fields)
    with pytest.raises(UserError, match=f"prompt {asked.key} of task sums has .* as its field 'answer'"):
        ExactAnswer().judge([(asked, completion("72"))])
